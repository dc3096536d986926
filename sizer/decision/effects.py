"""Effects of a change on the peak, in words: why it saves nothing, or how much reserved memory it saves."""

from __future__ import annotations

from sizer.base.units import format_bytes
from sizer.decision.lever_table import COMPILED
from sizer.report.estimate import Estimate
from sizer.report.phases import inside

SAME = 0.005  # of the allocated peak: a smaller difference is rounding


def describe_effect(key: str, base: Estimate, changed: Estimate) -> str:
    """Return a sentence on a change if its process figure does not explain the effect; empty if the figure does.

    Args:
        key: the lever's key.
        base: the estimate without the change.
        changed: the estimate with it.
    """
    if key == "expandable":
        return _describe_segments(base, changed)
    if changed.process_bytes < base.process_bytes * (1 - SAME):
        return ""
    grown = changed.process_bytes - base.process_bytes
    who = "Compiled code" if key == COMPILED else "It"
    more = f" {who} takes {format_bytes(grown)} more." if grown > base.process_bytes * SAME else ""
    saved = base.peak_allocated_bytes - changed.peak_allocated_bytes
    if saved > base.peak_allocated_bytes * SAME:
        reserved = base.peak_reserved_bytes - changed.peak_reserved_bytes
        change = f"falls by {format_bytes(reserved)} only" if reserved > 0 else "does not fall"
        return f"Allocated memory falls by {format_bytes(saved)}, but reserved memory {change}.{more}"
    if moves := _describe_moves(base, changed):
        return f"{moves}{more}"
    where = f" in {base.peak_module}" if base.peak_module else ""
    return f"The tensors alive at the peak, in {inside(base.peak_phase)}{where}, do not change.{more}"


def _describe_segments(base: Estimate, changed: Estimate) -> str:
    """Return a sentence on the reserved memory that expandable segments save."""
    before, after = base.peak_reserved_bytes, changed.peak_reserved_bytes
    if after < before:
        return f"Reserved memory falls from {format_bytes(before)} to {format_bytes(after)}."
    unused = format_bytes(max(before - base.peak_allocated_bytes, 0))
    return f"Reserved memory stays {format_bytes(before)}: {unused} of it is unused at the peak, and segments cannot shrink it."


def _describe_moves(base: Estimate, changed: Estimate) -> str:
    """Return which categories of tensors at the peak fall and which rise; empty if none does."""
    names = base.at_peak.keys() | changed.at_peak.keys()
    differences = {name: changed.at_peak.get(name, 0) - base.at_peak.get(name, 0) for name in names}
    least = base.peak_allocated_bytes * SAME
    fallen = [(size, name) for name, size in sorted(differences.items()) if size < -least]
    risen = [(size, name) for name, size in sorted(differences.items()) if size > least]
    if not fallen and not risen:
        return ""
    peak = (
        f"The peak moves from {inside(base.peak_phase)} to {inside(changed.peak_phase)}"
        if changed.peak_phase != base.peak_phase
        else f"At the peak in {inside(base.peak_phase)}"
    )
    falls = ", ".join(f"{name} memory falls by {format_bytes(-size)}" for size, name in sorted(fallen)[:2])
    rises = ", ".join(f"{name} memory rises by {format_bytes(size)}" for size, name in sorted(risen, reverse=True)[:2])
    return f"{peak}: {', '.join(filter(None, (falls, rises)))}."
