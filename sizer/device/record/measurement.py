"""Records of a real device during the work, and the memory of its kernels: plain values, readable without torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from sizer.base.codec import DecodeError, Document, decode, encode

SCHEMA = 1
PROFILED = "torch.profiler's memory events"
COUNTED = "the caching allocator's own counters"
SAMPLED = "sampled between operators: a peak may be missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device as the driver describes it.

    `device` is what PyTorch calls it ("cuda:0", "mps", "cpu", "xpu:0"), `total_bytes` its memory as PyTorch reports it and
    `free_bytes` what the driver called free at that moment; None where it is not known. `resident_threads` are those that a CUDA
    device can hold at once, on all its multiprocessors. `versions` are those beneath PyTorch ("driver", "cuda", "cudnn",
    "rocm", "macos"), each only where it is known.
    """

    device: str
    name: str
    total_bytes: int | None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    resident_threads: int | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The device's type: "cuda", "mps", "xpu" or "cpu"."""
        return self.device.partition(":")[0]

    @property
    def capability_text(self) -> str | None:
        """The compute capability as NVIDIA writes it ("9.0"); None where there is none."""
        return None if self.capability is None else ".".join(map(str, self.capability))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReading:
    """Bytes read after one phase, with the device idle; None where the device has no such counter.

    The peaks are those within the phase, its first moment included. `driver_bytes` is what the driver says that this process
    holds in all, context and libraries included.
    """

    phase: str
    allocated_bytes: int
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    driver_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of tensors counted one by one, every storage once; None where the work never came so far.

    `activations_bytes` is what the forward pass left alive beside weights, buffers and inputs, by the device's own counters.
    """

    weights_bytes: int | None = None
    buffers_bytes: int | None = None
    inputs_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOutOfMemory:
    """A phase that did not fit: what was asked for, and what was free and in use then. None where the device did not say."""

    phase: str
    requested_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds of a piece of work that was done `runs` times: the median, and the quartiles around it."""

    median_seconds: float
    low_seconds: float
    high_seconds: float
    runs: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """The spread of the times measured; quartiles are interpolated between them."""
        low, median, high = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=4, method="inclusive")
        return cls(median_seconds=median, low_seconds=low, high_seconds=high, runs=len(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The time that the batch takes from the host to the device.

    `issued` is what a clock says that does not wait for the device, `done` what it says when the copy has ended.
    """

    pinned: bool
    non_blocking: bool
    bytes: int
    issued: Spread
    done: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time of one step after `warm_up` steps.

    `step` is measured with the device's own events or with synchronization (`clock` says which), `unsynchronized` is what a
    host clock around the same step reads without waiting: on an asynchronous device the time to launch it.
    """

    clock: str
    warm_up: int
    step: Spread
    unsynchronized: Spread
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Document):
    """One piece of work (one dtype, one batch size) on one device, phase by phase.

    `query` is the complete query of the contract with this dtype and batch alone; `config_text` the config.json where the
    source is the hub, as text. `source` says where the bytes come from (PROFILED, COUNTED, SAMPLED). `retries` is how often the
    allocator had to give memory back first (num_alloc_retries), None without that counter. `doubts` say why a figure may not be
    trusted; none means that it may. `out_of_memory` is a result: the phases before it stand. `failure` is what else ended it.
    """

    schema: int = SCHEMA
    query: str
    dtype: str
    batch: int
    config_text: str | None = None
    device: DeviceFacts
    versions: dict[str, str]
    measured_at: str  # ISO 8601, UTC, seconds
    source: str
    phases: tuple[PhaseReading, ...]
    tensors: TensorBytes
    retries: int | None = None
    doubts: tuple[str, ...] = ()
    out_of_memory: DeviceOutOfMemory | None = None
    failure: str | None = None
    timing: Timing | None = None

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The largest peak of all phases; None without such a counter."""
        return _largest(phase.peak_allocated_bytes for phase in self.phases)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The largest reserved peak of all phases; None without such a counter."""
        return _largest(phase.peak_reserved_bytes for phase in self.phases)

    @property
    def process_bytes(self) -> int | None:
        """The most that the driver said the process held; None where it does not say."""
        return _largest(phase.driver_bytes for phase in self.phases)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


KERNELS_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All calls of one operator with the same shapes, dtypes and plain arguments, in bytes as allocated.

    `arguments` are texts: a tensor is its dtype and shape ("float32[32,3,224,224]", with "/" and the strides where it is not
    contiguous), everything else its repr. `kept_bytes` is the least that a call left allocated, results included, and
    `most_kept_bytes` the most: a library's workspace that stays appears in the first call alone. `inner_bytes` is the most
    that a call held beyond what was allocated before it and what it left: the kernel's own workspace.
    """

    op: str
    arguments: tuple[str, ...]
    calls: int
    kept_bytes: int
    most_kept_bytes: int
    inner_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """The kernels of two steps of one piece of work. `failure` says what ended it early, None where nothing did."""

    schema: int = KERNELS_SCHEMA
    query: str
    device: DeviceFacts
    versions: dict[str, str]
    rows: tuple[KernelRow, ...]
    failure: str | None = None

    def to_dict(self) -> dict:
        """Dicts, lists and scalars; a row is a list in the order of KernelRow's fields, which keeps files small."""
        return encode(self) | {"rows": [list(encode(row).values()) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: object) -> KernelRecord:
        """The record that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
            raise DecodeError("a record of kernels is an object with a list of rows")
        names = KernelRow.__slots__
        rows = [dict(zip(names, row, strict=False)) if isinstance(row, list) else row for row in data["rows"]]
        return decode(cls, {**data, "rows": rows}, "kernels")
