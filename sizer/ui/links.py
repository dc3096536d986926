"""Read and write the page's address, and offer it to copy. Links in tables lead to the questions of their rows."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

import pandas as pd
import streamlit as st

from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import TASKS, task_of
from sizer.catalogue.sources import SOURCES
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query, split_query
from sizer.report.table import write_csv
from sizer.ui import defaults

# The script copies the text of the pressed button's mark. A text that begins with "?" is a query of the current page. It copies
# within the event of the click: later, a browser may refuse. Plain HTTP has no clipboard API, except on loopback.
# The script policy (sizer/ui/surface.py) allows this text by its hash.
COPY = """(() => {
  if (window.sizerCopies) return;
  window.sizerCopies = true;
  const old = text => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("refused");
  };
  document.addEventListener("click", async event => {
    const button = event.target.closest("[class*=st-key-copy_] button");
    if (!button) return;
    const key = button.closest("[class*=st-key-copy_]").className.match(/st-key-(copy_[a-z]+)/)[1];
    const said = document.querySelector(`[data-sizer-copies=${key}]`);
    let text = said.dataset.sizerText;
    if (text.startsWith("?")) text = location.origin + location.pathname + text;
    try {
      await (navigator.clipboard ? navigator.clipboard.writeText(text) : old(text));
      said.textContent = "Copied.";
    } catch {
      said.textContent = said.dataset.sizerRefused;
    }
    setTimeout(() => { said.textContent = ""; }, 5000);
  });
})()"""


def offer_link(query: str) -> None:
    """Show the button that copies the link of this page with a query; no button if the query is empty."""
    if query:
        offer_text("Copy the link", "copy_link", f"?{query}", ":material/link:", "The browser refused: open “Link and command”.")


def offer_text(label: str, key: str, text: str, icon: str, refused: str) -> None:
    """Show a button that copies a text, with a key such as "copy_link". `refused` is said if the browser does not allow it."""
    st.button(label, key=key, icon=icon, type="tertiary")
    words = f'data-sizer-copies="{key}" data-sizer-text="{escape(text)}" data-sizer-refused="{escape(refused)}"'
    st.html(f'<span role="status" {words}></span><script>{COPY}</script>', unsafe_allow_javascript=True, width="content")


# -------------------------------------------------------------------------------------------------------- links of rows


LINK = "Link"  # the column's name
LINK_COLUMN = st.column_config.LinkColumn(display_text="open", width="small")


def link_of(query: str) -> str:
    """Return the address of the page for a query; empty if it is too long for a link."""
    return f"{(st.context.url or '').rstrip('/')}/?{query}" if len(query) <= LONGEST_ADDRESS else ""


def frame_csv(frame: pd.DataFrame) -> str:
    """Return a table as CSV, without spaces in column names. Sizes are in GiB, as in the table."""
    rows = frame.astype(object).where(frame.notna(), None)
    names = [str(name).lower().replace(" ", "_").replace(",", "") for name in rows.columns]
    return write_csv(names, (dict(zip(names, row, strict=True)) for row in rows.itertuples(index=False)))


# ---------------------------------------------------------------------------------------------------------- the address


DEFAULT_ARCH = "arch=torchvision:resnet50"
OTHER_MODELS = (DEFAULT_ARCH, "arch=hf:gpt2")  # replacements for a refused model: images, and text
LONGEST_ADDRESS = 8_000  # characters; proxies, servers and chat programs cut longer addresses
ADDRESS = "address"  # session state: the last address that was read or written
PAGE = "page"  # session state: the page whose address that was
# Runs before Streamlit on a page without a question. It adds no entry to the history and causes no rerun.
# The script policy (sizer/ui/surface.py) allows this text by its hash.
WRITE_DEFAULT = 'if (!location.search) history.replaceState(null, "", "?%s")'
OPENED = "opened"  # session state: the refusals of the opened link, and the form's request for it
ASKED = "asked"  # session state: the query that last replaced the form's question
FORM = "form"  # the fields of the form
UNSEEN, AWAY = "?unseen", "?away"  # instead of an address, none of which begins with "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The request of an address, with refused keys at their defaults, and the refusals."""

    request: Request
    refusals: tuple[Refusal, ...] = ()


