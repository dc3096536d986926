"""A real browser on the real app with its real job server. Without Chromium these tests are skipped, where CI is set they fail."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from sizer.device.ledger.ledger import Ledger

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")  # Debian's; elsewhere the browser that Playwright itself has installed
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
# Nothing listens at that port: no test reaches the hub. One thread: several on a busy machine wait for each other.
APART = {"HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
LEDGER = "ledger.sqlite3"
START_SECONDS = 60
PATIENCE_MS = 30_000  # for whatever the page has at hand already, on a machine that does other things too
ANSWER_MS = 240_000  # the job server imports torch before its first answer


@pytest.fixture(scope="session")
def app_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the app of this process keeps its log and its ledger."""
    return tmp_path_factory.mktemp("app")


@pytest.fixture(scope="session")
def app_url(app_folder: Path) -> Iterator[str]:
    """The address of `streamlit run app.py`, one for all files."""
    with running_app(app_folder) as (address, process):
        yield address
        assert "libtorch" not in _mapped_files(process), "the app's own process has loaded torch"


@contextmanager
def running_app(folder: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """`streamlit run app.py` on a free port of the loopback interface: its address and its process. Its log is in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    options = ["--server.headless=true", f"--server.port={port}"]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamlit", "run", "app.py", *options],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=os.environ | APART | {"SIZER_LEDGER": str(folder / LEDGER)} | environment,
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/_stcore/health", process, log)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            process.wait(timeout=30)
    assert "Traceback" not in log.read_text(), log.read_text()


def _mapped_files(process: subprocess.Popen) -> str:
    """What a process has mapped into its memory, on Linux; nothing on other systems."""
    maps = Path(f"/proc/{process.pid}/maps")
    return maps.read_text() if maps.exists() else ""


def _wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urlopen(address, timeout=1):
                return
        except (URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the app did not start: {log.read_text()}") from None
        time.sleep(0.05)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; one per module, because Playwright keeps an event loop running while it is open."""
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        path = str(CHROMIUM) if CHROMIUM.exists() else None
        if path is None and not Path(playwright.chromium.executable_path).exists() and not os.environ.get("CI"):
            pytest.skip(f"there is no browser: install Chromium at {CHROMIUM} or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser context of its own: no cookies, no storage, no history."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, app_url: str, app_folder: Path) -> Iterator[Page]:
    """A blank page, and an empty ledger. It must stay on the app's own host and end without an error in the console."""
    ledger = Ledger(app_folder / LEDGER)
    for row in ledger.rows():
        ledger.delete(row.id)
    page = context.new_page()
    strangers, errors = [], []
    page.on("request", lambda request: None if request.url.startswith(OWN) else strangers.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    assert not strangers
    assert not errors


OWN = ("http://127.0.0.1:", "data:", "blob:")


FITS = """width => innerWidth === width && document.documentElement.scrollWidth <= width
    && (main => main.scrollWidth <= main.clientWidth)(document.querySelector("[data-testid=stMain]"))"""


def fit(page: Page, width: int) -> None:
    """Makes the window so wide, and waits until nothing sticks out of it to the right: tables and charts follow a moment later."""
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_function(FITS, arg=width)
