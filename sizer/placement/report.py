"""Devices of a model's tensors and the devices they need: the classic device and dtype mistakes, and their texts. No torch.

`sizer.placement.check` finds them before they bite. A text says the mistake, its place, why it matters, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    `problem` is one of the names in `sizer.placement.report`. `breaks` is True if the step raises an error as soon as the
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """Texts of a kind of finding, with names in braces for variable parts; see `Finding` for each."""

    problem: str
    breaks: bool = True
    what: str
    why: str
    todo: str

    def finding(self, where: str, **names: object) -> Finding:
        """Return the finding at a place of the code, its texts filled in. Raises KeyError if a name is missing."""
        what, why, todo = (text.format(**names) for text in (self.what, self.why, self.todo))
        return Finding(problem=self.problem, breaks=self.breaks, what=what, where=where, why=why, todo=todo)


MIXED_DEVICES = Mistake(
    problem="weights on several devices",
    what="{count} of {total} parameters and buffers are on {others}, the rest on {weights}",
    why="an operator takes its tensors from one device; parts on several devices need a forward that moves activations",
    todo='call module.to("{weights}") once everything is built, or move the activations between the parts',
)
UNREGISTERED = Mistake(
    problem="parameter that is not registered",
    breaks=False,
    what="{count} of the model's parameters belong to no registered module",
    why="module.parameters() does not give them to the optimizer, .to() does not move them, state_dict() drops them",
    todo="keep modules in nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList, not in plain lists and dicts",
)
INPUT_DEVICE = Mistake(
    problem="input on another device",
    what="{name} is on {device}, the weights are on {weights}",
    why="{operator} takes its tensors from one device",
    todo='{variable} = {variable}.to("{weights}") before the call: for a tensor .to() returns another tensor',
)
INPUT_DTYPE = Mistake(
    problem="input of another dtype",
    what="{inputs}: {given}, but the weights are {weights}",
    why="{operator} takes tensors of one dtype",
    todo="cast the inputs with .to(torch.{weights}), or keep float32 weights and run under torch.autocast",
)
MIXED_DTYPES = Mistake(
    problem="two dtypes in one operation",
    what="{operator} gets tensors of {given} and of {weights}",
    why="matrix products and convolutions take tensors of one dtype",
    todo="make the odd one with dtype=x.dtype, or cast it with .to(torch.{weights})",
)
MADE_ELSEWHERE = Mistake(
    problem="tensor made on another device",
    what="{tensor} is made on the CPU, and {operator} uses it with the model's own tensors {place}",
    why="without device= a tensor is made on the CPU, whatever device the module is on",
    todo="make it with device=x.device of an existing tensor, or once in __init__ as a buffer",
)
LEFT_BEHIND = Mistake(
    problem="attribute that .to() leaves behind",
    what="{path} is neither parameter nor buffer, and {operator} uses it with the model's own tensors",
    why=".to(device) moves only parameters and buffers; the attribute stays on its device",
    todo="register it in __init__: self.register_buffer(name, tensor, persistent=False)",
)
COPIED = Mistake(
    problem="attribute copied in every forward pass",
    breaks=False,
    what="{path} is neither parameter nor buffer, and is copied to the device for each use",
    why=".to(device) leaves it on the CPU, so every pass copies it again and waits for the copy",
    todo="register it in __init__: self.register_buffer(name, tensor, persistent=False)",
)
HARD_CODED = Mistake(
    problem="device named in the code",
    what="the code names {device}, the weights are on {weights}",
    why="it works only on a machine with that device, and only while the module is on it",
    todo="take the device of a tensor that is there: x.device, next(self.parameters()).device",
)
DROPPED = Mistake(
    problem="result of .to() dropped",
    breaks=False,
    what="the result of .{method}() is dropped",
    why="for a tensor it returns another tensor and changes nothing in place; only for a module it works in place",
    todo="assign it: x = x.{method}(...)",
)


def join(names: Iterable[str], most: int = 5) -> str:
    """Return the first names, and the number of further ones."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{', '.join(listed[:most])}{more}"
