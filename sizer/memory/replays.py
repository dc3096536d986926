"""What was found by replays, by texts that say all it depends on: found once, packed, and read again."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from typing import TypeVar

from sizer.memory.codec import decode, encode

KEPT = 240  # the tapes of one question on some five devices; each takes 4 KB, inflated 20
LIMIT_BYTES = 2**26  # of all when inflated

Found = TypeVar("Found")


class Replays:
    """Values by text. It can be packed, and made from what was packed before."""

    def __init__(self, packed: bytes | None = None) -> None:
        self._texts = {} if packed is None else _unpack(packed)
        self._found: dict[str, object] = {}

    def find(self, key: str, kind: type[Found], replay: Callable[[], Found]) -> Found:
        """The value (a dataclass of type `kind`) of a key; what `replay` returns where there is none yet."""
        if key not in self._found and (text := self._texts.get(key)) is not None:
            with contextlib.suppress(ValueError):  # what another version has packed is replayed again
                self._found[key] = decode(kind, json.loads(text))
        if key not in self._found:
            self._found[key] = replay()
        return self._found[key]

    def pack(self) -> bytes | None:
        """The last KEPT values, of those that were packed before too, as bytes; None where nothing is new."""
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
