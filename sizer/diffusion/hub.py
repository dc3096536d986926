"""A pipeline's files from the hub: model_index.json and the config of each part, as a pasted bundle holds them. No torch."""

from __future__ import annotations

import json
import time

from sizer.architecture.hub_files import CONNECT_SECONDS, fetch_files, folder_address
from sizer.base.config_json import MAX_CONFIG_BYTES, MAX_INTEGER, read_object
from sizer.base.errors import ConfigError, HubError
from sizer.diffusion.bundle import CHECKER, INDEX, LIBRARIES, file_of

TOTAL_SECONDS = 20.0  # for all files
MOST_PARTS = 32
_PASTE = "paste its files instead, by their paths in one JSON object"
_LENGTH = "model_max_length"  # the only value of a tokenizer's config that changes memory


def fetch_bundle(
    repo_id: str,
    revision: str | None = None,
    endpoint: str | None = None,
    *,
    connect_seconds: float = CONNECT_SECONDS,
    total_seconds: float = TOTAL_SECONDS,
) -> bytes:
    """Return a JSON object (at most 2 MiB) of a pipeline's files by their paths, which `read_bundle` reads.

    A tokenizer's config is cut to its `model_max_length`.

    Args:
        repo_id: "org/name".
        revision: Branch, tag or commit; None for "main".
        endpoint: None for HF_ENDPOINT, else the public hub.
        connect_seconds: Longest silence of the hub.
        total_seconds: Wall-clock time of the whole exchange.

    Raises:
        HubError: As `fetch_config` of `sizer.architecture.hub_files`; also if there is no pipeline, or its files are too large.
    """
    end = time.monotonic() + total_seconds
    folder = folder_address(repo_id, revision, endpoint)
    limits = {"connect_seconds": connect_seconds}
    index = _read(repo_id, INDEX, fetch_files(repo_id, folder, (INDEX,), total_seconds=total_seconds, **limits)[INDEX])
    parts = [(name, *value) for name, value in index.items() if isinstance(value, list) and len(value) == 2 and name != CHECKER]
    known = [file_of(name, kind) for name, library, kind in parts if library in LIBRARIES and isinstance(kind, str)]
    paths = [path for path in known if path is not None]
    if len(paths) > MOST_PARTS:
        raise HubError(f"{INDEX} of {repo_id} has too many parts", given=str(len(paths)), allowed=f"at most {MOST_PARTS}")
    found = fetch_files(repo_id, folder, paths, total_seconds=max(end - time.monotonic(), 0), **limits)
    files = {INDEX: index} | {path: _read(repo_id, path, data) for path, data in found.items()}
    text = json.dumps(files, ensure_ascii=False)
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise HubError(
            f"the files of {repo_id} exceed the size limit in total", allowed=f"at most {MAX_CONFIG_BYTES:,} bytes", todo=_PASTE
        )
    return text.encode()


def _read(repo_id: str, path: str, data: bytes) -> dict:
    """Return the JSON object of a file; for a tokenizer only its `model_max_length`."""
    try:
        if path.endswith("tokenizer_config.json"):
            return _of_tokenizer(data)
        return read_object(data)
    except ConfigError as error:
        what = f"{path} of {repo_id} is refused: {error.what}"
        raise HubError(what, given=error.given, allowed=error.allowed, todo=_PASTE) from None


def _of_tokenizer(data: bytes) -> dict:
    """Return the longest prompt of a tokenizer's config. A tokenizer without a limit writes 10^30, which is left out."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError("config is not valid JSON") from None
    longest = config.get(_LENGTH) if isinstance(config, dict) else None
    return {_LENGTH: longest} if type(longest) is int and 0 < longest <= MAX_INTEGER else {}
