"""A measurement from the button to its comparison: run, compare, show what is being done, give up when the reader leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import SizerError
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.recording import Measured
from sizer.query.request import Request
from sizer.ui import machine, service
from sizer.ui.turns import Awaited, result_of

POLL_SECONDS = 0.2


class Waiting(Awaited, Protocol):
    """What a page waits for: a measurement or a job of the job server."""

    @property
    def progress(self) -> str: ...

    def cancel(self) -> None: ...


def run_measurement(cell: Request, device: str, line: DeltaGenerator) -> Comparison:
    """The comparison of one cell on a device of this machine, with its progress on `line`. Raises SizerError.

    Every update of `line` is also where Streamlit ends this run when the reader does something else; the process that measures
    is killed then.
    """
    return compare(wait_for(machine.start_measurement(cell, device), line), line)


def compare(measured: Measured, line: DeltaGenerator) -> Comparison:
    """The measurement beside its estimate, with the job's progress on `line`. Raises SizerError."""
    return wait_for(service.get_client().submit_comparison(measured), line)


def wait_for(job: Waiting, line: DeltaGenerator) -> Any:
    """The job's result; a job that nobody waits for any more is cancelled."""
    began = time.monotonic()
    try:
        while (result := result_of(job, POLL_SECONDS)) is None:
            line.text(f"{job.progress or 'waiting'} · {time.monotonic() - began:.0f} s")
    finally:
        job.cancel()
    return result


@contextmanager
def working(place: DeltaGenerator, title: str) -> Iterator[DeltaGenerator]:
    """A box in `place` with a line for progress and a button that stops the work, gone afterwards."""
    try:
        with place.container(), st.status(title, expanded=True):
            line = st.empty()
            st.button("Stop", key=f"stop_{title}")
            yield line
    except SizerError:
        place.empty()
        raise
    place.empty()
