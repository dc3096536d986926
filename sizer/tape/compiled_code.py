"""Results of torch.compile for the code that a report is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

_LINES = 3  # of each kind in the notes; the JSON has all


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCode:
    """Compiled code, each item a line with its file and number.

    Args:
        regions: Compiled functions, with their number of operators.
        graph_breaks: Lines at which Dynamo ended a region, with its reason.
        recompilations: Functions that were compiled again, with the guard that failed.
        eager: Functions that ran eagerly, with the reason.
        forward_flops: Floating-point operations of the forward passes of compiled regions, as the partitioner left them.
        recomputed_flops: Those that the backward passes recompute.
        recomputed: Operators that the backward passes recompute, each with its number of calls, most frequent first.
        assumptions: Source of these decisions, uncounted memory, and assumed results of choices that a device makes by timing.
    """

    regions: tuple[str, ...] = ()
    graph_breaks: tuple[str, ...] = ()
    recompilations: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()
    forward_flops: int = 0
    recomputed_flops: int = 0
    recomputed: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def recomputed_flops_share(self) -> float:
        """Return the share of forward FLOPs that the backward passes do again."""
        return self.recomputed_flops / self.forward_flops if self.forward_flops else 0.0

    def notes(self) -> Iterator[str]:
        """Yield the notes of a report."""
        kinds = {
            "compiled region": self.regions,
            "graph break": self.graph_breaks,
            "recompilation": self.recompilations,
            "function that ran eagerly": self.eager,
        }
        for name, lines in kinds.items():
            if lines:
                more = f", and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
                yield f"torch.compile, {name}: {'; '.join(lines[:_LINES])}{more}"
        yield from (f"torch.compile: {text}" for text in self.assumptions)


def merge_compiled(codes: Iterable[CompiledCode | None]) -> CompiledCode | None:
    """Return the union of several pieces of compiled code, each line once; None if there is none."""
    found = [code for code in codes if code is not None]
    if not found:
        return None
    names = [field.name for field in fields(CompiledCode)]
    merged: dict[str, Any] = {}
    for name in names:
        values = [getattr(code, name) for code in found]
        merged[name] = max(values) if isinstance(values[0], int) else tuple(dict.fromkeys(chain.from_iterable(values)))
    return CompiledCode(**merged)
