"""A hub on loopback, for tests of what is fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

REPO = "org/name"


class Hub(ThreadingHTTPServer):
    """A hub on loopback: a function per path, and what it was asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.routes: dict[str, Callable[[Handler], None]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.closing = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        raise AssertionError("the test's own server failed")


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        if self.path.endswith("/hf_quant_config.json") and self.path not in self.server.routes:
            self.answer(404)
            return
        self.server.asked.append((self.path, dict(self.headers)))
        with suppress(BrokenPipeError, ConnectionResetError):
            self.server.routes[self.path](self)

    def answer(self, status: int, body: bytes = b"", **headers: str):
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("Content_Length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self, data: bytes):
        """One byte at a time, for as long as the client holds out."""
        for byte in data:
            if self.server.closing.wait(0.02):
                return
            self.wfile.write(bytes([byte]))

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()
