"""Results of a replay without a memory limit, shared by all devices."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from sizer.allocator.allocator import replay, replay_events
from sizer.allocator.timeline import Timeline
from sizer.catalogue.gpus import Backend
from sizer.report.bounds import (
    at_its_largest,
    engines_limit,
    modelled_blocks,
    with_models_twice,
    without_models,
)
from sizer.report.replays import Replays
from sizer.tape.loop_choices import gradients_kept, outputs_kept_across_steps
from sizer.tape.streams import streams_behind
from sizer.tape.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbounded:
    """Timeline of a tape without a memory limit, and the peak reserved bytes of its variants.

    - few, many: modelled workspaces of zero bytes, or of twice the model.
    - kept: gradients live through the second forward pass.
    - outputs: the loop keeps outputs until the next forward pass has ended.
    - behind: other streams have not reached the events that blocks wait for.
    - large: all of these, with modelled workspaces at twice the model.
    - engines_limit_bytes: the most by which engines of another version of cuDNN may change it.

    See sizer.report.bounds.
    """

    timeline: Timeline
    few_bytes: int
    many_bytes: int
    kept_bytes: int
    outputs_bytes: int
    behind_bytes: int
    large_bytes: int
    engines_limit_bytes: int


def find_unbounded(tape: Tape, backend: Backend, *, expandable_segments: bool = False, replays: Replays) -> Unbounded:
    """Return the result of `replay_unbounded`; equal tapes are replayed once, for any batch size, dtype and device."""
    key = _digest(tape, backend, expandable_segments)
    return replays.find(
        key, Unbounded, lambda: replay_unbounded(tape, backend, expandable_segments=expandable_segments)
    )


def replay_unbounded(tape: Tape, backend: Backend, *, expandable_segments: bool = False) -> Unbounded:
    """Return the memory of a tape (bytes) if the allocator of `backend` is never refused memory."""
    timeline = replay(tape, backend=backend, expandable_segments=expandable_segments)

    def peak(other: Tape) -> int:
        if other is tape:
            return timeline.peak_reserved_bytes
        return peak_reserved_bytes(other, backend, expandable_segments)

    twice = with_models_twice(tape)
    kept = peak(gradients_kept(tape))
    return Unbounded(
        timeline=timeline,
        few_bytes=peak(without_models(tape)),
        many_bytes=peak(twice),
        kept_bytes=kept,
        outputs_bytes=peak(outputs_kept_across_steps(tape)),
        behind_bytes=peak(streams_behind(tape)),
        large_bytes=kept if twice is tape and not tape.awaited and not tape.outputs else peak(at_its_largest(tape)),
        engines_limit_bytes=engines_limit(tape),
    )


def peak_reserved_bytes(tape: Tape, backend: Backend, expandable_segments: bool) -> int:
    """Return the peak reserved bytes if the allocator is never refused memory."""
    return replay_events(tape, backend, None, expandable_segments).most_reserved


def _digest(tape: Tape, backend: Backend, expandable_segments: bool) -> str:
    """Return a digest of all inputs of `replay_unbounded`."""
    texts = (
        backend,
        expandable_segments,
        _digest_of_names(tape.op_names),
        _digest_of_names(tape.module_names),
        tape.marks,
        tape.second_forward,
        *tape.loops,
        *sorted(tape.awaited),
        tape.settled,
        tape.by_address,
        tape.outputs,
        tape.graphs,
        engines_limit(tape),
    )
    found = hashlib.blake2b(repr(texts).encode(), digest_size=20)
    for column in (
        tape.order,
        tape.sizes,
        tape.categories,
        tape.ops,
        tape.modules,
        tape.streams,
        modelled_blocks(tape),
    ):
        found.update(column)
    return found.hexdigest()


@functools.lru_cache(maxsize=32)  # tapes of one family share theirs
def _digest_of_names(names: tuple[str, ...]) -> str:
    return hashlib.blake2b(repr(names).encode(), digest_size=20).hexdigest()
