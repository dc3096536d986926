"""Make comparisons for the ledger: find this machine's devices, measure on one, or import another machine's measurements.

Tests replace the functions that access the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import JobError, RequestError, SizerError
from sizer.base.units import MIB
from sizer.device.comparison.comparison import Comparison
from sizer.device.ledger.ledger import ImportResult, Ledger
from sizer.device.machine.computer import Host
from sizer.device.machine.inventory import find_devices
from sizer.device.record.measurement import DeviceFacts
from sizer.device.record.recording import Measured
from sizer.device.trial.launch import MeasureJob, start
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.service.settings import is_public
from sizer.ui import remarks, service
from sizer.ui.turns import Awaited, result_of

MEASURING_VARIABLE = (
    "SIZER_MEASURING"  # whether visitors may use this machine's devices; unset means yes
)
ON = ("", "on", "1", "yes", "true")  # any other value means off
KNOWN_SECONDS = 300  # lifetime of a list of devices


def may_measure() -> bool:
    """Return True if visitors may run models on this machine and delete measurements."""
    return not is_public() and os.environ.get(MEASURING_VARIABLE, "").strip().lower() in ON


def may_import() -> bool:
    """Return True if visitors may import measurements of other machines."""
    return not is_public()


def get_devices() -> tuple[DeviceFacts, ...]:
    """Return the devices of this machine that can be measured, with the free memory of the host. Raises JobError."""
    free = Host().free_bytes()
    return tuple(replace(facts, free_bytes=free) if facts.kind == "cpu" else facts for facts in _listed())


@st.cache_data(ttl=KNOWN_SECONDS, max_entries=1, show_spinner="Looking for this machine's devices")
def _listed() -> tuple[DeviceFacts, ...]:
    return tuple(facts for facts in find_devices() if facts.kind != "meta")


def start_measurement(cell: Request, device: str) -> MeasureJob:
    """Start a job that measures one cell on a device. It waits for measurements of other sessions. Raises RequestError."""
    return start(format_query(cell, complete=True), device)


def get_ledger() -> Ledger:
    """Return the ledger of this machine's user."""
    return Ledger()


# ------------------------------------------------------------------------------------------------------ one measurement


POLL_SECONDS = 0.2


class Waiting(Awaited, Protocol):
    """A measurement, or a job of the job server, that a page waits for."""

    @property
    def progress(self) -> str: ...

    def cancel(self) -> None: ...


def run_measurement(cell: Request, device: str, line: DeltaGenerator) -> Comparison:
    """Measure one cell on a device of this machine and return the comparison. Progress goes to `line`. Raises SizerError.

    Streamlit may end this run at each update of `line` if the reader does something else. The measuring process is then killed.
    """
    return compare(wait_for(start_measurement(cell, device), line), line)


def compare(measured: Measured, line: DeltaGenerator) -> Comparison:
    """Return the comparison of a measurement with its estimate. Progress goes to `line`. Raises SizerError."""
    return wait_for(service.get_client().submit_comparison(measured), line)


def wait_for(job: Waiting, line: DeltaGenerator) -> Any:
    """Return the job's result. Cancel the job if this run ends first."""
    began = time.monotonic()
    try:
        while (result := result_of(job, POLL_SECONDS)) is None:
            line.text(f"{job.progress or 'waiting'} · {time.monotonic() - began:.0f} s")
    finally:
        job.cancel()
    return result


@contextmanager
def working(place: DeltaGenerator, title: str) -> Iterator[DeltaGenerator]:
    """Show a box in `place` with a line for progress and a button that stops the work. Remove it at the end."""
    try:
        with place.container(), st.status(title, expanded=True):
            line = st.empty()
            st.button("Stop", key=f"stop_{title}")
            yield line
    except SizerError:
        place.empty()
        raise
    place.empty()


# ---------------------------------------------------------------------------------------------------------- from a file


LIMIT_MIB = 16  # about three hundred comparisons; the server accepts no larger file (.streamlit/config.toml)
# Session state, each with the page's name behind it:
WAITING = "import_waiting"  # text of a file until the next run reads it
DONE = "import_done"  # result of the last file: ImportResult, or the error
EDITION = "import_edition"  # number of files; each file gets a new widget, so that it is read once
SWITCHED_OFF = "Importing is disabled in this public deployment. Its ledger holds local measurements only."
TITLES = remarks.TITLES | {RequestError: "This file was not imported", JobError: "Parts of the file were not imported"}


def ask_import(page: str) -> ImportResult | None:
    """Show the import, and return the result of a file that has just arrived, else None. An error stays until the next file."""
    if not may_import():
        st.info(SWITCHED_OFF)
        return None
    edition = st.session_state.setdefault(f"{EDITION}_{page}", 0)
    key = f"import_{page}_{edition}"
    st.file_uploader(
        "Import a measurement (JSON)",
        type=["json", "jsonl"],
        key=key,
        on_change=_take,
        args=(page, key),
        max_upload_size=LIMIT_MIB,
        help="Output of `python -m sizer measure … --json` or of the suite, or another ledger's export.",
    )
    imported = _read(page) if f"{WAITING}_{page}" in st.session_state else None
    _show_outcome(page)
    return imported


def _take(page: str, key: str) -> None:
    """Keep an uploaded file's text for this run, and replace the widget."""
    upload = st.session_state[key]
    if upload is None:
        return
    st.session_state[f"{EDITION}_{page}"] += 1
    st.session_state.pop(f"{DONE}_{page}", None)
    try:
        if upload.size > LIMIT_MIB * MIB:
            raise RequestError("the file is too large", given=f"{upload.size:,} bytes", allowed=f"{LIMIT_MIB} MiB")
        st.session_state[f"{WAITING}_{page}"] = upload.getvalue().decode("utf-8-sig")
    except UnicodeDecodeError:
        st.session_state[f"{DONE}_{page}"] = RequestError(
            "the file was not read", given="bytes that are not UTF-8", allowed="JSON"
        )
    except RequestError as error:
        st.session_state[f"{DONE}_{page}"] = error


def _read(page: str) -> ImportResult | None:
    text = st.session_state.pop(f"{WAITING}_{page}")
    try:
        with working(st.empty(), "Reading the file") as line:
            imported = get_ledger().import_json(text, compare=lambda measured: compare(measured, line))
    except SizerError as error:
        st.session_state[f"{DONE}_{page}"] = error
        return None
    st.session_state[f"{DONE}_{page}"] = imported
    return imported


def _show_outcome(page: str) -> None:
    match st.session_state.get(f"{DONE}_{page}"):
        case SizerError() as error:
            remarks.show_error(error, TITLES)
        case ImportResult(added=added, known=known, refused=refused):
            st.success(f"{_count(len(added))} added to the ledger, {known:,} known already.")
            if refused:
                st.warning(f"{_count(len(refused))} refused.")
                remarks.show_lines(refused)


def _count(number: int) -> str:
    return "1 comparison was" if number == 1 else f"{number:,} comparisons were"
