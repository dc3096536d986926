"""The page Devices: devices of this machine, the line of code that chooses one, and a demonstration of its memory counters."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from sizer.base.errors import SizerError
from sizer.base.units import MIB, format_bytes
from sizer.device.machine import demonstration, inventory
from sizer.device.machine.demonstration import CACHED, EMPTIED, EMPTYING, Demonstration
from sizer.device.machine.inventory import PORTABLE, Inventory
from sizer.ui import measuring, remarks, vega
from sizer.ui.charts import draw
from sizer.ui.styling import COLOURS, GIBIBYTES, Scale
from sizer.ui.vega import Spec, nominal, quantitative

KNOWN_SECONDS = 60  # lifetime of a list of devices and their free memory
SHOWN = "demonstrated"  # session state: the device that was last demonstrated
ROW_HEIGHT = 46  # pixels of the chart for each line of code
SCALE = Scale(name="MiB", unit_bytes=MIB)
FIGURES = {  # title → field of a stage, and colour
    "Allocated": ("allocated_bytes", COLOURS["parameter"]),
    "Reserved": ("reserved_bytes", COLOURS["gradient"]),
    "Process": ("driver_bytes", COLOURS["outside PyTorch"]),
}

ALONE = "PyTorch finds no accelerator on this machine. Everything below also works on the CPU."
SWITCHED_OFF = "This deployment does not run work on its devices. The text above still applies."
RESERVED = (
    "Reserved memory is the memory that PyTorch's allocator has requested from the driver and keeps for later tensors. PyTorch "
    "itself returns the unused part before an allocation fails. `empty_cache()` in a training loop only costs time: the next step "
    "requests the same memory from the driver again."
)


@st.cache_data(ttl=KNOWN_SECONDS, max_entries=1, show_spinner="Looking for this machine's devices")
def find_inventory() -> Inventory:
    """Return the inventory of this machine. Tests replace this function. Raises JobError."""
    return inventory.find_inventory()


@st.cache_data(ttl=KNOWN_SECONDS, max_entries=8, show_spinner="Running it in a separate process")
def demonstrate(device: str) -> Demonstration:
    """Return the demonstration on a device. Concurrent sessions share one. Raises DeviceError, JobError."""
    return demonstration.demonstrate(device)


def show_devices() -> None:
    """Show the devices of this machine, and the demonstration. Raises JobError."""
    found = find_inventory()
    _show_list(found)
    st.header("What reserved memory is", anchor=False)
    with st.container(width=820):
        st.markdown(RESERVED)
    _show_demonstration(found)


def _show_list(found: Inventory) -> None:
    accelerators = [facts for facts in found.devices if facts.kind not in ("cpu", "meta")]
    if not accelerators:
        st.info(ALONE)
    remarks.show_lines(found.missing)
    size = st.column_config.NumberColumn(format="%.2f")
    st.dataframe(_frame(found), hide_index=True, column_config={"Memory, GiB": size, "Free, GiB": size})
    elsewhere = " It finds the accelerator where there is one, and the CPU elsewhere:"
    st.markdown(f"**The safe line for this machine.**{elsewhere if found.line.startswith(PORTABLE) else ''}")
    st.code(found.line, language=None, wrap_lines=True)
    st.caption(_versions(found.versions))


def _frame(found: Inventory) -> pd.DataFrame:
    sizes = {
        heading: pd.array([None if size is None else GIBIBYTES.of(size) for size in column], dtype="Float64")
        for heading, column in (
            ("Memory, GiB", [facts.total_bytes for facts in found.devices]),
            ("Free, GiB", [facts.free_bytes for facts in found.devices]),
        )
    }
    frame = pd.DataFrame(
        {
            "Device": [facts.device for facts in found.devices],
            "Name": [facts.name for facts in found.devices],
            **sizes,
            "Compute capability": [facts.capability_text for facts in found.devices],
            "Driver and runtime": [_versions(facts.versions) or None for facts in found.devices],
        }
    )
    return frame.dropna(axis="columns", how="all")


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


# ------------------------------------------------------------------------------------------------------ the demonstration


def _show_demonstration(found: Inventory) -> None:
    if not measuring.may_measure():
        st.info(SWITCHED_OFF)
        return
    names = [facts.device for facts in found.devices if facts.kind != "meta"]
    first = next((name for name in names if name != "cpu"), "cpu")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        device = st.segmented_control("Device", names, default=first, required=True, key="demonstration_device")
        run = st.button("Show it on this device", key="demonstrate", icon=":material/play_arrow:")
    if run:
        st.session_state[SHOWN] = device
    if st.session_state.get(SHOWN) != device:
        st.caption(
            "Creates tensors of up to 512 MiB in a separate process. This takes a few seconds and leaves nothing behind."
        )
        return
    try:
        shown = demonstrate(device)
    except SizerError as error:
        remarks.show_error(error)
        return
    _show_stages(shown)


def _show_stages(shown: Demonstration) -> None:
    left, right = st.columns(2, gap="medium")
    frame = stages_frame(shown)
    with left:
        st.markdown(f"**After each line of code**, in {SCALE.name}")
        draw(stages_chart(shown.device, frame), "stages_chart")
        st.caption(f"Process: {shown.driver}.")
    with right:
        st.markdown(f"**The same as numbers**, in {SCALE.name}")
        number = st.column_config.NumberColumn(format="%.1f")
        st.dataframe(frame, hide_index=True, column_config={title: number for title in FIGURES if title in frame})
        st.markdown(_costs(shown))
        remarks.show_lines(shown.remarks)


def stages_frame(shown: Demonstration) -> pd.DataFrame:
    """Return the lines of code and the figures after each, in MiB. Figures that the device does not report have no column."""
    columns = {title: [getattr(stage, field) for stage in shown.stages] for title, (field, _) in FIGURES.items()}
    return pd.DataFrame(
        {
            "Code": [stage.code or "(nothing yet)" for stage in shown.stages],
            **{
                title: pd.array([None if size is None else SCALE.of(size) for size in sizes], dtype="Float64")
                for title, sizes in columns.items()
                if any(size is not None for size in sizes)
            },
        }
    )


def stages_chart(device: str, frame: pd.DataFrame) -> Spec:
    """Return bars after each line of code of `stages_frame`: in tensors, reserved by PyTorch, held by the process."""
    used = [title for title in FIGURES if title in frame]
    lines = [f"{place}. {code}" for place, code in enumerate(frame["Code"], start=1)]
    rows = [
        {"Code": code, "Line": line, "figure": title, "size": float(size)}
        for title in used
        for code, line, size in zip(frame["Code"], lines, frame[title], strict=True)
        if not pd.isna(size)
    ]
    colours = vega.scale_of({title: FIGURES[title][1] for title in used})
    bars = vega.layer(
        vega.rows(*rows),
        "bar",
        x=quantitative("size", title=SCALE.name, axis={"tickCount": 5}),
        y=nominal("Line", title=None, sort=lines, axis={"labelLimit": 170, "ticks": False}),
        yOffset=nominal("figure", sort=used),
        color=nominal("figure", scale=colours, legend={"orient": "top", "title": " ", "columns": 2}),
        tooltip=[
            nominal("Code", title="after"),
            nominal("figure"),
            quantitative("size", title=SCALE.name, format=".1f"),
        ],
    )
    described = f"Memory on {device} after each line of code, in {SCALE.name}"
    return vega.layered([bars], described, height=ROW_HEIGHT * len(frame), config=vega.PLAIN)


def _costs(shown: Demonstration) -> str:
    """Return the measured cost of emptying the cache; empty if the device has no cache."""
    seconds = {cost.what: cost.spread.median_seconds for cost in shown.costs}
    if not {CACHED, EMPTYING, EMPTIED} <= seconds.keys():
        return ""
    cached, emptying, emptied = (f"{seconds[what] * 1e6:,.0f} µs" for what in (CACHED, EMPTYING, EMPTIED))
    return (
        f"Here an allocation of {format_bytes(shown.block_bytes)} takes **{cached}** from the cache. With `empty_cache()` before "
        f"it, it takes **{emptied}**, and `empty_cache()` itself **{emptying}** (medians)."
    )