def read_link(query: str) -> Link:
    """Return the link of a query string. Never raises: refused keys are listed, the others kept. An empty string is the default."""
    if not query:
        return Link(request=_default_request())
    try:
        return Link(request=parse_query(query))
    except RequestError as error:
        if not error.refusals:
            whole = Refusal(key=error.what, given=error.given or "", allowed=error.allowed or "", todo=error.todo or "")
            return Link(request=parse_query(DEFAULT_ARCH), refusals=(whole,))
        refusals = error.refusals
    refused = {refusal.key for refusal in refusals}
    said = query.removeprefix("?").split("&")
    items = [item for item in said if _key(item) in KEYS and _key(item) not in refused]
    if not any(_key(item) == "arch" for item in items):
        rest = _with_another_model(items, said)
        return Link(request=rest.request, refusals=(*refusals, *rest.refusals))
    if items == said:  # the refused key is not in the address: another key needs it
        items = [item for item in said if _key(item) == "arch"] if len(said) > 1 else [DEFAULT_ARCH]
    rest = read_link("&".join(items))
    return Link(request=rest.request, refusals=(*refusals, *rest.refusals))


def _default_request() -> Request:
    """Return the question of the page without a link, with the page's dtypes and batch sizes."""
    request = parse_query(DEFAULT_ARCH)
    source, task = SOURCES[request.source], TASKS[task_of(request.mode, request.train)]
    sizes = defaults.sizes_for(source, request.name or "", find_gpu(request.gpu), task)
    return defaults.with_default_sizes(request, sizes)


@functools.cache
def write_default() -> str:
    """Return the script that writes the default question into an empty address."""
    return WRITE_DEFAULT % format_query(_default_request())


def _with_another_model(items: list[str], said: list[str]) -> Link:
    """Return the link with the default model that accepts most of the other keys, preferably of the same source."""
    asked = next((item for item in said if _key(item) == "arch"), "")
    models = sorted(OTHER_MODELS, key=lambda model: model.partition(":")[0] != asked.partition(":")[0])
    return min((read_link("&".join([model, *items])) for model in models), key=lambda link: len(link.refusals))


def _key(item: str) -> str:
    return item.partition("=")[0]


def read_address() -> str:
    """Return the query string of the browser's address bar, with repeated keys."""
    params = st.query_params
    return "&".join(f"{quote(key)}={quote(value)}" for key in params for value in params.get_all(key))


def follow_link(page: str = "estimate") -> Link | None:
    """Return the link in the address bar if it is new to this session (opened, or the browser went back); else None.

    `page` is the current page. The pages share one form, which keeps its values from one page to the next.
    """
    if st.session_state.get(PAGE, page) != page:
        leave_address()
    elif is_behind():
        _write(st.session_state[ASKED])  # the browser may have sent an older address, too
        return _opened(st.session_state[ASKED])
    address = read_address()
    seen = st.session_state.get(ADDRESS, UNSEEN)
    st.session_state[ADDRESS], st.session_state[PAGE] = address, page
    if address == seen or (seen == AWAY and not address):
        return None
    replace_question(address)
    return _opened(address)


def _opened(query: str) -> Link:
    link = read_link(query)
    st.session_state[OPENED] = (link.refusals, None)
    return link


def _write(query: str) -> None:
    if query and query != read_address() and len(query) <= LONGEST_ADDRESS:
        st.query_params.from_dict(split_query(query))
    st.session_state[ADDRESS] = read_address()


def replace_question(query: str) -> None:
    """Replace the form's question. The next run reads it, and each further run until the browser has shown it."""
    st.session_state[ASKED] = query
    note_replaced()


