"""Run on a device, on the page Measure: choose cell and device, show the expected memory, run, and show the comparison."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import DeviceError, JobError
from sizer.base.units import MIB, format_bytes, pluralize
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.modes import MODES
from sizer.device.comparison.comparison import Comparison
from sizer.device.comparison.counterpart import gpu_of
from sizer.device.record.measurement import DeviceFacts
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.estimate import Estimate
from sizer.report.report import Report
from sizer.ui import measuring, remarks, service
from sizer.ui.comparison_view import show_comparison
from sizer.ui.focus import ask_cell, choose
from sizer.ui.headline import sample_size, subject
from sizer.ui.ledger_view import go_to_ledger
from sizer.ui.links import measure_command
from sizer.ui.measuring import ask_import, run_measurement, working

REQUESTED = "measure_requested"  # session state: the target of the pressed button, until its run begins
RESULT = "measure_result"  # session state: a comparison, and the target on the page when it arrived
PYTORCH_BYTES = 500 * MIB  # bytes of a process that has imported torch, torchvision and transformers, without mapped files
ELSEWHERE, ELSEWHERE_RANKS = "cuda:0", "cuda"
HOST_KINDS = ("cpu", "mps")  # their memory is the host's: out of memory would harm the whole machine

TITLES = remarks.TITLES | {JobError: "The measurement was not finished"}

Target = tuple[str, str]  # a cell's query and a device

NO_ACCELERATOR = (
    "PyTorch finds no accelerator on this machine, so what can be measured here is its CPU. To measure on a "
    "GPU, run the command below on a machine that has one and import the result here."
)
RANKS = (
    "Several ranks are measured from the command line, in one process each. The command below runs each rank on a GPU over NCCL; "
    "with `--device cpu` the ranks share the machine's cores over gloo. Import its output here."
)
NO_ESTIMATE = "A measurement needs an estimate to compare with."
SWITCHED_OFF = "Measuring is disabled in this deployment: run the command below where Sizer is installed."


def show_measure(request: Request) -> None:
    """Show the form, run a measurement on request, and show the comparison. Raises SizerError."""
    devices = measuring.get_devices() if measuring.may_measure() else ()
    with st.container(horizontal=True, gap="medium"):
        cell = ask_cell(request, service.proposed_focus(request))
        several = cell.parallel != "none"
        facts = None if several else _ask_device(devices)
    target = (format_query(cell), facts.device if facts else "")
    here, below = st.container(), st.container()
    _measure_elsewhere(cell, target, alone=several or all(facts.kind == "cpu" for facts in devices))
    with here:
        if several:
            st.info(RANKS)
        else:
            _measure_here(cell, facts, target, requested=st.session_state.pop(REQUESTED, None) == target)
    asked, comparison = st.session_state.get(RESULT, (None, None))
    if asked == target:
        with below:
            _show_result(comparison)


def _ask_device(devices: tuple[DeviceFacts, ...]) -> DeviceFacts | None:
    """Show the choice of a device and return it, by default an accelerator; None if there is no device."""
    if not devices:
        return None
    known = {facts.device: facts for facts in devices}
    first = next((name for name, facts in known.items() if facts.kind != "cpu"), devices[0].device)
    return known[choose("Measure on", list(known), first, key="measure_device")]


def _measure_here(cell: Request, facts: DeviceFacts | None, target: Target, *, requested: bool) -> None:
    """Show the expected memory and the button, and run the measurement if the button was pressed."""
    if facts is None:
        st.info(SWITCHED_OFF if not measuring.may_measure() else NO_ACCELERATOR)
        return
    report = service.report_on(_for_device(cell, facts))
    if report is None:  # the reader has stopped it
        return
    remarks.show_failures(report)
    if not report.estimates:
        st.info(NO_ESTIMATE)
        return
    st.text(what_it_takes(cell, report, facts))
    lack = lack_of_memory(report.estimates[0], facts)
    if lack:
        st.warning(lack)
    refused = bool(lack) and facts.kind in HOST_KINDS
    place = st.empty()
    if requested and not refused:
        _run(place, cell, target)
    place.button(
        "Measure",
        key="measure",
        icon=":material/speed:",
        on_click=_request_run,
        args=(target,),
        disabled=refused,
    )


def _request_run(target: Target) -> None:
    st.session_state[REQUESTED] = target
    st.session_state.pop(RESULT, None)


def _run(place: DeltaGenerator, cell: Request, target: Target) -> None:
    with working(place, "Measuring") as line:
        comparison = run_measurement(cell, target[1], line)
    st.session_state[RESULT] = (target, comparison)
    try:
        measuring.get_ledger().add(comparison)
    except JobError as error:
        remarks.show_error(error, {JobError: "The measurement is below, but could not be kept"})


def _for_device(cell: Request, facts: DeviceFacts) -> Request:
    """Return the cell for a device of this machine, if the catalogue knows the device."""
    try:
        key = gpu_of(facts).key
    except DeviceError:
        return cell
    return replace(cell, gpu=key) if key in GPUS else cell


def what_it_takes(cell: Request, report: Report, facts: DeviceFacts) -> str:
    """Return the work, the device and the estimated memory as plain text."""
    estimate = report.estimates[0]
    model = subject(cell, report).replace("\\", "")
    mode = MODES[cell.mode]
    work = f"{mode.headline} {pluralize(cell.new, 'token')} with" if mode.generates else mode.headline
    work = f"{work} {model} at batch {estimate.batch}{sample_size(report)} in {estimate.dtype}"
    steps = "" if mode.generates else ", two whole steps"
    free = f", {format_bytes(facts.free_bytes)} free" if facts.free_bytes is not None else ""
    peak, process = format_bytes(estimate.peak_allocated_bytes), format_bytes(_process_bytes(estimate, facts))
    return (
        f"{work}{steps} on {facts.device} ({facts.name}{free}). "
        f"The estimate: {peak} allocated at the peak, about {process} for the whole process."
    )


def _process_bytes(estimate: Estimate, facts: DeviceFacts) -> int:
    """Return the process's bytes on the device; on a host with PyTorch's own memory."""
    return estimate.process_bytes + (PYTORCH_BYTES if facts.kind in HOST_KINDS else 0)


def lack_of_memory(estimate: Estimate, facts: DeviceFacts) -> str:
    """Return the reason why the device cannot hold the work; empty if it may."""
    there = facts.total_bytes if facts.free_bytes is None else facts.free_bytes
    on_host = facts.kind in HOST_KINDS
    needs = _process_bytes(estimate, facts) if on_host else estimate.peak_allocated_bytes
    if there is None or needs <= there:
        return ""
    lack = f"This needs {format_bytes(needs)} where {format_bytes(there)} are free"
    if on_host:
        return f"{lack}: it is not run here, to protect the machine. Choose a smaller batch or another dtype."
    return f"{lack}: expect it to run out of memory. That is also a result, and does no harm."


def _measure_elsewhere(cell: Request, target: Target, *, alone: bool) -> None:
    """Show the command for another machine and the import of its result, expanded if this machine cannot measure."""
    empty = st.session_state.get(RESULT, (None, None))[0] != target
    if alone and target[1] and empty:
        st.info(NO_ACCELERATOR)
    with st.expander("On another machine", expanded=alone and empty):
        st.markdown("**Run the same measurement there**, where Sizer and its requirements are installed:")
        device = ELSEWHERE if cell.parallel == "none" else ELSEWHERE_RANKS
        st.code(measure_command(cell, device), language=None, wrap_lines=True)
        imported = ask_import("measure")
    if imported and imported.added:
        comparison = measuring.get_ledger().comparison(imported.added[0])
        st.session_state[RESULT] = (target, comparison)


def _show_result(comparison: Comparison) -> None:
    show_comparison(comparison)
    st.button("All comparisons: the ledger", icon=":material/table_view:", type="tertiary", on_click=go_to_ledger)
    st.divider()
