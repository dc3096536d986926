"""Divergences of an estimate and a device's recording: allocations that only one side makes, by operator and module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sizer.allocator.timeline import running_bytes
from sizer.base.units import format_bytes
from sizer.device.comparison.alignment import Alignment, Difference, Kind, Side
from sizer.device.comparison.tape_index import TINY_BYTES

LARGEST = 5
MOST_SCRATCH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A place where the estimate's tape and the device's recording are not the same work, in bytes as requested.

    - `kind`: the estimate's error: it missed an allocation ("missing"), made one too many ("extra"), made one of another size
      ("size"), or released one later or earlier than the device ("later", "earlier").
    - `op`, `module`: the estimate's. `device_op`, `device_module`: the recording's. For a block of only one side, the other
      side has those of the last block before it with a partner.
    - `estimated_bytes`, `measured_bytes`: the block's on either side, 0 if it is missing there.
    - `times`: number of repetitions. `most_bytes`: largest simultaneous difference.
    - The levels are the allocated bytes on either side just after it.
    """

    kind: Kind
    phase: str
    op: str
    module: str
    device_op: str
    device_module: str
    estimated_bytes: int
    measured_bytes: int
    times: int = 1
    most_bytes: int
    estimated_level_bytes: int
    measured_level_bytes: int

    @property
    def level_difference_bytes(self) -> int:
        """Bytes that the estimate has allocated there beyond the device; negative if it has less."""
        return self.estimated_level_bytes - self.measured_level_bytes

    def describe(self) -> str:
        """Return the divergence as one line of text."""
        return f"{self.phase}: {_PHRASES[self.kind](self)}{_times(self.times)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Different memory inside kernels: bytes beyond those allocated before and after a call.

    - `op`, `module`: the recording's, or the estimate's if the device has no such call.
    - `most_bytes`: memory of the call with the largest difference on the device. `estimated_bytes`: the estimate's for it.
    - `times`: number of calls of this operator in this phase that differ.
    """

    op: str
    module: str
    phase: str
    most_bytes: int
    estimated_bytes: int = 0
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Bytes that only one side has at a place; `difference_bytes` is signed, estimate minus device."""

    kind: Kind
    category: str
    op: str
    module: str
    difference_bytes: int
    blocks: int

    def describe(self) -> str:
        """Return the share as a phrase: which side holds which bytes."""
        size, where = format_bytes(abs(self.difference_bytes)), f"by {operator_text(self.op, self.module)}"
        blocks = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        more, less = ("the estimate", "the device") if self.difference_bytes > 0 else ("the device", "the estimate")
        if self.kind == "size":
            return f"{more} gives {size} more{blocks} {where} ({self.category}) than {less}"
        never = "has released" if self.kind in ("later", "earlier") else "has not"
        return f"{more} holds {size}{blocks} {where} ({self.category}) that {less} {never}"


def first_divergence(alignment: Alignment) -> Divergence | None:
    """Return the first place where the two sides diverge; None without one.

    Scratch and wrapped Python numbers (at most TINY_BYTES) are ignored.
    """
    found = min(_divergences(alignment), key=lambda group: group[0].start, default=None)
    return None if found is None else _divergence(alignment, found)


def largest_divergences(alignment: Alignment, count: int = LARGEST) -> tuple[Divergence, ...]:
    """Return the divergences with the most simultaneous bytes, the largest first.

    Repetitions by the same operator count as one.
    """
    groups = sorted(_divergences(alignment), key=lambda group: (-_most_held(group), group[0].start))
    return tuple(_divergence(alignment, group) for group in groups[:count])


def scratch_of(alignment: Alignment, count: int = MOST_SCRATCH) -> tuple[Scratch, ...]:
    """Return the memory inside kernels on both sides that differs, per operator and phase, the largest difference first."""
    groups: dict[tuple[str, str], list[Scratch]] = defaultdict(list)
    for phase in alignment.phases:
        for one, other in alignment.calls(phase):
            named = other or one
            assert named is not None  # a pair has a call on one side at least
            found = Scratch(
                op=named.op,
                module=named.module or (one.module if one else ""),
                phase=phase,
                most_bytes=other.inside_bytes if other else 0,
                estimated_bytes=one.inside_bytes if one else 0,
                times=1,
            )
            if _beyond(found) > TINY_BYTES:
                groups[phase, found.op].append(found)
    rows = [replace(max(group, key=_beyond), times=len(group)) for group in groups.values()]
    return tuple(sorted(rows, key=_beyond, reverse=True)[:count])


def _beyond(row: Scratch) -> int:
    return abs(row.most_bytes - row.estimated_bytes)


