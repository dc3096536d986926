"""Smallest changes to work that fits nowhere, in the order of the search: fewer and cheaper changes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sizer.decision.cells import CANNOT, Cells, check_request
from sizer.decision.lever_table import LEVERS
from sizer.query.request import Request

OTHER_PRECISION = {
    "bfloat16": "amp-bfloat16",
    "amp-bfloat16": "bfloat16",
    "float16": "amp-float16",
    "amp-float16": "float16",
}
CHECKPOINTING = "with checkpointing"
_BY_KEY = {lever.key: lever for lever in LEVERS}
# Levers by key that are pulled together, with their words.
_SETS = (
    (("checkpointing",), CHECKPOINTING),
    (("lora",), "with only a LoRA adapter"),
    (("lora", "checkpointing"), "with only a LoRA adapter and checkpointing"),
    (("qlora", "checkpointing"), "with QLoRA and checkpointing"),
    (("int8",), "with weights in 8 bits"),
    (("nf4-dq",), "with weights in 4 bits"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A question with a change, and the change in words ("with checkpointing")."""

    title: str
    request: Request


def changes(request: Request, cells: Cells) -> Iterator[Changed]:
    """Yield the question with each set of changes that applies to it."""
    for keys, title in _SETS:
        changed: Request | None = None
        before = request
        try:
            for key in keys:
                changed = _BY_KEY[key].change(before, cells.counted(before))
                if changed is None or changed == before:
                    changed = None
                    break
                before = changed = check_request(changed)
        except CANNOT:
            continue
        if changed is not None:
            yield Changed(title=title, request=changed)


def in_other_precision(request: Request) -> Request | None:
    """Return the question in mixed precision if it is in pure half precision, and the reverse; None in float32."""
    other = OTHER_PRECISION.get(request.dtypes[0])
    return None if other is None else replace(request, dtypes=(other,))
