"""A placement as lines of plain text."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.placement.placement import Placement
from sizer.terminal.table import format_table, to_printable
from sizer.units import format_bytes


def format_placement(found: Placement) -> Iterator[str]:
    """The tensors by kind, device and dtype, and what is wrong, the worst first."""
    yield to_printable(f"{found.name} ({found.class_name})")
    rows = (
        (group.kind, group.device, group.dtype, f"{group.tensors:,}", f"{group.elements:,}", format_bytes(group.bytes))
        for group in found.groups
    )
    yield from format_table(("", "device", "dtype", "tensors", "elements", "size"), rows, left=3)
    yield ""
    for finding in sorted(found.findings, key=lambda one: not one.breaks):
        yield to_printable(f"{finding.problem}{'' if finding.breaks else ' (works, but)'}: {finding.what}")
        yield to_printable(f"    where: {finding.where}")
        yield to_printable(f"    why:   {finding.why}")
        yield to_printable(f"    do:    {finding.todo}")
    if not found.findings:
        yield "No placement mistakes were found."
    if found.reason is not None:
        yield to_printable(f"The forward pass was not followed to its end: {found.reason}")
    for note in found.notes:
        yield to_printable(f"Assumed: {note}")
