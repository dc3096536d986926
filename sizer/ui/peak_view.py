"""Memory alive at the peak of the selected cell: as a sentence, by module (also an icicle), by tensor, and as files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pandas as pd
import streamlit as st

from sizer.base.errors import SizerError
from sizer.base.units import format_bytes
from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import SOURCES
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.estimate import Estimate
from sizer.report.peak import ModuleBytes, PeakReport, with_children
from sizer.report.report import Report
from sizer.ui import service, vega
from sizer.ui.charts import draw, legend
from sizer.ui.exports import offer_download
from sizer.ui.headline import sample_size, verdict
from sizer.ui.page_cache import drawn_once
from sizer.ui.picture import Summary, alt_text
from sizer.ui.styling import COLOURS, INK, Scale, scale_for
from sizer.ui.turns import result_of
from sizer.ui.vega import Columns, Spec, nominal, quantitative

ASKED = "peak_asked"  # key of the switch, which stays on for the next selected cell


def show_peak(request: Request, report: Report, estimate: Estimate) -> None:
    """Show the tensors alive at the peak of an estimate, once the reader has switched on the trace."""
    if not st.toggle("Trace every tensor that is alive at the peak", key=ASKED, persist_state="session"):
        return
    if report.pending:
        st.caption("Available when the estimate is complete.")
        return
    cell = replace(request, dtypes=(estimate.dtype,), batches=(estimate.batch,), focus=None)
    with st.container():  # there with progress or without
        found = _ask(cell)
    if isinstance(found, PeakReport):
        _show_found(found)
        _offer_files(cell, report, estimate)
    else:
        st.text(f"It could not be traced: {found}")


def _ask(cell: Request) -> PeakReport | SizerError:
    """Return the answer, and show progress meanwhile. Leave the job if Streamlit ends this run for a newer one."""
    job, line = service.get_client().submit_peak(format_query(cell)), st.empty()
    try:
        with service.hold_jobs(job):
            while (found := result_of(job, service.POLL_SECONDS)) is None:
                line.text(job.progress or "waiting")
    except SizerError as error:
        return error
    line.empty()
    return found


@drawn_once
def _show_found(found: PeakReport) -> None:
    st.text(found.sentence)
    if found.remedy:
        st.text(found.remedy)
    st.markdown("**By module**, children under their parents; the strip below each name shows its memory by category")
    draw(icicle_chart(found.modules), "icicle")
    st.html(legend([category for category, size in found.at_peak.items() if size]))
    _show_table(modules_frame(found), height=260)
    st.markdown("**By tensor**, equal tensors in one row, largest first")
    _show_table(tensors_frame(found), height=320)
    if found.rest_count:
        st.caption(f"And {found.rest_count:,} smaller ones, {format_bytes(found.rest_bytes)} together.")


def _show_table(frame: pd.DataFrame, *, height: int) -> None:
    number = st.column_config.NumberColumn(format="%.3f")
    sizes = dict.fromkeys(frame.select_dtypes("float").columns, number)
    st.dataframe(frame, hide_index=True, height=height, column_config=sizes)


def tensors_frame(found: PeakReport) -> pd.DataFrame:
    """Return a row for each group of equal tensors."""
    scale = scale_for([found.allocated_bytes])
    return pd.DataFrame(
        {
            "Tensor": [group.tensor for group in found.tensors],
            "Count": [group.count for group in found.tensors],
            scale.name: [scale.of(group.bytes) for group in found.tensors],
            "What": [group.category for group in found.tensors],
            "Operator": [group.op for group in found.tensors],
            "Module": [group.module or "the model itself" for group in found.tensors],
            "Made in": [group.phase for group in found.tensors],
        }
    )


def modules_frame(found: PeakReport) -> pd.DataFrame:
    """Return a row for each module: its own bytes, the bytes with its children, and these by category."""
    scale = scale_for([found.allocated_bytes])
    own = {row.path: sum(row.by_category.values()) for row in found.modules}
    totals = with_children(found.modules)
    paths = sorted(totals, key=lambda path: -sum(totals[path].values()))
    columns = {
        "Module": [path or "(root)" for path in paths],
        f"With children, {scale.name}": [scale.of(sum(totals[path].values())) for path in paths],
        f"Own, {scale.name}": [scale.of(own.get(path, 0)) for path in paths],
    }
    for category in (name for name, size in found.at_peak.items() if size):
        columns[category.capitalize()] = [scale.of(totals[path].get(category, 0)) for path in paths]
    return pd.DataFrame(columns)


def _offer_files(cell: Request, report: Report, estimate: Estimate) -> None:
    summary = summary_of(cell, report, estimate)
    stem = re.sub(r"[^\w.-]+", "-", f"sizer-{cell.name or cell.source}-{estimate.dtype}-batch-{estimate.batch}")
    if report.gpu.backend == "cuda":
        st.markdown(
            "**Files**: the snapshot opens in PyTorch's viewer, [pytorch.org/memory_viz](https://pytorch.org/memory_viz)"
        )
        offer_download("Memory snapshot", lambda: _snapshot(cell), f"{stem}.pickle", "application/octet-stream")
    st.caption("The picture of the row Share in words, for the text beside it:")
    st.code(alt_text(summary, estimate, report.gpu), language=None, wrap_lines=True)


def _snapshot(cell: Request) -> bytes:
    return service.get_client().submit_snapshot(format_query(cell)).result()


def summary_of(cell: Request, report: Report, estimate: Estimate) -> Summary:
    """Return the texts of the picture for one cell. The link is cut if it holds a whole config."""
    title_of = SOURCES[cell.source].title_of
    optimizer = f" with {cell.optimizer}" if MODES[cell.mode].trains and cell.optimizer != "none" else ""
    return Summary(
        title=title_of(cell.name) if title_of else cell.name or report.model.class_name,
        work=f"{MODES[cell.mode].title}{optimizer}, {estimate.dtype}, batch {estimate.batch}{sample_size(report)}",
        verdict=verdict(cell, report, estimate),
        link=f"{(st.context.url or '').rstrip('/')}/?{format_query(cell)}",
    )


# -------------------------------------------------------------------------------------------------------------- icicle


DEPTH = 6  # rows
ROW, BELOW = 34, 50  # pixels: of a row, of the axis
NAME = 0.62  # of a row, for the box with the name; the strip by category is below
NARROWEST = 0.002  # of the width: narrower modules are in the table only
LETTERS = 130  # of the labels that fit across the whole width
WHOLE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A module's box: `start` to `end` in bytes, and the bytes by category with its children, largest first."""

    path: str
    depth: int
    start: int
    end: int
    held: dict[str, int]

    @property
    def colour(self) -> str:
        """Return the colour of its largest category."""
        return COLOURS[next(iter(self.held))]

    @property
    def holds(self) -> str:
        """Return its bytes by category as text."""
        return ", ".join(f"{category} {format_bytes(size)}" for category, size in self.held.items())


