"""Communication between ranks in a step: bytes by collective, as traced. No time is guessed from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind ("all-reduce") over one group of ranks in one phase of a tape: count, and sum of bytes.

    `group` is the dimension of a mesh ("shard"), or the "world". `again` is True if they are repeated in each further
    accumulated pass of a step: they are then those of the first of the two traced passes.
    """

    phase: str
    kind: str
    group: str
    again: bool
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Collectives of one kind over one group of ranks in a whole step: their number, and the sum of their bytes.

    The bytes of a collective are those of the whole tensor, as NCCL's tests count them: after an all-gather, before a
    reduce-scatter. The bytes that a rank sends depend on the algorithm.
    """

    kind: str
    group: str
    calls: int
    bytes: int


def volumes_of_step(collectives: Iterable[Collective], *, passes: int = 1) -> tuple[Volume, ...]:
    """Return the collectives of the second step with `passes` passes, the most bytes first; of the first without a second."""
    collectives = tuple(collectives)
    second = [row for row in collectives if row.phase == "step2"]
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for row in second or [row for row in collectives if row.phase != "load"]:
        times = passes - 1 if row.again else 1
        calls[row.kind, row.group] += times * row.calls
        sizes[row.kind, row.group] += times * row.bytes
    return tuple(Volume(kind=key[0], group=key[1], calls=calls[key], bytes=size) for key, size in sizes.most_common())


def bytes_per_item(
    first: Collection[Collective], second: Collection[Collective], phases: Collection[str], step: int
) -> tuple[int, ...]:
    """Return the bytes by which each collective of a tape grows with each sample of the batch.

    `second` has those of a tape at a batch that is larger by `step`, with only the phases `phases`. The optimizer's collectives
    do not grow; the second step grows as the first one does. Raises ValueError if the collectives differ, or do not grow by
    whole bytes.
    """
    later = {(row.phase, row.kind, row.group, row.again): row for row in second}
    slopes: dict[tuple[str, str, str, bool], int] = {}
    for row in first:
        if row.phase in phases:
            other = later.pop((row.phase, row.kind, row.group, row.again), None)
            if other is None or other.calls != row.calls or (other.bytes - row.bytes) % step:
                raise ValueError(
                    f"{row.kind} over {row.group} in {row.phase} is {other} at another batch size, not {row}"
                )
            slopes[row.phase, row.kind, row.group, row.again] = (other.bytes - row.bytes) // step
    if later:
        raise ValueError(f"{next(iter(later.values()))} is only at another batch size")
    together: Counter[tuple[str, str, bool]] = Counter()
    for (_, kind, group, again), slope in slopes.items():
        together[kind, group, again] += slope
    for row in first:
        if row.phase == "step2":
            slopes.setdefault((row.phase, row.kind, row.group, row.again), together[row.kind, row.group, row.again])
    return tuple(slopes.get((row.phase, row.kind, row.group, row.again), 0) for row in first)