def shares_at(alignment: Alignment, side: Side, position: int) -> tuple[Share, ...]:
    """Return the shares of the difference between both sides at the same place of the work, the most bytes first.

    `position` is the number of events done on `side`. The shares sum to the difference of the levels (bytes as requested),
    wrapped numbers and scratch included.
    """
    alive, device_alive = alignment.alive(*alignment.corresponding(side, position))
    groups: dict[tuple, list[_BlockPair]] = defaultdict(list)
    for block in alive:
        partner = alignment.estimate_partner[block]
        kind = "extra" if partner < 0 else "size" if partner in device_alive else "later"
        groups[kind, alignment.sides["estimate"].names(block)[0]].append((block, partner if kind == "size" else None))
    for block in device_alive:
        partner = alignment.device_partner[block]
        if partner not in alive:
            kind = "missing" if partner < 0 else "earlier"
            groups[kind, alignment.sides["device"].names(block)[0]].append((None, block))
    shares = [_share(alignment, kind, group) for (kind, _), group in groups.items()]
    return tuple(
        sorted((share for share in shares if share.difference_bytes), key=lambda one: -abs(one.difference_bytes))
    )


# -------------------------------------------------------------------------------------------------------------- groups

_BlockPair = tuple[int | None, int | None]  # a block of the estimate, a block of the device


def _divergences(alignment: Alignment) -> list[list[Difference]]:
    """Return the differences that count, grouped by kind, phase and operator, each group in the order of the work."""
    groups: dict[tuple, list[Difference]] = defaultdict(list)
    for one in alignment.differences:
        tiny = max(one.estimated_bytes, one.measured_bytes) <= TINY_BYTES
        if not (one.is_scratch or tiny):
            op, _ = alignment.names_at("device" if one.kind == "missing" else "estimate", one)
            groups[one.kind, one.phase, op].append(one)
    return list(groups.values())


def _most_held(group: Sequence[Difference]) -> int:
    """Return the most bytes that the differences of a group hold at once."""
    edges = sorted((at, sign * one.held_bytes) for one in group for at, sign in ((one.start, 1), (one.end, -1)))
    return max(running_bytes(range(len(edges)), [size for _, size in edges]), default=0)


def _divergence(alignment: Alignment, group: Sequence[Difference]) -> Divergence:
    one = group[0]
    op, module = alignment.names_at("estimate", one)
    device_op, device_module = alignment.names_at("device", one)
    level, device_level = alignment.levels_after(one)
    return Divergence(
        kind=one.kind,
        phase=one.phase,
        op=op,
        module=module,
        device_op=device_op,
        device_module=device_module,
        estimated_bytes=one.estimated_bytes,
        measured_bytes=one.measured_bytes,
        times=len(group),
        most_bytes=_most_held(group),
        estimated_level_bytes=level,
        measured_level_bytes=device_level,
    )


def _share(alignment: Alignment, kind: Kind, group: Sequence[_BlockPair]) -> Share:
    tapes = alignment.estimate, alignment.device
    sizes = [tuple(0 if b is None else t.sizes[b] for b, t in zip(held, tapes, strict=True)) for held in group]
    own, other = group[max(range(len(group)), key=lambda index: abs(sizes[index][0] - sizes[index][1]))]
    tape_index, block = alignment.sides["device" if own is None else "estimate"], other if own is None else own
    assert block is not None  # a pair has a block on one side at least
    op, module = tape_index.names(block)
    return Share(
        kind=kind,
        category=tape_index.category(block),
        op=op,
        module=module,
        difference_bytes=sum(one - other for one, other in sizes),
        blocks=sum(one != other for one, other in sizes),
    )


# ---------------------------------------------------------------------------------------------------------------- text

_PHRASES = {
    "missing": lambda p: (
        f"the device allocates {format_bytes(p.measured_bytes)} in {operator_text(p.device_op, p.device_module)}, "
        f"the estimate does not (after {operator_text(p.op, p.module)})"
    ),
    "extra": lambda p: (
        f"the estimate allocates {format_bytes(p.estimated_bytes)} in {operator_text(p.op, p.module)}, the device does not (after "
        f"{operator_text(p.device_op, p.device_module)})"
    ),
    "size": lambda p: (
        f"{operator_text(p.op, p.module)} takes {format_bytes(p.estimated_bytes)} in the estimate and "
        f"{format_bytes(p.measured_bytes)} on the device ({operator_text(p.device_op)})"
    ),
    "later": lambda p: _released(p, "later"),
    "earlier": lambda p: _released(p, "earlier"),
}


def _released(divergence: Divergence, when: str) -> str:
    block = f"{format_bytes(divergence.estimated_bytes)} of {operator_text(divergence.op, divergence.module)}"
    return f"the estimate releases {block} {when} than the device ({operator_text(divergence.device_op)})"


def operator_text(op: str, module: str = "") -> str:
    """Return an operator and its module as text; some memory is allocated by code outside operators."""
    return f"{op or 'code outside operators'}{f' in {module}' if module else ''}"


def _times(times: int) -> str:
    return f", {times} times" if times > 1 else ""


def join_shares(shares: Iterable[Share], count: int = 2) -> str:
    """Return the largest shares as one phrase."""
    return "; ".join(share.describe() for share in list(shares)[:count])