def boxes(modules: Iterable[ModuleBytes]) -> list[Box]:
    """Return the boxes of all modules that are wide enough, parents before children."""
    totals = with_children(modules)
    children: dict[str, list[str]] = {}
    for path in sorted(totals, key=_in_order):
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    return list(_below("", 0, 0, totals, children)) if totals else []


def _below(
    path: str, depth: int, start: int, totals: dict[str, dict[str, int]], children: dict[str, list[str]]
) -> Iterator[Box]:
    held = {category: size for category, size in sorted(totals[path].items(), key=lambda item: -item[1]) if size}
    size = sum(held.values())
    if depth == DEPTH or size < NARROWEST * sum(totals[""].values()):
        return
    yield Box(path=path or WHOLE, depth=depth, start=start, end=start + size, held=held)
    for child in children.get(path, ()):
        yield from _below(child, depth + 1, start, totals, children)
        start += sum(totals[child].values())


def icicle_chart(modules: Iterable[ModuleBytes]) -> Spec:
    """Return the icicle chart: boxes of modules in the colour of their largest category, over strips with all categories."""
    found = boxes(modules)
    whole, rows = max((box.end for box in found), default=1), max((box.depth + 1 for box in found), default=1)
    scale = scale_for([whole])
    tooltip = [nominal(name) for name in ("module", "size", "holds")]
    place = {
        "x": quantitative("start", title=scale.name, scale={"domain": [0, scale.of(whole)], "nice": False}),
        "x2": {"field": "end"},
        "y": quantitative("top", axis=None, scale={"domain": [0, rows], "reverse": True}),
        "y2": {"field": "bottom"},
        "color": nominal("colour", scale=None),
    }
    at = {"x": quantitative("middle"), "y": quantitative("name_at"), "color": nominal("ink", scale=None)}
    data = vega.table(_box_columns(found, whole, scale), "boxes")
    layers = [
        vega.layer(data, {"type": "rect", "stroke": INK, "strokeWidth": 0.5}, **place, tooltip=tooltip),
        vega.layer(vega.table(_strip_columns(found, scale)), "rect", **place, tooltip=[nominal("category"), *tooltip[:2]]),
        vega.layer(vega.shared(data), {"type": "text", "baseline": "middle"}, **at, text=nominal("label"), tooltip=tooltip),
    ]
    described = "Bytes at the peak by module, children under their parents"
    return vega.layered(layers, described, height=ROW * rows + BELOW, config=vega.PLAIN)


def _box_columns(found: list[Box], whole: int, scale: Scale) -> Columns:
    return {
        "module": [box.path for box in found],
        "top": [box.depth for box in found],
        "bottom": [box.depth + NAME for box in found],
        "name_at": [box.depth + NAME / 2 for box in found],
        "start": [scale.of(box.start) for box in found],
        "end": [scale.of(box.end) for box in found],
        "middle": [scale.of(box.start + box.end) / 2 for box in found],
        "size": [format_bytes(box.end - box.start) for box in found],
        "holds": [box.holds for box in found],
        "colour": [box.colour for box in found],
        "ink": [ink_on(box.colour) for box in found],
        "label": [_label(box, whole) for box in found],
    }


def _strip_columns(found: list[Box], scale: Scale) -> Columns:
    """Return a row for each category of each box, side by side below it."""
    strips = [
        (box, category, start, end)
        for box in found
        for category, (start, end) in zip(
            box.held, pairwise(accumulate(box.held.values(), initial=box.start)), strict=True
        )
    ]
    return {
        "module": [box.path for box, *_ in strips],
        "category": [category for _, category, *_ in strips],
        "size": [format_bytes(end - start) for *_, start, end in strips],
        "colour": [COLOURS[category] for _, category, *_ in strips],
        "top": [box.depth + NAME for box, *_ in strips],
        "bottom": [box.depth + 1 for box, *_ in strips],
        "start": [scale.of(start) for *_, start, _ in strips],
        "end": [scale.of(end) for *_, end in strips],
    }


def ink_on(colour: str) -> str:
    """Return black or white, whichever has more contrast on a colour such as "#0072B2" (WCAG 2.2)."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#FFFFFF"


def _label(box: Box, whole: int) -> str:
    """Return the last part of a module's path; empty if the box is too narrow."""
    name = box.path.rpartition(".")[2]
    return name if len(name) <= LETTERS * (box.end - box.start) // whole else ""


def _in_order(path: str) -> list[tuple[int, int, str]]:
    """Return the sort key of a path: numbers in numeric order, names in alphabetic order."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]
