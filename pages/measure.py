"""Measure: compare a real run of a question with its estimate, and list earlier measurements."""

import streamlit as st

from sizer.base.errors import SizerError
from sizer.ui import form, frame, ledger_view, links, measure, question_words, remarks, service

frame.need_frame("measure")
names = service.listed_names()
opened = ledger_view.open_comparison()
part = ledger_view.RUN if opened is not None else ledger_view.ask_part()
if opened is not None or part == ledger_view.LEDGER:
    links.leave_address()
    try:
        ledger_view.show_ledger() if opened is None else ledger_view.show_one(opened)
    except SizerError as error:
        remarks.show_error(error, ledger_view.TITLES)
    st.stop()

if link := links.follow_link("measure"):
    form.fill(link.request)
try:
    question_words.offer_form()
    with st.sidebar:
        st.title("What should be measured?", anchor=False)
        request = form.ask(names, for_device=False)
        links.note_shown()
    st.title("Measure it on a real device", anchor=False)
    if request is None:
        st.info("Name a model on the left: a repository of the hub, or a config.json to upload or paste.")
        st.stop()
    question_words.show_question(request, for_device=False)
    remarks.show_link_refusals(links.keep_address(request))
    measure.show_measure(request)
except SizerError as error:
    remarks.show_error(error, measure.TITLES)

if not names:
    service.await_names()
