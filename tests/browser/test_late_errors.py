"""Errors that arrive late, in a real browser: one request to the hub, one job, and the reason stays on the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import ANSWER_MS, running_app

QUIET_MS = 8000
MOST_MESSAGES = 150  # in that time, on a busy machine that still draws; there were 1,200 when the page ran for ever
SLOW = "arch=torchvision:maskrcnn_resnet50_fpn&dtype=float32,bfloat16&batch=1,2,3,4,5,6,7,8"


@contextmanager
def gated_hub() -> Iterator[tuple[str, list[str]]]:
    """A hub whose every repository is gated: its address, and the paths that were requested."""
    paths: list[str] = []

    class Gate(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()


def runs_of(page: Page) -> list[int]:
    """Return a list that grows by one number with each message that the page receives."""
    received: list[int] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(len(frame))))
    return received


def check_that_it_ends(page: Page, address: str, reason: str) -> None:
    """Check that the page shows the reason with "Try again", and is quiet from then on."""
    received = runs_of(page)
    page.goto(address)
    expect(page.get_by_text(reason).first).to_be_visible(timeout=ANSWER_MS)
    again = page.get_by_role("button", name="Try again")
    expect(again).to_be_visible()
    page.wait_for_timeout(2000)
    before = len(received)
    page.wait_for_timeout(QUIET_MS)
    assert len(received) - before < MOST_MESSAGES
    expect(again).to_be_visible()


def test_a_gated_model_is_asked_for_once(context: BrowserContext, tmp_path: Path) -> None:
    with gated_hub() as (hub, paths), running_app(tmp_path, HF_ENDPOINT=hub) as (address, _):
        first, second = context.new_page(), context.new_page()
        check_that_it_ends(first, f"{address}/?arch=hub:some-org/some-model", "is gated")
        assert len(paths) == 1
        check_that_it_ends(second, f"{address}/?arch=hub:some-org/some-model", "is gated")
        assert len(paths) == 1  # the server keeps the error for both visitors
        first.get_by_role("button", name="Try again").click()
        first.wait_for_timeout(QUIET_MS)
        assert len(paths) <= 2


def test_the_time_limit_ends_on_the_page(context: BrowserContext, tmp_path: Path) -> None:
    with running_app(tmp_path, SIZER_JOB_SECONDS="2") as (address, _):
        page = context.new_page()
        check_that_it_ends(page, f"{address}/?{SLOW}", "stopped after 2 s")
