"""The memory of a tape on a device that has enough of it: what no capacity has a say in, replayed once for all devices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from dataclasses import dataclass

from sizer.catalogue.gpus import Backend
from sizer.memory.allocator import replay, replay_events
from sizer.memory.bounds import engines_limit, gradients_kept, modelled_blocks, with_models_twice, without_models
from sizer.memory.codec import decode, encode
from sizer.memory.tape import Tape
from sizer.memory.timeline import Timeline

KEPT = 160  # the tapes of one question on four devices; some 4 KB each
LIMIT_BYTES = 2**26  # of all of them when inflated


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbounded:
    """The timeline of a tape without bound, and the most that is reserved of it where it is otherwise than estimated (bytes).

    few, many: the modelled workspaces come to nothing, or to twice the model.
    kept: gradients live through the second forward pass.
    large: they do, and the modelled workspaces come to twice the model.
    engines_limit_bytes: how far engines of another version of cuDNN may move it at most.
    See sizer.memory.bounds.
    """

    timeline: Timeline
    few_bytes: int
    many_bytes: int
    kept_bytes: int
    large_bytes: int
    engines_limit_bytes: int


class UnboundedReplays:
    """The memory of tapes without bound, each replayed once: equal tapes share it, whatever their batch size, dtype and device.

    It can be packed, and made from what was packed before.
    """

    def __init__(self, packed: bytes | None = None) -> None:
        self._texts = {} if packed is None else _unpack(packed)
        self._found: dict[str, Unbounded] = {}

    def replay(self, tape: Tape, backend: Backend, *, expandable_segments: bool = False) -> Unbounded:
        """What `replay_unbounded` returns for the tape."""
        key = _digest(tape, backend, expandable_segments)
        if key not in self._found and (text := self._texts.get(key)) is not None:
            with contextlib.suppress(ValueError):  # what another version has packed is replayed again
                self._found[key] = decode(Unbounded, json.loads(text))
        if key not in self._found:
            self._found[key] = replay_unbounded(tape, backend, expandable_segments=expandable_segments)
        return self._found[key]

    def pack(self) -> bytes | None:
        """The last KEPT of what was replayed or read before, as bytes; None where nothing is new."""
        new = {key: json.dumps(encode(found)) for key, found in self._found.items() if key not in self._texts}
        if not new:
            return None
        self._texts = dict(list((self._texts | new).items())[-KEPT:])
        return zlib.compress(json.dumps(self._texts).encode("ascii"), level=1)


def _unpack(packed: bytes) -> dict[str, str]:
    try:
        texts = json.loads(zlib.decompressobj().decompress(packed, LIMIT_BYTES))
    except (zlib.error, ValueError):  # what another version has packed is replayed again
        return {}
    return texts if isinstance(texts, dict) else {}


def replay_unbounded(tape: Tape, backend: Backend, *, expandable_segments: bool = False) -> Unbounded:
    """The memory of a tape (bytes) where the allocator of `backend` is never refused anything."""
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
        large_bytes=kept if twice is tape else peak(gradients_kept(twice)),
        engines_limit_bytes=engines_limit(tape),
    )


def peak_reserved_bytes(tape: Tape, backend: Backend, expandable_segments: bool) -> int:
    """The most bytes that are ever reserved where the allocator is never refused anything."""
    return max(replay_events(tape, backend, None, expandable_segments).reserved, default=0)


def _digest(tape: Tape, backend: Backend, expandable_segments: bool) -> str:
    """A digest of all that `replay_unbounded` reads."""
    texts = (
        backend,
        expandable_segments,
        tape.op_names,
        tape.module_names,
        tape.marks,
        tape.second_forward,
        engines_limit(tape),
    )
    found = hashlib.blake2b(repr(texts).encode(), digest_size=20)
    for column in (tape.order, tape.sizes, tape.categories, tape.ops, tape.modules, modelled_blocks(tape)):
        found.update(column)
    return found.hexdigest()
