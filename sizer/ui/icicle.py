"""What the modules hold at the peak, as an icicle: a row for each depth, every module as wide as its bytes, under its parent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import altair as alt
import pandas as pd

from sizer.base.units import format_bytes
from sizer.report.peak import ModuleBytes, with_children
from sizer.ui.palette import COLOURS, INK
from sizer.ui.scale import Scale, scale_for

DEPTH = 6  # rows
ROW, BELOW = 34, 50  # pixels: of a row, of the axis
NAME = 0.62  # of a row, for the box with the name; below it what the module holds by category
NARROWEST = 0.002  # of the width: narrower modules are left to the table
LETTERS = 130  # of the labels that fit across the whole width
WHOLE = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A module in its row: `start` to `end` in bytes, and the bytes by category that it holds with its children, largest first."""

    path: str
    depth: int
    start: int
    end: int
    held: dict[str, int]

    @property
    def colour(self) -> str:
        """That of the category which it holds most of."""
        return COLOURS[next(iter(self.held))]

    @property
    def told(self) -> str:
        """What it holds, in words."""
        return ", ".join(f"{category} {format_bytes(size)}" for category, size in self.held.items())


def boxes(modules: Iterable[ModuleBytes]) -> list[Box]:
    """The boxes of all modules that are wide enough, parents before their children."""
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


def icicle_chart(modules: Iterable[ModuleBytes]) -> alt.LayerChart:
    """The boxes of the modules, coloured by the category that each holds most of, over strips with all of them by category."""
    found = boxes(modules)
    whole, rows = max((box.end for box in found), default=1), max((box.depth + 1 for box in found), default=1)
    scale = scale_for([whole])
    frame, strips = _box_frame(found, whole, scale), _strip_frame(found, scale)
    across = alt.X("start:Q", title=scale.name, scale=alt.Scale(domain=[0, scale.of(whole)], nice=False))
    down = alt.Y("top:Q", axis=None, scale=alt.Scale(domain=[0, rows], reverse=True))
    tooltip = [alt.Tooltip(f"{name}:N") for name in ("module", "size", "holds")]
    place = {"x": across, "x2": "end:Q", "y": down, "y2": "bottom:Q", "color": alt.Color("colour:N", scale=None)}
    layers = [
        alt.Chart(frame).mark_rect(stroke=INK, strokeWidth=0.5).encode(**place, tooltip=tooltip),
        alt.Chart(strips).mark_rect().encode(**place, tooltip=[alt.Tooltip("category:N"), *tooltip[:2]]),
        alt.Chart(frame)
        .mark_text(baseline="middle")
        .encode(x="middle:Q", y="name_at:Q", text="label:N", color=alt.Color("ink:N", scale=None), tooltip=tooltip),
    ]
    return (
        alt.layer(*layers)
        .properties(height=ROW * rows + BELOW, description="Bytes at the peak by module, children under their parents")
        .configure_view(stroke=None)
    )


def _box_frame(found: list[Box], whole: int, scale: Scale) -> pd.DataFrame:
    columns = {
        "module": [box.path for box in found],
        "top": [box.depth for box in found],
        "bottom": [box.depth + NAME for box in found],
        "name_at": [box.depth + NAME / 2 for box in found],
        "start": [scale.of(box.start) for box in found],
        "end": [scale.of(box.end) for box in found],
        "middle": [scale.of(box.start + box.end) / 2 for box in found],
        "size": [format_bytes(box.end - box.start) for box in found],
        "holds": [box.told for box in found],
        "colour": [box.colour for box in found],
        "ink": [ink_on(box.colour) for box in found],
        "label": [_label(box, whole) for box in found],
    }
    return pd.DataFrame(columns)


def _strip_frame(found: list[Box], scale: Scale) -> pd.DataFrame:
    """A row for each category of each box, side by side below it."""
    rows = []
    for box in found:
        ends = accumulate(box.held.values(), initial=box.start)
        for (start, end), (category, size) in zip(pairwise(ends), box.held.items(), strict=True):
            rows.append(
                {
                    "module": box.path,
                    "category": category,
                    "size": format_bytes(size),
                    "colour": COLOURS[category],
                    "top": box.depth + NAME,
                    "bottom": box.depth + 1,
                    "start": scale.of(start),
                    "end": scale.of(end),
                }
            )
    return pd.DataFrame(rows, columns=["module", "category", "size", "colour", "top", "bottom", "start", "end"])


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour ("#0072B2"), by their contrast (WCAG 2.2)."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) else "#FFFFFF"


def _label(box: Box, whole: int) -> str:
    """The last part of a module's path where there is room for it."""
    name = box.path.rpartition(".")[2]
    return name if len(name) <= LETTERS * (box.end - box.start) // whole else ""


def _in_order(path: str) -> list[tuple[int, int, str]]:
    """Layers by their number, all else by name."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]
