"""The app as strangers have it: what it serves, refuses, hides and says, in public mode, by a real server and a real browser."""

from __future__ import annotations

import http.client
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, ConsoleMessage, expect

from sizer.ui import devices_view, measure, measuring
from tests.browser.conftest import ANSWER_MS, running_app
from tests.processes.running import is_running, wait_until

SMALL = "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32&batch=1&image=64"


@pytest.fixture(scope="module")
def public_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An app in public mode, its address; it lets nobody in before a job has run."""
    hosts = {"STREAMLIT_SERVER_ALLOWED_HOSTS": "127.0.0.1"}
    folder = tmp_path_factory.mktemp("public")
    with running_app(folder, SIZER_PUBLIC="1", **hosts) as (address, _):
        yield address


def ask(address: str, path: str, *, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """The response, read to its end."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    response.body = response.read()
    connection.close()
    return response


def upgrade(address: str, **headers: str) -> int:
    """The status with which the server answers who wants to open Streamlit's websocket."""
    wanted = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return ask(address, "/_stcore/stream", **wanted, Sec_WebSocket_Key="dGhlIHNhbXBsZSBub25jZQ==", **headers).status


def test_alive_and_ready(public_app):
    for path in ("/healthz", "/readyz"):
        response = ask(public_app, path)
        assert (response.status, response.body) == (200, b"ok\n")


@pytest.mark.parametrize("path", ["/", "/measure", "/healthz", "/_stcore/health", "/static/js/nothing.js"])
def test_every_response_has_the_headers(public_app, path):
    response = ask(public_app, path)
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'self'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "same-origin"


@pytest.mark.parametrize(
    "path", ["/_stcore/metrics", "/_stcore/metrics/", "/_stcore/agent/openapi.json", "//_stcore/metrics"]
)
def test_what_is_not_for_visitors_is_hidden(public_app, path):
    response = ask(public_app, path)
    assert b"session" not in response.body
    assert response.status in (400, 404)


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "null", "http://[", "http://127.0.0.1.example:80", ""])
def test_what_comes_from_another_site_is_refused_at_once(public_app, origin):
    began = time.monotonic()
    assert ask(public_app, "/", Origin=origin).status == 403
    assert upgrade(public_app, Origin=origin) == 403
    # Streamlit itself asks an outside address first, twice for two seconds.
    assert time.monotonic() - began < 2


def test_what_comes_from_its_own_pages_or_from_none_is_served(public_app):
    assert ask(public_app, "/", Origin=public_app).status == 200
    assert upgrade(public_app, Origin=public_app) == 101
    assert upgrade(public_app) == 101


def test_another_host_name_is_refused(public_app):
    assert ask(public_app, "/", Host="elsewhere.example").status == 400
    assert upgrade(public_app, Host="elsewhere.example") in (400, 403)


def complaint(message: ConsoleMessage) -> str:
    """An error in the browser's console; nothing for Streamlit's search for the app's root from the address of a page."""
    searches = re.search(r"/(measure|devices|numbers)/_stcore/", message.location["url"])
    return "" if message.type != "error" or searches else f"{message.text} ({message.location['url']})\n"


def test_pages_draw_under_the_policy_and_say_what_is_off(public_app: str, context: BrowserContext):
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(complaint(message)))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{public_app}/?{SMALL}")
    expect(page.get_by_text("Memory over one step")).to_be_visible(timeout=ANSWER_MS)
    expect(page.get_by_test_id("stVegaLiteChart").last.locator("canvas, svg").first).to_be_visible()
    page.set_viewport_size({"width": 500, "height": 844})
    page.get_by_role("button", name="Edit the question").click()
    expect(page.get_by_test_id("stSidebar").get_by_text("Model source").first).to_be_in_viewport()
    page.set_viewport_size({"width": 1400, "height": 1000})
    page.goto(f"{public_app}/measure?{SMALL}")
    expect(page.get_by_text(measure.SWITCHED_OFF)).to_be_visible()
    expect(page.get_by_text(measuring.SWITCHED_OFF)).to_be_attached()
    page.goto(f"{public_app}/devices")
    expect(page.get_by_text(devices_view.SWITCHED_OFF)).to_be_visible(timeout=ANSWER_MS)
    page.goto(f"{public_app}/numbers")
    expect(page.get_by_text("seccomp: ").first).to_be_visible()
    assert "".join(errors) == ""


def test_app_ends_in_order_with_all_that_it_started(tmp_path: Path):
    with running_app(tmp_path) as (_, process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        started = [int(child) for child in wait_until(lambda: children.read_text().split())]
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=30)
        wait_until(lambda: not any(map(is_running, started)))
    assert "Traceback" not in (tmp_path / "log").read_text()
