"""Write charts as Vega-Lite specifications (https://vega.github.io/vega-lite/docs/), as dictionaries.

Each layer has its own rows inline. Streamlit 1.67 (`_marshall_chart_data`, streamlit/elements/vega_charts.py) converts data at the
top of a chart, and named datasets, to Arrow, whose schema takes about 1 KiB for a few columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sizer.ui.styling import INK

Spec = dict[str, Any]
Columns = Mapping[str, Sequence[Any]]  # the values of each field

PLAIN = {"view": {"stroke": None}}  # the config of a chart without a frame
LIMIT = {"type": "rule", "color": INK, "strokeDash": [6, 3], "strokeWidth": 2}  # the mark of what a device holds


def quantitative(field: str, **options: object) -> Spec:
    """Return the encoding of a field of numbers."""
    return {"field": field, "type": "quantitative", **options}


def nominal(field: str, **options: object) -> Spec:
    """Return the encoding of a field of names."""
    return {"field": field, "type": "nominal", **options}


def ordinal(field: str, **options: object) -> Spec:
    """Return the encoding of a field of values that have an order and no distances."""
    return {"field": field, "type": "ordinal", **options}


def scale_of(colours: Mapping[Any, str]) -> Spec:
    """Return the scale that gives each name its colour."""
    return {"domain": list(colours), "range": list(colours.values())}


def rows(*values: Mapping[str, object]) -> Spec:
    """Return the data of a layer as rows."""
    return {"data": {"values": values}}


def table(columns: Columns, name: str | None = None) -> Spec:
    """Return the data of a layer as columns of one length, so that each field's name is sent once.

    Args:
        columns: The values of each field.
        name: A name for later layers of the chart that share the data (`shared`).
    """
    named = {} if name is None else {"name": name}
    return {"data": named | {"values": [columns]}, "transform": [{"flatten": list(columns)}]}


def shared(data: Spec) -> Spec:
    """Return a reference to the named data of an earlier layer."""
    return data | {"data": {"name": data["data"]["name"]}}


def layer(data: Spec, mark: Spec | str, **encoding: object) -> Spec:
    """Return a layer with a mark for each row of its data."""
    return data | {"mark": mark, "encoding": encoding}


def pointed(data: Spec, field: str, tooltip: Sequence[Spec]) -> Spec:
    """Return a layer with a rule that follows the pointer across a field's values and shows a tooltip."""
    select = {"type": "point", "fields": [field], "nearest": True, "on": "pointermove"}
    opacity = {"condition": {"param": "pointer", "empty": False, "value": 0.8}, "value": 0}
    rule = layer(data, {"type": "rule", "color": INK}, x=quantitative(field), opacity=opacity, tooltip=tooltip)
    return rule | {"params": [{"name": "pointer", "select": select}]}


def layered(layers: Sequence[Spec], description: str, *, height: int, **options: object) -> Spec:
    """Return layers as one chart, with a description for screen readers."""
    return {"layer": layers, "description": description, "height": height, **options}