def note_replaced(fields: str = FORM) -> None:
    """Note that the page, not the reader, changes these fields.

    A browser sends the values of all fields with each click. A click before it has shown the new values sends the old ones.
    """
    times = f"{fields}_replaced"
    st.session_state[times] = st.session_state.get(times, 0) + 1


def note_shown(fields: str = FORM) -> None:
    """Show a hidden field that the browser sends back with the values of the fields above it."""
    key = f"{fields}_shown"
    st.session_state[key] = str(st.session_state.get(f"{fields}_replaced", 0))
    st.html(f"<style>.st-key-{key} {{ display: none }}</style>")
    st.text_input("Number of the question", key=key)


def is_behind(fields: str = FORM) -> bool:
    """Return True if the browser has sent the values that it showed before the page last changed these fields."""
    times = str(st.session_state.get(f"{fields}_replaced", 0))
    return st.session_state.get(f"{fields}_shown", times) != times


def leave_address() -> None:
    """Note that another page is shown. A return by the menu, with an empty address, finds the form unchanged."""
    if ADDRESS in st.session_state:
        st.session_state[ADDRESS] = AWAY


def keep_address(request: Request) -> tuple[Refusal, ...]:
    """Write `request` into the address. Return the refusals of the opened link until the form changes."""
    refusals, first = st.session_state[OPENED]
    if request != (first or request):
        refusals = ()
    st.session_state[OPENED] = (refusals, first or request)
    if read_link(read_address()).request != request:
        st.query_params.from_dict(address_of(request) or {})
        st.session_state[ADDRESS] = read_address()
    return refusals


def offer_copy(request: Request) -> None:
    """Show the button that copies the complete link, if it is short enough to send."""
    query = format_query(request, complete=True)
    offer_link(query if len(query) <= LONGEST_ADDRESS else "")


def show_link(request: Request) -> None:
    """Show the complete link with the selected cell, and the equivalent command."""
    query = format_query(request, complete=True)
    st.markdown("**Link to this page**, every choice written out:")
    if len(query) <= LONGEST_ADDRESS:
        st.code(f"{(st.context.url or '').rstrip('/')}/?{query}", language=None, wrap_lines=True)
    else:
        st.text(
            f"With this config the link would have {len(query):,} characters, too many for a link: send the config itself."
        )
    st.markdown("**The same numbers without the page**:")
    st.code(_command(request), language=None, wrap_lines=True)


def measure_command(cell: Request, device: str) -> str:
    """Return the command that measures one cell on a device and writes a file for the ledger."""
    return f"{_command(cell, 'measure')} --device {shlex.quote(device)} --json > measured.json"


def _command(request: Request, word: str = "estimate") -> str:
    query = format_query(request)
    if len(query) <= LONGEST_ADDRESS:
        return f"python -m sizer {word} {shlex.quote(query)}"
    rest = "&".join(item for item in query.split("&") if _key(item) != "arch")
    return f"python -m sizer {word} {shlex.quote(rest)} --config config.json"


def show_measure_link(request: Request) -> None:
    """Show the link to the page Measure with the selected cell."""
    st.page_link(
        "pages/measure.py",
        label="Measure it on a real device",
        icon=":material/speed:",
        query_params=address_of(request),
    )


def show_estimate_link(query: str) -> None:
    """Show the link to the estimate of a comparison; no link if a stranger's file names no query."""
    try:
        parameters = address_of(parse_query(query))
    except RequestError:
        return
    if parameters:
        st.page_link(
            "pages/estimate.py", label="Open its estimate", icon=":material/straighten:", query_params=parameters
        )


def address_of(request: Request) -> dict[str, str] | None:
    """Return the request as keys and values of an address; None if its config is too long."""
    query = format_query(request)
    return split_query(query) if len(query) <= LONGEST_ADDRESS else None
