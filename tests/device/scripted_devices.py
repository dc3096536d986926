"""CUDA and MPS devices that follow a script: counters that tests set, errors where tests want them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30


def counters(
    allocated: int, peak: int, reserved: int, peak_reserved: int, *, retries: int = 0, ooms: int = 0
) -> dict[str, int]:
    """What torch.cuda.memory_stats says, as far as it is read."""
    return {
        "allocated_bytes.all.current": allocated,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": reserved,
        "reserved_bytes.all.peak": peak_reserved,
        "num_alloc_retries": retries,
        "num_ooms": ooms,
    }


@dataclass
class ScriptedCuda:
    """A CUDA device. Its driver counts 100 bytes for others before the context and then `context` more."""

    stats_now: dict[str, int] = field(default_factory=lambda: counters(0, 0, 0, 0))
    driver: bool = True
    context: int = 0
    others: int | None = 0
    lost: bool = False
    entries: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    fail: Callable[[int, int], None] | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")

    def open(self) -> None:
        self._call("open")
        self.context = 500

    def has_context(self) -> bool:
        return self.context > 0

    def synchronize(self) -> None:
        self._call("synchronize")

    def stats(self) -> dict[str, int]:
        self._call("stats")
        return self.stats_now

    def reset_peaks(self) -> None:
        self._call("reset_peaks")

    def used_bytes(self) -> int | None:
        return 100 + self.context + self.stats_now.get("reserved_bytes.all.current", 0) if self.driver else None

    def free_and_total_bytes(self) -> tuple[int, int]:
        return 9_000, 10_000

    def processes(self) -> int | None:
        return self.others

    def start_history(self) -> None:
        self._call("start_history")

    def history(self) -> list[dict[str, Any]]:
        self._call("history")
        return self.entries

    def stop_history(self) -> None:
        self._call("stop_history")

    def on_out_of_memory(self, call: Callable[[int, int], None]) -> None:
        self.fail = call


@dataclass
class ScriptedMps:
    """An MPS device, with or without a counter of peaks."""

    allocated: int = 0
    driver: int = 0
    peak: int | None = None

    def synchronize(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return self.allocated

    def driver_bytes(self) -> int:
        return self.driver

    def peak_bytes(self) -> int | None:
        return self.peak

    def reset_peak(self) -> None:
        if self.peak is not None:
            self.peak = self.allocated
