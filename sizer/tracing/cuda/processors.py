"""How many multiprocessors a GPU has of which a trace knows the capability alone."""

from __future__ import annotations

from functools import cache

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.device import Device


def processors_of(device: Device) -> int:
    """The multiprocessors of the largest GPU of the device's capability, of the next lower one where there is none.

    *Known limitation*: of a smaller one the few kernels that ask for them hold a little less.
    """
    return next((count for capability, count in _most() if device.capability >= capability), _most()[-1][1])


@cache
def _most() -> tuple[tuple[tuple[int, int], int], ...]:
    """Capabilities, the highest first, each with the most multiprocessors."""
    found: dict[tuple[int, int], int] = {}
    for row in HARDWARE.values():
        found[row.capability] = max(found.get(row.capability, 0), row.processors)
    return tuple(sorted(found.items(), reverse=True))
