"""Addresses of a tape's blocks in a device's allocator. `replay` (sizer.allocator.allocator) only counts bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from sizer.allocator.allocator import allocator_of
from sizer.allocator.looped import place
from sizer.allocator.timeline import running_bytes
from sizer.catalogue.gpus import Gpu
from sizer.tape.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses and bytes that an allocator assigned to each block of a tape, and the bytes reserved after each event.

    Tensors of 0 bytes take nothing and have no address, which is 0. `given_back` are the positions of the events at which cached
    memory went back to the driver. All is as long as the work went: `failed_at` is the first request that could not be met.
    """

    addresses: list[int]
    taken: list[int]
    reserved: list[int] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    failed_at: int | None = None

    def peak(self, tape: Tape) -> tuple[int, int]:
        """Return the number of events up to the allocated peak (the first of several), and the bytes allocated there."""
        allocated = running_bytes(tape.order[: len(self.reserved)], self.taken)
        most = max(allocated)
        return allocated.index(most), most


def find_addresses(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False) -> Addresses:
    """Return the addresses of a tape's blocks on a device, or on a large enough one if the work does not fit."""
    roomy = _find(tape, gpu, None, expandable_segments)
    capacity = gpu.total_bytes - gpu.context_bytes
    if max(roomy.reserved, default=0) <= capacity:
        return roomy
    tight = _find(tape, gpu, capacity, expandable_segments)
    return roomy if tight.failed_at is not None else tight


def _find(tape: Tape, gpu: Gpu, capacity: int | None, expandable_segments: bool) -> Addresses:
    allocator = allocator_of(gpu.backend, capacity, expandable_segments, by_address=tape.by_address)
    found = place(tape, allocator)
    return Addresses(
        addresses=found.addresses.tolist(),
        taken=found.taken.tolist(),
        reserved=found.reserved.tolist(),
        given_back=allocator.given_back,
        failed_at=found.failed_at,
    )
