"""Previews of links to this app in chat programs: a title and a description, in the HTML that is served for each page.

Streamlit serves one static file for all pages, with the title "Streamlit", and programs that preview links run no script. Routes
before Streamlit's serve the file with another title (`st.App`, streamlit/web/server/starlette, since 1.60). Under
`server.baseUrlPath` these routes match nothing: the title stays Streamlit's, and an empty address stays empty.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from urllib.parse import parse_qs, unquote_plus

import streamlit
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse
from starlette.routing import Route

from sizer.base.errors import RequestError
from sizer.query.request import Request
from sizer.query.text import MOST, as_query, parse_query
from sizer.ui.compare_questions import KEY
from sizer.ui.links import read_link, write_default
from sizer.ui.question_words import model_name, summary, tab_title

INDEX = Path(streamlit.__file__).with_name("static") / "index.html"
TITLE = "<title>Streamlit</title>"
ABOUT = (
    "How much device memory a PyTorch model needs, and whether it fits: real PyTorch code on meta tensors, replayed through the "
    "allocator's rules."
)
LONGEST_READ = 8_000  # characters of a link; longer links have the default preview
THREADS = 2
# Title of each page by its address; None if the title follows from the question.
PAGES = {
    "": None,
    "compare": None,
    "measure": None,
    "ledger": "Every measurement beside its estimate",
    "devices": "What PyTorch can use on this machine",
    "numbers": "About the numbers",
}


def routes() -> list[Route]:
    """Return the routes that serve the pages."""
    return [Route(f"/{page}", _respond) for page in PAGES]


async def _respond(request: HttpRequest) -> HTMLResponse:
    page = request.url.path.rpartition("/")[2]
    html = await asyncio.get_running_loop().run_in_executor(_threads(), page_html, page, request.url.query)
    return HTMLResponse(html, headers={"Cache-Control": "no-cache"})


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads that read links for previews, so that no link blocks the event loop."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="preview")


def page_html(page: str, query: str) -> str:
    """Return Streamlit's page with the title and description of a link's question. A stranger's text is escaped.

    The page without a link writes its question into the address.
    """
    title, description = map(escape, describe(page, query))
    tags: tuple[str, ...] = (
        f"<title>{title}</title>",
        f'<meta name="description" content="{description}" />',
        '<meta property="og:type" content="website" />',
        '<meta property="og:site_name" content="Sizer" />',
        f'<meta property="og:title" content="{title}" />',
        f'<meta property="og:description" content="{description}" />',
        '<meta name="twitter:card" content="summary" />',
    )
    if not page and not query:
        tags += (f"<script>{write_default()}</script>",)
    return _index().replace(TITLE, "\n    ".join(tags), 1)


@functools.cache
def _index() -> str:
    return INDEX.read_text(encoding="utf-8")


def describe(page: str, query: str) -> tuple[str, str]:
    """Return the title and the description of a page for a query."""
    if PAGES[page] is not None:
        return f"Sizer: {PAGES[page]}", ABOUT
    query = query[:LONGEST_READ]
    if "config:" in unquote_plus(unquote_plus(query)):  # a question of a comparison is encoded twice
        query = ""  # a config is never unpacked for a preview
    if not query:
        return "Sizer: how much device memory does it need?", ABOUT
    if page == "compare":
        requests = _compared(query)
        names = " and ".join(dict.fromkeys(map(model_name, requests))) or "questions"
        return f"Sizer: {names} compared", "; ".join(map(summary, requests)) or ABOUT
    request = read_link(query).request
    if page == "measure":
        return f"Sizer: {model_name(request)} measured", summary(request, for_device=False)
    return f"Sizer: {tab_title(request).removesuffix(' · Sizer')}", summary(request)


def _compared(query: str) -> list[Request]:
    """Return the questions of a link to the page Compare, without unreadable ones."""
    requests = []
    for text in parse_qs(query).get(KEY, [])[:MOST]:
        try:
            requests.append(parse_query(as_query(text)))
        except RequestError:
            continue
    return requests
