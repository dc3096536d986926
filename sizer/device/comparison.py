"""The estimate held against the device: row by row, with signed errors, and what of the estimate is wrong. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sizer.device.cases import Family
from sizer.device.measurement import SCHEMA as MEASUREMENT_SCHEMA
from sizer.device.measurement import DeviceFacts, Measurement
from sizer.device.parting import Parting, Scratch
from sizer.errors import DeviceError, quote
from sizer.memory.codec import DecodeError, decode, encode
from sizer.memory.context import context_of
from sizer.memory.estimate import Estimate
from sizer.memory.gpus import GPUS, Gpu

SCHEMA = 1
KINDS = ("cuda", "mps", "cpu")  # of devices that an estimate has rules for


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of the estimate beside the device's own, in bytes of the same kind.

    `quantity` is the key of the estimate's JSON: "weights_bytes", "peak_reserved_bytes", "phases.forward.allocated_bytes";
    `phase` is that of a phase's figure, None where the figure is one of the whole work. `tolerance` is the error that the
    estimate may have, as a fraction of what was measured: 0 where it is promised exact, None where nothing is promised.
    `allowance_bytes` may differ besides; `allowance` says what they are.
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
        """Estimated less measured: positive where the estimate is too high."""
        return self.estimated_bytes - self.measured_bytes

    @property
    def error(self) -> float | None:
        """The difference as a signed fraction of what was measured; None where that is 0 and the estimate is not."""
        if self.measured_bytes:
            return self.difference_bytes / self.measured_bytes
        return None if self.difference_bytes else 0.0

    @property
    def holds(self) -> bool | None:
        """Whether the error stays within the tolerance; None where nothing is promised."""
        if self.tolerance is None:
            return None
        return abs(self.difference_bytes) <= self.tolerance * self.measured_bytes + self.allowance_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Allocated bytes at a place of the work: `at` is the phase's number plus the part of the phase that is done.

    Both curves have their points at the same places. A point is the most that was allocated since the one before it; the
    last one of a phase (`at` is a whole number) is the level at the phase's end.
    """

    at: float
    phase: str
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measurement beside the estimate of the same work by the rules of the same device.

    `gpu` is what the estimate was made for: the measured device with its own memory. `rows` hold what both sides know;
    `notes` say what was left out and why, and what else a reader must know. `parting` is the first place where estimate
    and recording part, `largest_partings` the few that hold the most bytes, `scratch` what kernels held inside beyond the
    estimate; all are empty where the measurement has no recording, and so is `measured_curve`. `wrong` has one text for
    each row that does not hold: the line of the estimate that is wrong, its category, phase, operator and module.
    `verdict` is the whole in a sentence. `versions` are those that the estimate was made with.
    """

    schema: int = SCHEMA
    architecture: str
    class_name: str
    family: Family
    mode: str
    versions: dict[str, str]
    gpu: Gpu
    estimate: Estimate
    measurement: Measurement
    rows: tuple[Row, ...]
    parting: Parting | None = None
    largest_partings: tuple[Parting, ...] = ()
    scratch: tuple[Scratch, ...] = ()
    estimated_curve: tuple[Level, ...] = ()
    measured_curve: tuple[Level, ...] = ()
    verdict: str
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every row with a tolerance stays within it, and both sides agree on whether the work fits."""
        return not self.wrong

    @property
    def process_in_range(self) -> bool | None:
        """Whether the estimate's range holds what the driver said of the process; None where the two do not compare."""
        row = self.find("process_bytes")
        if row is None:
            return None
        return self.estimate.process_low_bytes <= row.measured_bytes <= self.estimate.process_high_bytes

    def find(self, quantity: str) -> Row | None:
        """The row of a quantity, None where it was left out."""
        return next((row for row in self.rows if row.quantity == quantity), None)

    def to_dict(self) -> dict:
        """Dicts, lists and scalars, as in the JSON of `measure`; `from_dict` reads them back."""
        return encode(self)

    @classmethod
    def from_dict(cls, data: object) -> Comparison:
        """The comparison that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        found = decode(cls, data, "comparison")
        for name, schema, known in (
            ("comparison", found.schema, SCHEMA),
            ("comparison.measurement", found.measurement.schema, MEASUREMENT_SCHEMA),
        ):
            if schema != known:
                raise DecodeError(f"{name}.schema was {schema}; allowed is {known}: read it with another version")
        return found


def gpu_of(facts: DeviceFacts) -> Gpu:
    """The device that an estimate is made for, so that it may be held against a measurement on `facts`.

    The catalogue's entry where name, capability and memory agree, else one made from the facts: its memory is what the
    device itself reported, its context follows from the threads that it can hold. Raises DeviceError for a kind of device
    that no estimate has rules for.
    """
    if facts.kind not in KINDS:
        raise DeviceError(
            "there is no estimate for this kind of device",
            given=quote(facts.device),
            allowed=", ".join(KINDS),
            todo="measure on another one",
        )
    known = next((gpu for gpu in GPUS.values() if _is_same(gpu, facts)), None)
    if known is not None:
        return known if facts.total_bytes is None else replace(known, total_bytes=facts.total_bytes)
    typical = _typical(facts)
    total, source = facts.total_bytes, "as the device reported"
    if total is None:
        total, source = typical.total_bytes, f"the device did not say how much memory it has; taken is {typical.name}'s"
    unknown = replace(
        typical,
        key=facts.kind,
        name=facts.name or facts.device,
        capability=facts.capability,
        total_bytes=total,
        source=source,
    )
    return unknown if facts.resident_threads is None else _with_context(unknown, facts.resident_threads)


def _with_context(gpu: Gpu, threads: int) -> Gpu:
    context = context_of(threads, gpu.capability)
    return replace(
        gpu,
        context_low_bytes=context.low_bytes,
        context_bytes=context.typical_bytes,
        context_high_bytes=context.high_bytes,
    )


def _is_same(gpu: Gpu, facts: DeviceFacts) -> bool:
    """Whether a device is an entry of the catalogue: of one kind, the words of its model in the name, memory within a tenth."""
    if gpu.backend != facts.kind:
        return False
    if gpu.backend == "cpu":
        return True
    words = [word for word in gpu.key.split("-") if not re.fullmatch(r"\d+gb", word)]
    if not set(words) <= set(re.findall(r"[a-z0-9]+", facts.name.lower())):
        return False
    near = facts.total_bytes is None or abs(facts.total_bytes - gpu.total_bytes) <= gpu.total_bytes // 10
    return near and (facts.capability is None or facts.capability == gpu.capability)


def _typical(facts: DeviceFacts) -> Gpu:
    """The catalogue's entry that an unknown device is made from; its context stays where the threads are not known."""
    same = [gpu for gpu in GPUS.values() if gpu.backend == facts.kind]
    return next((gpu for gpu in same if facts.capability is not None and gpu.capability == facts.capability), same[0])
