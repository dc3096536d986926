"""Read what a Vega-Lite specification shows, as Vega does."""

from __future__ import annotations

import json

from sizer.ui.vega import Spec


def sent(chart: Spec) -> Spec:
    """The specification as the browser reads it."""
    return json.loads(json.dumps(chart, allow_nan=False))


def layers(chart: Spec) -> list[list[dict]]:
    """The rows of each layer, by its transforms."""
    found = sent(chart)["layer"]
    named = {layer["data"]["name"]: layer["data"]["values"] for layer in found if {"name", "values"} <= layer["data"].keys()}
    data = [layer["data"].get("values") or named.get(layer["data"].get("name"), []) for layer in found]
    return [_transformed(rows, layer.get("transform", [])) for rows, layer in zip(data, found, strict=True)]


def rows_with(chart: Spec, *fields: str) -> list[dict]:
    """The rows of the first layer that has some fields; empty if no layer has them."""
    return next((rows for rows in layers(chart) if rows and set(fields) <= rows[0].keys()), [])


def _transformed(rows: list[dict], transforms: list[dict]) -> list[dict]:
    for transform in transforms:
        if "flatten" in transform:
            rows = [
                row | dict(zip(transform["flatten"], values, strict=True))
                for row in rows
                for values in zip(*(row[name] for name in transform["flatten"]), strict=True)
            ]
        elif "fold" in transform:
            key, value = transform["as"]
            rows = [row | {key: name, value: row[name]} for row in rows for name in transform["fold"]]
        else:
            rows = [row | {transform["as"]: _calculated(transform["calculate"], row)} for row in rows]
    return rows


def _calculated(expression: str, row: dict) -> int:
    """The value of `indexof(['a', 'b'], datum.field)`, the only expression that charts have."""
    names, _, field = expression.removeprefix("indexof(").removesuffix(")").rpartition(", datum.")
    return json.loads(names.replace("'", '"')).index(row[field])
