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
    """One mistake: what it is, where in the code or the model, why it matters, what to do.

    `problem` is one of the names in `sizer.placement.findings`. `breaks` is whether the step raises an error as soon
    as the model is on an accelerator (or does so already); else it costs time, or goes wrong in silence.
    """

    problem: str
    breaks: bool
    what: str
    where: str
    why: str
    todo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """A module and its inputs by device and dtype, and what is wrong with them.

    `device` is where the weights are (most of their bytes). `stray` are tensors that are neither parameter nor buffer. `ran`
    is whether the forward pass was followed to its end; `reason` says why not, and `findings` then lack what comes after.
    `notes` say which values were assumed on the way. Without findings nothing was found to be wrong.
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
        """The placement that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        return decode(cls, data, "placement")
