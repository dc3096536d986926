"""Messages between processes: one JSON object per line.

Errors travel as their kind and parts, and are restored as the same class.

    child -> parent    {"progress": "..."}, {"partial": {...}}, {"keep": {"name": "...", "data": base64}}, {"result": {...}},
                       {"error": error}
    error              {"kind": "TraceError", "what": "...", "given": null, "allowed": ..., "todo": ..., "refusals": []}

The job server's own messages are in `sizer.service.server`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from sizer.base import errors
from sizer.base.errors import JobError, Refusal, RequestError, SizerError

LIMIT_TEXT = 4_000
LIMIT_PROGRESS = 200
_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SizerError)
}


def to_line(message: dict) -> bytes:
    """Return a message as one line of ASCII JSON that ends in a newline. Raises ValueError if it holds NaN or infinity."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def from_line(line: bytes) -> dict:
    """Return the message of a line. Raises ValueError if it is not a JSON object in ASCII, holds NaN, or nests too deeply.

    ASCII only, because json.loads also accepts UTF-16 bytes, and lines of a child are passed on unchanged.
    """
    try:
        message = json.loads(line.decode("ascii"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a JSON object was expected, not {type(message).__name__}")
    return message


def error_to_wire(error: SizerError) -> dict:
    """Return a Sizer error as plain values; long texts are clipped."""
    refusals = [asdict(refusal) for refusal in getattr(error, "refusals", ())]
    texts = {name: getattr(error, name) for name in ("what", "given", "allowed", "todo")}
    parts = {name: None if text is None else _clip(text) for name, text in texts.items()}
    return {"kind": type(error).__name__, **parts, "refusals": refusals}


def error_from_wire(data: Any) -> SizerError:
    """Return the error from which `error_to_wire` made `data`, of the same class; a JobError for any other `data`."""
    try:
        kind = _KINDS[data["kind"]]
        parts = {name: None if data[name] is None else _clip(str(data[name])) for name in ("given", "allowed", "todo")}
        what = _clip(str(data["what"]))
        if kind is not RequestError:
            return kind(what, **parts)
        return RequestError(what, **parts, refusals=[Refusal(**refusal) for refusal in data["refusals"]])
    except (KeyError, TypeError, ValueError):
        return JobError("the job failed and its error message was not understood", todo="try again")


def clip_progress(text: object) -> str:
    """Return a progress text as one short line."""
    return " ".join(str(text)[: 4 * LIMIT_PROGRESS].split())[:LIMIT_PROGRESS]


def _clip(text: str) -> str:
    return text if len(text) <= LIMIT_TEXT else f"{text[:LIMIT_TEXT]}..."


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
