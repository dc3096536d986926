"""The figures of a comparison, with the allowed error, and its sides: estimate, device, paired blocks, and the network's family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sizer.allocator.timeline import live_by_category, running_bytes
from sizer.catalogue.gpus import Backend, Gpu
from sizer.catalogue.presets import find_preset
from sizer.catalogue.sources import SOURCES
from sizer.device.comparison.alignment import Alignment, Side
from sizer.device.comparison.tape_index import TINY_BYTES
from sizer.device.record.measurement import SAMPLED, Measurement
from sizer.query.request import Request
from sizer.report.estimate import Estimate
from sizer.tape.tape import Tape

Family = Literal["CNN", "transformer", "other"]

# Prefixes of names of networks with attention, in torchvision and in timm.
_ATTENDING = (
    *("vit", "swin", "maxvit", "mvit"),
    *("aimv2", "beit", "cait", "coat_", "convit", "crossvit", "davit", "deit", "efficientformer", "eva", "fastvit_ma"),
    *("flexivit", "focalnet", "gcvit", "hiera", "levit", "maxxvit", "naflexvit", "nest", "nextvit"),
    *("pit_", "pvt", "samvit", "sequencer", "shvit", "tiny_vit", "tnt", "twins", "visformer", "volo", "xcit"),
)
_DETECTING = ("fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd", "raft")
_CONVOLUTIONAL_TYPES = ("convnext", "resnet", "regnet", "mobilenet", "efficientnet", "cvt", "levit", "timm")
_OTHER_TYPES = ("mamba", "rwkv", "xlstm", "jamba", "detr")


def family_of(request: Request) -> Family:
    """Return the family of a request's network, as the accuracy tables group them.

    It is derived from the package's name of the model or the config's `model_type`. Detection models and state-space models are
    "other".
    """
    if SOURCES[request.source].entry == "names":
        name = request.name
        if name.startswith(_DETECTING):
            return "other"
        return "transformer" if name.startswith(_ATTENDING) else "CNN"
    kind = _model_type(request)
    if any(word in kind for word in _OTHER_TYPES):
        return "other"
    return "CNN" if kind.startswith(_CONVOLUTIONAL_TYPES) else "transformer"


def _model_type(request: Request) -> str:
    """Return the config's model_type; the repository's name if the config is not available."""
    if request.is_fetched:
        return request.name.rpartition("/")[2].lower()
    config = json.loads(request.config) if request.config is not None else find_preset(request.name).config
    return str(config.get("model_type", ""))


# ---------------------------------------------------------------------------------------------------------------- sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Inputs of every part of a comparison. The recording and the alignment are None if the device was not recorded."""

    estimate: Estimate
    tape: Tape
    gpu: Gpu
    measured: Measurement
    recording: Tape | None
    alignment: Alignment | None
    family: Family

    @property
    def kind(self) -> Backend:
        """Device type, which selects the allocator rules of both sides."""
        return self.gpu.backend

    @property
    def is_complete(self) -> bool:
        """Return True if the device completed the work."""
        return self.measured.out_of_memory is None and self.measured.failure is None

    @property
    def tapes(self) -> tuple[tuple[Side, Tape], ...]:
        """Return the tapes of both sides, the device's only if there is one."""
        if self.recording is None:
            return (("estimate", self.tape),)
        return ("estimate", self.tape), ("device", self.recording)


def bounds_of(tape: Tape, phase: str | None) -> tuple[int, int] | None:
    """Return (events done when a phase begins, when it ends), None if the tape has no such phase.

    Without a phase, return those of the whole tape up to its last mark.
    """
    if phase is None:
        return 0, tape.marks[-1][0] if tape.marks else len(tape.order)
    begins = [0, *(end for end, _ in tape.marks)]
    return next(((begin, end) for begin, (end, name) in zip(begins, tape.marks, strict=False) if name == phase), None)


# The largest error that the estimate aims at, as a fraction of the measured figure: (peak allocated, reserved, process).
_AIMS: dict[Family, tuple[float, float, float]] = {
    "transformer": (0.02, 0.05, 0.08),
    "CNN": (0.08, 0.12, 0.08),
    "other": (0.08, 0.12, 0.08),
}
_CPU_PEAK_AIM = 0.05


