"""Questions of the page Compare: the session state, the address, the fields, and the menus that add a changed question."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote

import streamlit as st

from sizer.base.errors import RequestError, SizerError
from sizer.catalogue.modes import MODES
from sizer.pasted.reading import read_question as read_text
from sizer.query.request import Request
from sizer.query.text import (
    MOST,
    as_query,
    changeable_keys,
    format_query,
    join_query,
    parse_query,
    query_keys,
    read_question,
    split_query,
    with_value,
)
from sizer.ui import pasting
from sizer.ui.links import LONGEST_ADDRESS, address_of, is_behind, note_replaced, note_shown, offer_link
from sizer.ui.remarks import show_error

KEY = "q"  # of the address, repeated for each question
QUESTIONS = "questions"  # session state: the queries as shown
PAGE = "pages/compare.py"
TWICE = ("arch=torchvision:resnet50&focus=float32:128", "arch=torchvision:resnet50&checkpointing=1&focus=float32:128")
FULL = f"{MOST} questions are compared already: remove one on the page Compare."


def open_questions() -> list[str]:
    """Return the questions of the page Compare: those of the address, or the kept ones if the address has none."""
    if is_behind(KEY):  # the browser may have sent an older address, too
        st.query_params.from_dict(parameters_of(st.session_state[QUESTIONS]))
        return list(st.session_state[QUESTIONS])
    given = [text for text in st.query_params.get_all(KEY) if text.strip()]
    if given:
        st.session_state[QUESTIONS] = [_canonical(text) for text in given]
    return list(st.session_state.get(QUESTIONS, ()))


def keep_questions(texts: Sequence[str]) -> None:
    """Keep these questions for the session, and write them into the address if it can hold them."""
    st.session_state[QUESTIONS] = [_canonical(text) for text in texts]
    st.query_params.from_dict(parameters_of(st.session_state[QUESTIONS]))
    note_replaced(KEY)


def parameters_of(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the address' keys and values; empty if the address would be too long."""
    return {KEY: list(texts)} if len(link_query(texts)) <= LONGEST_ADDRESS else {}


def link_query(texts: Sequence[str]) -> str:
    """Return the query string of a link to the page Compare."""
    return "&".join(f"{KEY}={quote(text, safe='/:@,')}" for text in texts)


def _canonical(text: str) -> str:
    """Return the query without defaults, or unchanged if it cannot be read."""
    try:
        return format_query(parse_query(as_query(text)))
    except RequestError:
        return text


def offer_comparison(request: Request) -> None:
    """Show a button that adds a question to the comparison and opens the page Compare."""
    known, query = st.session_state.get(QUESTIONS, []), format_query(request)
    full = len(known) >= MOST and query not in known
    label = "Compare with another question"
    if st.button(label, icon=":material/compare_arrows:", type="tertiary", disabled=full, help=FULL if full else None):
        st.session_state[QUESTIONS] = known if query in known else [*known, query]
        st.switch_page(PAGE, query_params=parameters_of(st.session_state[QUESTIONS]))


def offer_copy(requests: Sequence[Request]) -> None:
    """Show the button that copies the complete link, if it is short enough to send."""
    asked = _complete(requests)
    offer_link(asked if len(asked) <= LONGEST_ADDRESS else "")


def _complete(requests: Sequence[Request]) -> str:
    return link_query([format_query(request, complete=True) for request in requests])


