"""Where a model's tensors are and where they would have to be: the classic device and dtype mistakes, found before they bite.

The values here need no torch; `check_placement` imports it when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sizer.memory.census import TensorRow
from sizer.memory.codec import decode, encode

if TYPE_CHECKING:
    from torch import nn

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

    `problem` is one of the names in `sizer.device.mistakes`. `breaks` is whether the step raises an error as soon as the model
    is on an accelerator (or does so already); else it costs time, or goes wrong in silence.
    """

    problem: str
    breaks: bool
    what: str
    where: str
    why: str
    todo: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
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
    def from_dict(cls, data: object) -> Placement:
        """The placement that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        return decode(cls, data, "placement")


def check_placement(module: nn.Module, inputs: tuple | Mapping[str, Any]) -> Placement:
    """The tensors of a module and a batch by device and dtype (sizes in bytes), and the placement mistakes among them.

        found = sizer.check_placement(model, (images,))
        for finding in found.findings:
            print(finding.what, finding.where, finding.todo, sep="\\n")

    `inputs` are the forward pass's arguments, a tuple or a dict. Found are: weights on several devices; inputs on another
    device than the weights; floating-point tensors of two dtypes in one matrix product or convolution; tensors that `forward`
    makes on the CPU (a factory call without `device=`) and uses with the model's own; attributes that are neither parameter nor
    buffer, so that `.to()` leaves them behind; devices named in the code; and `x.to(device)` for a tensor `x` as a statement,
    whose result is lost.

    The forward pass is rehearsed, not run: on a copy of the module whose weights are on the meta device, which stands for the
    device of the weights. Your module, its gradients, buffers and random numbers are not touched, no accelerator is needed,
    and what only a GPU would refuse is found on a CPU. A module that was built on meta can be checked with inputs anywhere.
    Raises BuildError where a lazy parameter has no shape yet.

    *Known limitations*: only code that this forward pass reaches is checked, backward hooks and the training loop around it
    are not; kernels of other libraries (Triton, CUDA extensions) do not run on meta; where control flow reads values that
    come from weights, stand-ins are taken and noted; dropped results are read from CPython's byte code; several accelerators in
    one model (pipeline parallelism) are told as weights on several devices; the module's own hooks run in the rehearsal too.
    """
    from sizer.device.rehearsal import check_module

    return check_module(module, inputs)
