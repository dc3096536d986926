"""Compare two to four configurations."""

import streamlit as st

from sizer.base.errors import SizerError
from sizer.ui import frame, remarks
from sizer.ui.compare import show_compare
from sizer.ui.links import leave_address

frame.need_frame("compare")
leave_address()
st.title("Compare questions", anchor=False)
try:
    show_compare()
except SizerError as error:
    remarks.show_error(error)