# Names of the figures that count tensors.
TENSORS = {
    "weights_bytes": "weights",
    "buffers_bytes": "buffers",
    "inputs_bytes": "inputs",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations after forward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of the estimate and the device's own, in bytes of the same kind.

    `quantity` is the key of the estimate's JSON: "weights_bytes", "peak_reserved_bytes", "phases.forward.allocated_bytes".
    `phase` is the phase of the figure, None for a figure of the whole work. `tolerance` is the allowed error of the estimate,
    as a fraction of the measured figure: 0 if it is promised exactly, None without a promise. `allowance_bytes` is an
    additional allowed difference; `allowance` explains it.
    """

    quantity: str
    phase: str | None = None
    estimated_bytes: int
    measured_bytes: int
    tolerance: float | None
    allowance_bytes: int = 0
    allowance: str = ""

    @property
    def difference_bytes(self) -> int:
        """Estimated minus measured bytes: positive if the estimate is too high."""
        return self.estimated_bytes - self.measured_bytes

    @property
    def error(self) -> float | None:
        """Difference as a signed fraction of the measured figure; None if that is 0 and the estimate is not."""
        if self.measured_bytes:
            return self.difference_bytes / self.measured_bytes
        return None if self.difference_bytes else 0.0

    @property
    def holds(self) -> bool | None:
        """Return True if the error stays within the tolerance; None without a promise."""
        if self.tolerance is None:
            return None
        return abs(self.difference_bytes) <= self.tolerance * self.measured_bytes + self.allowance_bytes


def rows_of(sides: Sides) -> Iterator[Row]:
    """Yield the figures that both sides have; tensors, allocated, reserved and process memory are never mixed."""
    yield from _tensor_rows(sides)
    yield from _phase_rows(sides)
    if sides.is_complete:
        yield from _whole_rows(sides)


def _tensor_rows(sides: Sides) -> Iterator[Row]:
    tensors, estimate = sides.measured.tensors, sides.estimate
    for name in ("weights_bytes", "buffers_bytes", "gradients_bytes", "optimizer_bytes"):
        if (found := getattr(tensors, name)) is not None:
            yield Row(quantity=name, estimated_bytes=getattr(estimate, name), measured_bytes=found, tolerance=0)
    if tensors.inputs_bytes is not None:
        yield Row(
            quantity="inputs_bytes", estimated_bytes=_inputs(sides), measured_bytes=tensors.inputs_bytes, tolerance=0
        )
    if tensors.activations_bytes is not None:
        row = Row(
            quantity="activations_bytes",
            phase="forward",
            estimated_bytes=_left_by_forward(sides),
            measured_bytes=tensors.activations_bytes,
            tolerance=_tolerance(sides, "allocated_bytes", "forward"),
        )
        yield _with_numbers(row, sides)


def _phase_rows(sides: Sides) -> Iterator[Row]:
    uses = {use.phase: use for use in sides.estimate.phases}
    for reading in sides.measured.phases:
        use = uses.get(reading.phase)
        if use is None:
            continue
        for name in ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes"):
            found = getattr(reading, name)
            if found is None or (name == "reserved_bytes" and sides.kind == "cpu"):
                continue
            row = Row(
                quantity=f"phases.{reading.phase}.{name}",
                phase=reading.phase,
                estimated_bytes=getattr(use, name),
                measured_bytes=found,
                tolerance=_tolerance(sides, name, reading.phase),
            )
            yield row if name == "reserved_bytes" else _with_numbers(row, sides)


def _whole_rows(sides: Sides) -> Iterator[Row]:
    names = ["peak_allocated_bytes"]
    if sides.kind != "cpu":
        names += ["peak_reserved_bytes", "process_bytes"]
    for name in names:
        if (found := getattr(sides.measured, name)) is not None:
            row = Row(
                quantity=name,
                estimated_bytes=getattr(sides.estimate, name),
                measured_bytes=found,
                tolerance=_tolerance(sides, name, ""),
            )
            yield _with_numbers(row, sides) if name == "peak_allocated_bytes" else row


def _tolerance(sides: Sides, name: str, phase: str) -> float | None:
    """Return the promised tolerance of an allocator's figure on this device; None without a promise."""
    allocated, reserved, process = _AIMS[sides.family]
    if sides.kind == "mps" and (sides.measured.source == SAMPLED or name != "allocated_bytes"):
        return None
    if name == "process_bytes":
        return process
    if name in ("reserved_bytes", "peak_reserved_bytes"):
        return reserved
    if sides.kind == "cpu":
        return 0 if name == "allocated_bytes" else _CPU_PEAK_AIM
    return 0 if (name, phase) == ("allocated_bytes", "load") else allocated


def _with_numbers(row: Row, sides: Sides) -> Row:
    """Return the row with the allowance for Python numbers that autograd saved on the CPU.

    It is the value of the row's phase, or the maximum of all phases.

    PyTorch wraps each number in a CPU tensor of 8 bytes, on any device, which no dispatch mode sees.
    """
    if sides.kind != "cpu" or sides.recording is None:
        return row
    found = max(0, _tiny_bytes(sides.recording, row.phase) - _tiny_bytes(sides.tape, row.phase))
    return replace(row, allowance_bytes=found, allowance="Python numbers that autograd saved") if found else row


def _inputs(sides: Sides) -> int:
    """Return the bytes of the batch in the estimate."""
    live = live_by_category(sides.tape)
    return next((live[phase]["input"] for phase in ("forward", "prefill") if phase in live), 0)


def _left_by_forward(sides: Sides) -> int:
    """Return the bytes that the forward pass adds to the allocator's counter beyond the inputs: a measurement's activations."""
    at_end = {use.phase: use.allocated_bytes for use in sides.estimate.phases}
    return max(0, at_end["forward"] - at_end["load"] - _inputs(sides)) if {"load", "forward"} <= at_end.keys() else 0


def _tiny_bytes(tape: Tape, phase: str | None) -> int:
    """Return the bytes of the smallest blocks alive at a phase's end; with None the maximum at any time."""
    levels = running_bytes(tape.order, [size if size <= TINY_BYTES else 0 for size in tape.sizes])
    end = next((end for end, name in tape.marks if name == phase), None)
    return max(levels) if end is None else levels[end]
