"""The ledger's former address. The ledger is now a part of the page that measures."""

import streamlit as st

from sizer.ui import frame
from sizer.ui.ledger_view import go_to_ledger

frame.need_frame("ledger")
go_to_ledger()
st.switch_page("pages/measure.py", query_params=st.query_params.to_dict())
