"""Size a model: the request on the left, its report on the right."""

import streamlit as st

from sizer.base.errors import SizerError
from sizer.ui import form, links, pasting, question_words, remarks, report_view, service
from sizer.ui.report_view import show_report

names = service.listed_names()
if link := links.follow_link():
    form.fill(link.request)

try:
    question_words.offer_form()
    with st.sidebar:
        st.title("How much device memory does it need?", anchor=False)
        request = form.ask(names)
        links.note_shown()
    if request is None:
        st.info("Name a model on the left: a repository of the hub, or a config.json to upload or paste.")
        st.stop()
    question_words.show_examples()
    pasting.offer_box()
    question_words.show_question(request)
    remarks.show_link_refusals(links.keep_address(request))
    place = st.container()  # of the progress line, so that the parts below keep their place
    request, answer = service.begin_or_preset(request)
    pasting.show_found(answer.report)
    if answer.report is not None:
        show_report(request, answer.report, growing=answer.job is not None)
    if answer.report is None or not report_view.has_figures(answer.report):
        report_view.show_last_answer()
    else:
        report_view.keep_answer(request, answer.report)
    with place:
        service.follow(answer)
except SizerError as error:
    pasting.show_found(None)
    remarks.show_error(error)
    service.offer_again(error)
    report_view.show_last_answer()

if not names:
    service.await_names()
