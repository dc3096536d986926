"""The pages' way to this machine: its devices, a measurement on one of them, the ledger. Tests put others in their place."""

from __future__ import annotations

import os
from dataclasses import replace

import streamlit as st

from sizer.device.ledger.ledger import Ledger
from sizer.device.machine.host import Host
from sizer.device.machine.inventory import find_devices
from sizer.device.record.measurement import DeviceFacts
from sizer.device.trial.launch import MeasureJob, start
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.service.settings import is_public

MEASURING_VARIABLE = (
    "SIZER_MEASURING"  # whether this machine's devices are for whoever opens the app; not set: they are
)
ON = ("", "on", "1", "yes", "true")  # any other value is taken for off
KNOWN_SECONDS = 300  # how long a list of devices is believed


def may_measure() -> bool:
    """Whether this app may run models on its own machine, and whoever opens it may delete what was measured."""
    return not is_public() and os.environ.get(MEASURING_VARIABLE, "").strip().lower() in ON


def may_import() -> bool:
    """Whether whoever opens this app may add to its ledger what another machine is said to have measured."""
    return not is_public()


def get_devices() -> tuple[DeviceFacts, ...]:
    """The devices of this machine that a model can be measured on, with what is free on the host just now. Raises JobError."""
    free = Host().free_bytes()
    return tuple(replace(facts, free_bytes=free) if facts.kind == "cpu" else facts for facts in _listed())


@st.cache_data(ttl=KNOWN_SECONDS, max_entries=1, show_spinner="Looking for this machine's devices")
def _listed() -> tuple[DeviceFacts, ...]:
    return tuple(facts for facts in find_devices() if facts.kind != "meta")


def start_measurement(cell: Request, device: str) -> MeasureJob:
    """A job that measures one cell on a device; it waits while another session's measurement runs. Raises RequestError."""
    return start(format_query(cell, complete=True), device)


def get_ledger() -> Ledger:
    """The ledger of this machine's user."""
    return Ledger()
