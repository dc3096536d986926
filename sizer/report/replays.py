"""Cached results of replays, by texts that say everything they depend on: found once, packed, and read again."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from sizer.base.codec import decode, encode

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
