"""The fields of the questions that are compared, and the control that adds one with a single thing changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from sizer.base.errors import RequestError
from sizer.query.request import Request
from sizer.query.several import MOST, changeable_keys, read_question, with_value
from sizer.query.text import format_query, query_keys
from sizer.ui.compared import QUESTIONS, keep_questions
from sizer.ui.links import address_of
from sizer.ui.remarks import show_error

CHANGE, CHANGE_KEY, CHANGE_VALUE = "change_question", "change_key", "change_value"  # keys of the widgets
REFUSED = "change_refused"  # session state: why the last change was not taken
WIDTH = 720  # pixels of a field, less where the window is narrower
FIRST_KEY = "checkpointing"
PLACEHOLDER = "resnet50, or arch=torchvision:resnet50&batch=8&gpu=t4, or a link of this app"


def ask_questions(texts: Sequence[str]) -> dict[int, Request]:
    """The requests of the questions by number, each in a field of its own; those that are refused are shown so and left out."""
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
    return requests


def _ask(label: str, text: str, number: int) -> None:
    key = f"question_{number}"
    st.session_state[key] = text
    st.text_input(label, key=key, placeholder=PLACEHOLDER, on_change=_take, args=(number,), width=WIDTH)


def _show_edit(request: Request) -> None:
    if address := address_of(request):
        st.page_link("pages/estimate.py", label="Size it", icon=":material/straighten:", query_params=address)


def _take(number: int) -> None:
    _put(number, st.session_state[f"question_{number}"])


def _put(number: int, text: str) -> None:
    """Put a text in the place of a question, or behind the last one; an empty one removes it."""
    texts = list(st.session_state.get(QUESTIONS, ()))
    texts[number - 1 : number] = [text] if text.strip() else []
    keep_questions(texts)


def _ask_change(requests: Mapping[int, Request]) -> None:
    """Ask for a question that is another one with one value changed."""
    allowed = {key.name: key.allowed for key in query_keys()}
    names = list(changeable_keys())
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox("Add the same as", list(requests), format_func=_title, key=CHANGE, width=150)
        key = st.selectbox("with another", names, index=names.index(FIRST_KEY), key=CHANGE_KEY, width=180)
        st.text_input("namely", key=CHANGE_VALUE, help=allowed[key], placeholder="nothing for its default", width=260)
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
