"""Devices of a model's tensors and the devices they need: the classic device and dtype mistakes. No torch.

`sizer.placement.check` finds them before they bite.
"""

from __future__ import annotations

from dataclasses import dataclass

from sizer.base.codec import decode, encode
from sizer.report.census import TensorRow

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The tensors of one kind ("parameters", "buffers", "other tensors", "inputs") on one device in one dtype."""

    kind: str
    device: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake: its kind, its place in the code or the model, why it matters, and how to fix it.

    `problem` is one of the names in `sizer.placement.findings`. `breaks` is True if the step raises an error as soon as the
    model is on an accelerator (or already does); otherwise the mistake costs time, or gives silently wrong results.
    """

    problem: str
    breaks: bool
    what: str
    where: str
    why: str
    todo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """A module and its inputs by device and dtype, and their placement mistakes.

    `device` is that of the weights (most of their bytes). `stray` are tensors that are neither parameter nor buffer. `ran` is
    True if the forward pass was followed to its end; otherwise `reason` says why not, and `findings` lack later ones. `notes`
    list the assumed values. Empty `findings` mean that no mistake was found.
    """

    schema: int = SCHEMA
    name: str
    class_name: str
    device: str
    groups: tuple[Group, ...]
    stray: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    ran: bool
    reason: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """Dicts, lists and scalars."""
        return encode(self)

    @classmethod
    def from_dict(cls, data: object) -> PlacementReport:
        """Return the placement from the data of `to_dict`. Raises DecodeError for any other data."""
        return decode(cls, data, "placement")