def show_link(requests: Sequence[Request]) -> None:
    """Show the link to all questions, and the equivalent command."""
    asked = _complete(requests)
    st.markdown("**Link to this comparison**, every choice written out:")
    if len(asked) <= LONGEST_ADDRESS:
        st.code(f"{(st.context.url or '').rstrip('/')}?{asked}", language=None, wrap_lines=True)
    else:
        st.text(f"With these configs the link would have {len(asked):,} characters, too many for a link.")
    st.markdown("**The same figures without the page**:")
    queries = " ".join(shlex.quote(format_query(request)) for request in requests)
    st.code(f"python -m sizer compare {queries}", language=None, wrap_lines=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One change of a question: its title, and the changed keys of the query with their values."""

    title: str
    items: tuple[tuple[str, str], ...]


MENU = "variants"  # key of the menu; whether it is open
VARIANTS = (
    Variant(title="+ checkpointing", items=(("checkpointing", "1"),)),
    Variant(title="bfloat16", items=(("dtype", "bfloat16"),)),
    Variant(title="autocast to bfloat16", items=(("dtype", "amp-bfloat16"),)),
    Variant(title="LoRA", items=(("train", "adapter"),)),
    Variant(title="QLoRA", items=(("train", "adapter"), ("weights", "nf4-dq"))),
    Variant(title="AdamW in 8 bits", items=(("optimizer", "adamw-8bit"),)),
    Variant(title="SGD", items=(("optimizer", "sgd"),)),
    Variant(title="fused optimizer", items=(("optimizer_impl", "fused"),)),
    Variant(title="weights in 4 bits", items=(("weights", "nf4-dq"),)),
    Variant(title="weights in 8 bits", items=(("weights", "int8"),)),
    Variant(title="expandable segments", items=(("expandable", "1"),)),
    Variant(title="eager attention", items=(("attention", "eager"),)),
    Variant(title="inference", items=(("mode", "inference"),)),
)


def with_variant(request: Request, variant: Variant) -> Request | None:
    """Return the changed question; None if the question already has the change or refuses it."""
    changes, mode = dict(variant.items), MODES[request.mode]
    if changes.keys() & {*mode.unused} or ("train" in changes and not mode.trains):
        return None  # such keys change nothing there
    left = {"focus", *changes} if "dtype" in changes else set(changes)
    kept = {key: value for key, value in split_query(format_query(request)).items() if key not in left}
    try:
        changed = parse_query(join_query(kept | changes))
    except RequestError:
        return None
    return None if format_query(changed) == format_query(request) else changed


def offer_variants(request: Request) -> None:
    """Show a menu of the changes that apply to this question. Each change opens the comparison with and without it.

    The changes are tried once the menu is open.
    """
    menu = st.popover("+ variant", help="Compare this question with one change.", key=MENU, on_change="rerun")
    if not menu.open:
        return
    known = st.session_state.get(QUESTIONS, [])
    with menu:
        for variant in VARIANTS:
            if (changed := with_variant(request, variant)) is None:
                continue
            if st.button(variant.title, key=f"variant {variant.title}", type="tertiary"):
                _compare(known, request, changed)


def _compare(known: list[str], request: Request, changed: Request) -> None:
    """Open the page Compare. Extend the current comparison if this question is part of it and there is room."""
    query, other = format_query(request), format_query(changed)
    texts = known if query in known and len(known) < MOST else [query]
    st.session_state[QUESTIONS] = texts if other in texts else [*texts, other]
    st.switch_page(PAGE, query_params=parameters_of(st.session_state[QUESTIONS]))


def titles(requests: list[Request]) -> list[str]:
    """Return a title for each question; empty if it differs from the first one by more than one known change."""
    first = requests[0]
    found = {format_query(changed): row.title for row in VARIANTS if (changed := with_variant(first, row)) is not None}
    return ["as asked", *(found.get(format_query(request), "") for request in requests[1:])]


# --------------------------------------------------------------------------------------------------------------- fields


CHANGE, CHANGE_KEY, CHANGE_VALUE = "change_question", "change_key", "change_value"  # keys of the widgets
REFUSED = "change_refused"  # session state: why the last change was refused
WIDTH = 720  # pixels of a field, fewer in narrow windows
FIRST_KEY = "checkpointing"
PLACEHOLDER = "resnet50, or arch=torchvision:resnet50&batch=8&gpu=t4, or a link of this app, or a question in words"


def ask_questions(texts: Sequence[str]) -> dict[int, Request]:
    """Return the requests of the questions by number, from one field each. Refused questions are marked and left out."""
    requests = {}
    for number, text in enumerate(texts, start=1):
        with st.container(horizontal=True, vertical_alignment="bottom"):
            _ask(f"Question {number}", text, number)
            refused: RequestError | None = None
            try:
                requests[number] = read_question(text, number)
            except RequestError as error:
                refused = error
            else:
                _show_edit(requests[number])
            st.button("Remove", key=f"remove_{number}", icon=":material/close:", on_click=_put, args=(number, ""))
        if refused:
            show_error(refused)
    if len(texts) < MOST:
        _ask("Another question", "", len(texts) + 1)
    if requests and len(texts) < MOST:
        _ask_change(requests)
    if texts:
        note_shown(KEY)
    return requests


def _ask(label: str, text: str, number: int) -> None:
    key = f"question_{number}"
    st.session_state[key] = text
    st.text_input(label, key=key, placeholder=PLACEHOLDER, on_change=_take, args=(number,), width=WIDTH)


def _show_edit(request: Request) -> None:
    if address := address_of(request):
        st.page_link("pages/estimate.py", label="Size it", icon=":material/straighten:", query_params=address)


def _take(number: int) -> None:
    """Take the text of a field; a question in words becomes a query."""
    if is_behind(KEY):
        return
    text = st.session_state[f"question_{number}"]
    if "=" not in text and len(text.split()) > 1:
        with suppress(SizerError):  # the page then shows why it is no query
            found = read_text(text, None)
            text = join_query(pasting.address_of(found, {})) if "arch" in found.items else text
    _put(number, text)


def _put(number: int, text: str) -> None:
    """Replace a question by a text, or append it. An empty text removes the question."""
    texts = list(st.session_state.get(QUESTIONS, ()))
    texts[number - 1 : number] = [text] if text.strip() else []
    keep_questions(texts)


def _ask_change(requests: Mapping[int, Request]) -> None:
    """Show the fields that add a question: an existing question with one changed value."""
    allowed = {key.name: key.allowed for key in query_keys()}
    names = list(changeable_keys())
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox("Copy of", list(requests), format_func=_title, key=CHANGE, width=150)
        key = st.selectbox("with a changed", names, index=names.index(FIRST_KEY), key=CHANGE_KEY, width=180)
        st.text_input("New value", key=CHANGE_VALUE, help=allowed[key], placeholder="empty for the default", width=260)
        st.button("Add", icon=":material/add:", on_click=_add_changed, args=(dict(requests),))
    if refused := st.session_state.pop(REFUSED, None):
        show_error(refused)


def _title(number: int) -> str:
    return f"question {number}"


def _add_changed(requests: Mapping[int, Request]) -> None:
    state = st.session_state
    try:
        changed = with_value(requests[state[CHANGE]], state[CHANGE_KEY], state[CHANGE_VALUE])
    except RequestError as error:
        state[REFUSED] = error
        return
    keep_questions([*state.get(QUESTIONS, ()), format_query(changed)])
