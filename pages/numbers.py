"""About the numbers."""

import streamlit as st

from sizer.ui import frame
from sizer.ui.about import show_about
from sizer.ui.links import leave_address

frame.need_frame("numbers")
leave_address()
st.title("About the numbers", anchor=False)
show_about()
