"""Devices: accelerators that PyTorch can use on this machine."""

import streamlit as st

from sizer.base.errors import SizerError
from sizer.ui import frame, remarks
from sizer.ui.devices_view import show_devices
from sizer.ui.links import leave_address

frame.need_frame("devices")
leave_address()
st.title("What PyTorch can use on this machine", anchor=False)
try:
    show_devices()
except SizerError as error:
    remarks.show_error(error)
