"""The page under AppTest, with a scripted job client in place of the job server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

from sizer.ui import service
from tests.ui.clients import ScriptedClient
from tests.ui.reports import report_for

APP = Path(__file__).parents[2] / "app.py"


@pytest.fixture(autouse=True, scope="session")
def packages_read_once() -> Iterator[None]:
    """AppTest looks for components in the metadata of every installed package each time that it is run first: 0.3 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ScriptedClient:
    """A client that reports on whatever is asked."""
    return install(monkeypatch, ScriptedClient(report_for))


def install(monkeypatch: pytest.MonkeyPatch, client: ScriptedClient) -> ScriptedClient:
    """Puts a client in place of the process's own."""
    monkeypatch.setattr(service, "get_client", lambda: client)
    return client


@pytest.fixture
def open_page() -> Iterator[Callable[..., AppTest]]:
    """A function that opens a page, the main one or one of `pages/`, at a query given as keywords; none may end in an exception."""
    pages: list[AppTest] = []

    def open_at(name: str | None = None, /, **query: str) -> AppTest:
        page = AppTest.from_file(str(APP), default_timeout=30)
        if name is not None:
            page.switch_page(f"pages/{name}.py")
        for key, value in query.items():
            page.query_params[key] = value
        pages.append(page)
        return page.run()

    yield open_at
    for page in pages:
        assert not page.exception


def open_tab(page: AppTest, name: str) -> AppTest:
    """The page after a tab below its answer was opened: what the others have is not drawn."""
    page.session_state["details"] = name
    return page.run()


def texts(page: AppTest) -> list[str]:
    """Everything that the page shows as plain text."""
    return [element.value for element in page.text]


def markup(page: AppTest) -> str:
    """Everything that the page shows as markdown: a stranger's words must never be in here."""
    kinds = (page.markdown, page.title, page.header, page.subheader, page.caption, page.error, page.warning, page.info)
    metrics = [part for metric in page.metric for part in (metric.label, metric.value, metric.delta)]
    return "\n".join([*(element.value for kind in kinds for element in kind), *metrics])
