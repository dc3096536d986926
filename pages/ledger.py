"""The ledger: every comparison of an estimate with a real device."""

import streamlit as st

from sizer.errors import SizerError
from sizer.ui import frame, remarks
from sizer.ui.ledger import TITLES, show_ledger
from sizer.ui.links import leave_address

frame.need_frame("ledger")
leave_address()
st.title("Every measurement beside its estimate", anchor=False)
try:
    show_ledger()
except SizerError as error:
    remarks.show_error(error, TITLES)
