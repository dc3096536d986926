"""The questions that are compared: kept through this session, and in the address of the page that compares them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from urllib.parse import quote

import streamlit as st

from sizer.base.errors import RequestError
from sizer.query.request import Request
from sizer.query.several import MOST, as_query
from sizer.query.text import format_query, parse_query
from sizer.ui.copying import offer_link
from sizer.ui.links import LONGEST_ADDRESS

KEY = "q"  # of the address, once for each question
QUESTIONS = "questions"  # session state: the queries, as they are shown
PAGE = "pages/compare.py"
TWICE = ("arch=torchvision:resnet50&focus=float32:128", "arch=torchvision:resnet50&checkpointing=1&focus=float32:128")
FULL = f"{MOST} questions are compared already: remove one on the page Compare."


def open_questions() -> list[str]:
    """The questions of the page that compares: those of the address where it has any, else those that were kept."""
    given = [text for text in st.query_params.get_all(KEY) if text.strip()]
    if given:
        st.session_state[QUESTIONS] = [_canonical(text) for text in given]
    return list(st.session_state.get(QUESTIONS, ()))


def keep_questions(texts: Sequence[str]) -> None:
    """Compare these questions from now on, and make the address say so where it can hold them."""
    st.session_state[QUESTIONS] = [_canonical(text) for text in texts]
    st.query_params.from_dict(address_of(st.session_state[QUESTIONS]))


def address_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """The address' keys and values; none where it would be too long."""
    return {KEY: list(texts)} if len(link_query(texts)) <= LONGEST_ADDRESS else {}


def link_query(texts: Sequence[str]) -> str:
    """The query string of a link to the page that compares."""
    return "&".join(f"{KEY}={quote(text, safe='/:@,')}" for text in texts)


def _canonical(text: str) -> str:
    """The query without what is at its default; as it was given where it cannot be read."""
    try:
        return format_query(parse_query(as_query(text)))
    except RequestError:
        return text


def offer_comparison(request: Request) -> None:
    """Show the button that puts a question beside those that are compared, and goes there."""
    known, query = st.session_state.get(QUESTIONS, []), format_query(request)
    full = len(known) >= MOST and query not in known
    label = "Compare with another question"
    if st.button(label, icon=":material/compare_arrows:", type="tertiary", disabled=full, help=FULL if full else None):
        st.session_state[QUESTIONS] = known if query in known else [*known, query]
        st.switch_page(PAGE, query_params=address_of(st.session_state[QUESTIONS]))


def offer_copy(requests: Sequence[Request]) -> None:
    """Show the button that copies the complete link, if the link is short enough to pass on."""
    asked = _complete(requests)
    offer_link(asked if len(asked) <= LONGEST_ADDRESS else "")


def _complete(requests: Sequence[Request]) -> str:
    return link_query([format_query(request, complete=True) for request in requests])


def show_link(requests: Sequence[Request]) -> None:
    """Show the one link to all questions, and the same for the command line."""
    asked = _complete(requests)
    st.markdown("**Link to this comparison**, every choice written out:")
    if len(asked) <= LONGEST_ADDRESS:
        st.code(f"{(st.context.url or '').rstrip('/')}?{asked}", language=None, wrap_lines=True)
    else:
        st.text(f"With these configs the link would have {len(asked):,} characters, too many to pass on.")
    st.markdown("**The same figures without the page**:")
    queries = " ".join(shlex.quote(format_query(request)) for request in requests)
    st.code(f"python -m sizer compare {queries}", language=None, wrap_lines=True)
