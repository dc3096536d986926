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

    - `device`: PyTorch's name ("cuda:0", "mps", "cpu", "xpu:0").
    - `total_bytes`: its memory as PyTorch reports it. `free_bytes`: free memory by the driver at that moment. None if not
      known.
    - `resident_threads`: threads that a CUDA device can hold at once, on all its multiprocessors.
    - `versions`: versions below PyTorch ("driver", "cuda", "cudnn", "rocm", "macos"), each only if known.
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
        """Compute capability in NVIDIA's notation ("9.0"); None without one."""
        return None if self.capability is None else ".".join(map(str, self.capability))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReading:
    """Bytes read after one phase, with the device idle; None if the device has no such counter.

    The peaks are those within the phase, its first moment included. `driver_bytes` is the total memory of this process by the
    driver, context and libraries included.
    """

    phase: str
    allocated_bytes: int
    peak_allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    driver_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """Bytes of tensors counted one by one, every storage once; None if the work ended before.

    `activations_bytes` are the bytes that the forward pass left allocated in addition to weights, buffers and inputs, by the
    device's counters.
    """

    weights_bytes: int | None = None
    buffers_bytes: int | None = None
    inputs_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOutOfMemory:
    """A phase that did not fit: the requested, free and used bytes at that time. None if the device did not report them."""

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
        """Return the spread of the measured times; quartiles are interpolated between them."""
        low, median, high = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=4, method="inclusive")
        return cls(median_seconds=median, low_seconds=low, high_seconds=high, runs=len(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Time to copy the batch from the host to the device.

    `issued` is a host clock's time without waiting for the device, `done` the time until the copy has ended.
    """

    pinned: bool
    non_blocking: bool
    bytes: int
    issued: Spread
    done: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Time of one step after `warm_up` steps.

    `step` is measured with the device's own events or with synchronization (`clock` says which). `unsynchronized` is a host
    clock's time around the same step without waiting: on an asynchronous device the time to launch it.
    """

    clock: str
    warm_up: int
    step: Spread
    unsynchronized: Spread
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Document):
    """One piece of work (one dtype, one batch size) on one device, phase by phase.

    - `query`: the complete query of the contract with only this dtype and batch. `config_text`: the config.json as text if the
      source is the hub.
    - `source`: origin of the bytes (PROFILED, COUNTED, SAMPLED).
    - `retries`: how often the allocator had to release cached memory first (num_alloc_retries), None without that counter.
    - `doubts`: reasons why a figure may be wrong; empty if there are none.
    - `out_of_memory`: a result; the phases before it are valid. `failure`: any other error that ended the work.
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
        """The largest memory of the process by the driver; None if the driver does not report it."""
        return _largest(phase.driver_bytes for phase in self.phases)


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


KERNELS_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All calls of one operator with the same shapes, dtypes and plain arguments, in bytes as allocated.

    - `arguments`: texts. A tensor is its dtype and shape ("float32[32,3,224,224]", with "/" and the strides if it is not
      contiguous), everything else its repr.
    - `kept_bytes`: the least that a call left allocated, results included. `most_kept_bytes`: the most. A library's workspace
      that stays allocated only appears in the first call.
    - `inner_bytes`: the peak inside a call beyond the bytes allocated before and after it: the kernel's own workspace.
    """

    op: str
    arguments: tuple[str, ...]
    calls: int
    kept_bytes: int
    most_kept_bytes: int
    inner_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """The kernels of two steps of one piece of work. `failure` is the error that ended it early, or None."""

    schema: int = KERNELS_SCHEMA
    query: str
    device: DeviceFacts
    versions: dict[str, str]
    rows: tuple[KernelRow, ...]
    failure: str | None = None

    def to_dict(self) -> dict:
        """Return dicts, lists and scalars; a row is a list in the order of KernelRow's fields, which keeps files small."""
        return encode(self) | {"rows": [list(encode(row).values()) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: object) -> KernelRecord:
        """Return the record from the result of `to_dict`. Raises DecodeError for any other `data`."""
        if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
            raise DecodeError("a record of kernels is an object with a list of rows")
        names = KernelRow.__slots__
        rows = [dict(zip(names, row, strict=False)) if isinstance(row, list) else row for row in data["rows"]]
        return decode(cls, {**data, "rows": rows}, "kernels")
