"""Results of replays: cached by texts that say everything they depend on, and without a memory limit, shared by all devices."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sizer.allocator.allocator import replay, replay_events
from sizer.allocator.timeline import Timeline
from sizer.base.codec import decode, encode
from sizer.catalogue.gpus import Backend
from sizer.report.bounds import (
    at_its_largest,
    engines_limit,
    modelled_blocks,
    with_models_twice,
    without_models,
)
from sizer.tape.loop_choices import keep_gradients, keep_outputs_across_steps
from sizer.tape.tape import Tape, streams_behind

KEPT_BYTES = 2**23  # of texts that are packed: some 400 tapes, a tenth when deflated
LIMIT_BYTES = 2**25  # limit on the inflated bytes

Found = TypeVar("Found")


class Replays:
    """Cache of values by text, the most recently used last. It can be packed, and made from packed bytes.

    It shares the values of `shared`, in both directions. Each packs only the values that were requested from it.
    """

    def __init__(self, packed: bytes | None = None, *, shared: Replays | None = None) -> None:
        self._texts: dict[str, str] = {} if packed is None else _unpack(packed)
        self._found: dict[str, Any] = {} if shared is None else shared._found
        self._asked: dict[str, Any] = {}

    def find(self, key: str, kind: type[Found], replay: Callable[[], Found]) -> Found:
        """Return the value (a dataclass of type `kind`) of a key; call `replay` if it is missing."""
        if key not in self._found and (text := self._texts.get(key)) is not None:
            with contextlib.suppress(ValueError):  # bytes that another version packed are replayed again
                self._found[key] = decode(kind, json.loads(text))
        if key not in self._found:
            self._found[key] = replay()
        self._asked[key] = self._found[key]
        return self._asked[key]

    def pack(self) -> bytes | None:
        """Return the values as bytes; None if nothing is new.

        The least recently requested values are dropped if they exceed KEPT_BYTES.
        """
        if self._asked.keys() <= self._texts.keys():
            return None
        for key, found in self._asked.items():
            self._texts[key] = self._texts.pop(key, "") or json.dumps(encode(found))
        left = sum(map(len, self._texts.values()))
        for key in tuple(self._texts):
            if left <= KEPT_BYTES:
                break
            left -= len(self._texts.pop(key))
        return zlib.compress(json.dumps(self._texts).encode("ascii"), level=1)


def _unpack(packed: bytes) -> dict[str, str]:
    try:
        texts = json.loads(zlib.decompressobj().decompress(packed, LIMIT_BYTES))
    except (zlib.error, ValueError):  # bytes that another version packed are replayed again
        return {}
    plain = isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())
    return texts if plain else {}


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


def find_peak_reserved(tape: Tape, backend: Backend, *, expandable_segments: bool = False, replays: Replays) -> int:
    """Return the result of `peak_reserved_bytes`; equal tapes are replayed once."""
    key = f"peak {_digest(tape, backend, expandable_segments)}"
    return replays.find(key, int, lambda: peak_reserved_bytes(tape, backend, expandable_segments))


def replay_unbounded(tape: Tape, backend: Backend, *, expandable_segments: bool = False) -> Unbounded:
    """Return the memory of a tape (bytes) if the allocator of `backend` is never refused memory."""
    timeline = replay(tape, backend=backend, expandable_segments=expandable_segments)

    def peak(other: Tape) -> int:
        if other is tape:
            return timeline.peak_reserved_bytes
        return peak_reserved_bytes(other, backend, expandable_segments)

    twice = with_models_twice(tape)
    kept = peak(keep_gradients(tape))
    return Unbounded(
        timeline=timeline,
        few_bytes=peak(without_models(tape)),
        many_bytes=peak(twice),
        kept_bytes=kept,
        outputs_bytes=peak(keep_outputs_across_steps(tape)),
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
