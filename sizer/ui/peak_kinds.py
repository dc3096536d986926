"""The three ways to state a peak: the whole process, which decides whether work fits, allocated memory and reserved memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sizer.report.estimate import Estimate

CACHE, OUTSIDE = "allocator cache", "outside PyTorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakKind:
    """One way to state an estimate's peak in bytes; `extra` names what it counts beyond the tensors themselves."""

    key: str
    title: str
    help: str
    of: Callable[[Estimate], int]
    extra: tuple[str, ...]


PEAK_KINDS: dict[str, PeakKind] = {
    kind.key: kind
    for kind in (
        PeakKind(
            key="process",
            title="Process",
            help="What nvidia-smi shows for the process: reserved memory, and the driver's context with the loaded kernels.",
            of=lambda estimate: estimate.process_bytes,
            extra=(CACHE, OUTSIDE),
        ),
        PeakKind(
            key="allocated",
            title="Allocated",
            help="torch.cuda.max_memory_allocated: tensors, rounded as the allocator rounds them, and library workspaces.",
            of=lambda estimate: estimate.peak_allocated_bytes,
            extra=(),
        ),
        PeakKind(
            key="reserved",
            title="Reserved",
            help="torch.cuda.max_memory_reserved: what PyTorch's allocator holds of the device, its cache included.",
            of=lambda estimate: estimate.peak_reserved_bytes,
            extra=(CACHE,),
        ),
    )
}


def parts(estimate: Estimate, kind: PeakKind) -> dict[str, int]:
    """Bytes per category at the peak, as its kind counts them: their sum is `kind.of(estimate)`."""
    beyond = {
        CACHE: estimate.peak_reserved_bytes - estimate.peak_allocated_bytes,
        OUTSIDE: estimate.process_bytes - estimate.peak_reserved_bytes,
    }
    return dict(estimate.at_peak) | {name: beyond[name] for name in kind.extra}
