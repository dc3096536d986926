"""Measure: the same request, run on a real device, beside its estimate."""

import streamlit as st

from sizer.errors import SizerError
from sizer.ui import form, frame, links, question, remarks, service
from sizer.ui.measure import TITLES, show_measure

frame.need_frame("measure")
names = service.listed_names()
if link := links.follow_link("measure"):
    form.fill(link.request)

try:
    with st.sidebar:
        st.title("What should be measured?", anchor=False)
        request = form.ask(names, for_device=False)
    st.title("Measure it on a real device", anchor=False)
    if request is None:
        st.info("Name a model on the left: a repository of the hub, or a config.json to upload or paste.")
        st.stop()
    question.show_question(request, for_device=False)
    remarks.show_link_refusals(links.keep_address(request))
    show_measure(request)
except SizerError as error:
    remarks.show_error(error, TITLES)

if not names:
    service.await_names()
