"""Exchange of measurements between machines as JSON: with or without their comparisons, one or many in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from sizer.base.codec import DecodeError
from sizer.base.errors import RequestError, quote
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.measurement import Measurement
from sizer.device.record.recording import Measured

LIMIT_CHARACTERS = 256 * 2**20
_KINDS = "the output of `measure --json`, a measurement of the suite, or an exported ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportItem:
    """One measurement from another machine, with its comparison if it has one."""

    measured: Measured
    comparison: Comparison | None = None


def digest_of(measurement: Measurement) -> str:
    """Return the identity of a measurement: a hash of its whole content."""
    text = json.dumps(measurement.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_items(text: str) -> Iterator[ImportItem | str]:
    """Return an iterator over the documents in a JSON text; a string item says why a document could not be read.

    Raises RequestError if the whole is not JSON, or not of a known kind.
    """
    if len(text) > LIMIT_CHARACTERS:
        raise RequestError("the file is too long", given=f"{len(text):,} characters", allowed=f"{LIMIT_CHARACTERS:,}")
    documents = [item for document in _documents(text) for item in _items(document)]
    if not documents:
        raise RequestError("the file holds no measurement", allowed=_KINDS)
    return (_item(document) for document in documents)


def _documents(text: str) -> list[object]:
    """Return the JSON of a text: one document, or one per line."""
    try:
        return [_load(text)]
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            if len(lines) > 1:
                return [_load(line) for line in lines]
        except (ValueError, RecursionError):
            pass
        raise RequestError("the file is not JSON", given=quote(str(error), 100), allowed=_KINDS) from None


def _load(text: str) -> object:
    return json.loads(text, parse_constant=_refuse)


def _items(document: object) -> list[object]:
    if isinstance(document, list):
        return document
    if isinstance(document, dict) and isinstance(document.get("comparisons"), list):
        return document["comparisons"]
    return [document]


def _item(document: object) -> ImportItem | str:
    try:
        if not isinstance(document, dict):
            return f"{quote(document)} is not {_KINDS}"
        if "rows" in document:  # a comparison by itself
            return _of_comparison(document)
        if document.get("comparison") is not None:
            return _of_comparison(document["comparison"])
        if "measurement" in document:
            parts = {name: document[name] for name in ("measurement", "recording", "segments") if name in document}
            return ImportItem(measured=Measured.from_dict(parts))
        return ImportItem(measured=Measured(measurement=Measurement.from_dict(document)))
    except DecodeError as error:
        return str(error)


def _of_comparison(data: object) -> ImportItem:
    comparison = Comparison.from_dict(data)
    return ImportItem(measured=Measured(measurement=comparison.measurement), comparison=comparison)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
