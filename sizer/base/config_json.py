"""Strict and bounded parsing of a config's JSON: untrusted bytes → a plain dict, before any other code reads it.

Also packs its text as the value of `arch=config:` in a link and back, base64url(zlib(JSON)). No torch here.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import re
import zlib
from collections.abc import Iterator

from sizer.base.errors import ConfigError, quote
from sizer.base.pasted_text import (
    adapter_query,
    check_kind,
    check_text,
    is_quantization,
    is_yaml,
    pasted_lines,
    relax,
    two_objects,
    with_quantization,
    yaml_as_json,
)

MAX_CONFIG_BYTES = 2 * 2**20
MAX_DEPTH = 16
MAX_NODES = 20_000
MAX_KEY_LENGTH = 256
MAX_STRING_LENGTH = 10_000
MAX_LIST_LENGTH = 10_000
MAX_INTEGER = 2**53
PRIVATE_NAMES = ("_name_or_path", "name_or_path", "_commit_hash")  # transformers, configuration_utils.py, 5.23
FLOAT_TAG = "__float__"  # transformers' tag for floats that JSON lacks: configuration_utils.py, _FLOAT_TAG_KEY, 5.23
TAGGED_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}  # _FLOAT_TAG_VALUES, there

_FIX = "paste the model's config.json unchanged"
# A bracket, or a whole string: to the end of the text if its closing quote is missing (no quote is scanned twice).
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")

_HOW = "make it with base64url(zlib(JSON)), or pass the file with --config"

_Json = dict | list | str | int | float | bool | None


def read_config(data: bytes | str) -> dict:
    """Return the JSON object in `data` as a dict of plain values.

    A hf_quant_config.json before or after the config is read with it.

    Also reads pasted texts: Markdown fences, line numbers, Python dicts, printed configs, comments, trailing commas
    (`pasted_json`), and YAML of at most 64 KiB (`pasted_yaml`).

    NaN and Infinity, which Python's and transformers' readers accept, become transformers' own `{"__float__": "Infinity"}`.

    Raises ConfigError for another file of a model's folder, by its name, and for anything but one JSON object in UTF-8 of at
    most 2 MiB. It refuses repeated keys, lone surrogates, depth over 16, more than 20,000 values, strings or lists over 10,000,
    and integers over 2**53.
    """
    value = _read_pair(data) or read_object(data)
    check_kind(value)
    return value


def _read_pair(data: bytes | str) -> dict | None:
    """Return the config of a text that holds config.json and hf_quant_config.json behind each other; None for another text."""
    text = "" if isinstance(data, bytes) and data.startswith(b"GGUF") else _decode(data)
    if '"quantization"' not in text or (parts := two_objects(text)) is None:
        return None
    first, second = map(read_object, parts)
    if is_quantization(first):
        first, second = second, first
    return with_quantization(first, second) if is_quantization(second) else None


def read_object(data: bytes | str) -> dict:
    """Return the JSON object in `data`, from any file. Raises ConfigError as `read_config` does."""
    if isinstance(data, bytes) and data.startswith(b"GGUF"):
        data = "GGUF"  # the remaining bytes are not text
    # A number of eight bytes comes first in a safetensors file, torch.save writes a zip file, and ONNX its version as field 1.
    if isinstance(data, bytes) and ((b"\0" in data[:8] and data[8:9] == b"{") or data.startswith((b"PK", b"\x08"))):
        raise ConfigError("this is a file of weights, not a model's config.json", todo="paste the config.json next to it")
    text = _decode(data)
    if not text.strip():
        raise ConfigError("config is empty", todo=_FIX)
    check_text(text)
    try:
        value = _inside(_parse(text))
    except json.JSONDecodeError as error:
        value = _read_loosely(text, error)
    if not isinstance(value, dict):
        raise ConfigError("config is not a JSON object", given=f"a {type(value).__name__}", allowed="{...}", todo=_FIX)
    _check_values(value)
    return value


def _read_loosely(text: str, error: json.JSONDecodeError) -> _Json:
    """Return the value of a text that is no strict JSON, for the reason `error`: YAML, or an object as people paste it."""
    lines = pasted_lines(text)
    place = f"{error.msg} at line {error.lineno}, column {error.colno}"
    refusal = ConfigError("config is not valid JSON", given=place, todo=_FIX)
    in_yaml = is_yaml(lines)
    if in_yaml:
        try:
            return _parse(yaml_as_json(lines))
        except ConfigError as error_of_yaml:
            if "{" not in lines:  # no object to look for, which takes a second for two megabytes
                raise
            refusal = error_of_yaml
    try:
        return _inside(_parse(relax(text)))
    except json.JSONDecodeError:
        raise refusal from None
    except ConfigError:
        if in_yaml:
            raise refusal from None
        raise


def _inside(value: _Json) -> _Json:
    """Return the object inside of a list of one object, or of a text that holds one; other values as they are."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        return value[0]
    return _parse(value) if isinstance(value, str) and value.lstrip().startswith("{") else value


def query_of_adapter(data: bytes | str) -> str | None:
    """Return the keys of a query for an adapter_config.json; None for another file. Raises ConfigError as `read_config` does."""
    return adapter_query(read_object(data))


def _parse(text: str) -> _Json:
    _check_size(text)
    _check_depth(text)
    return json.loads(
        text,
        object_pairs_hook=_object,
        parse_int=_integer,
        parse_float=_float,
        parse_constant=_constant,
    )


def _decode(data: bytes | str) -> str:
    try:
        size = len(data if isinstance(data, bytes) else data.encode())
        if size > MAX_CONFIG_BYTES:
            raise too_large(f"{size:,} bytes")
        text = data.decode() if isinstance(data, bytes) else data
    except UnicodeError:
        raise ConfigError("config is not valid UTF-8", todo="save it as UTF-8") from None
    return text.removeprefix("\ufeff")


def _check_size(text: str) -> None:
    """Refuse far too many values before any of them is parsed: commas and brackets outside of strings are counted."""
    bare = _STRING.sub("", text)
    if bare.count(",") + bare.count("[") + bare.count("{") > 2 * MAX_NODES:  # a value has a comma or a bracket before it
        raise _too_many_values()


def _too_many_values() -> ConfigError:
    allowed, todo = f"at most {MAX_NODES:,}", "leave id2label and label2id out and give num_labels"
    return ConfigError("config has too many values", allowed=allowed, todo=todo)


def _check_depth(text: str) -> None:
    """Refuses deep nesting before the parser, which recurses, sees it."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            raise ConfigError("config is nested too deeply", allowed=f"at most {MAX_DEPTH} levels", todo=_FIX)


def _object(pairs: list[tuple[str, _Json]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ConfigError("config has a key twice in one object", given=quote(key), todo="keep one of them")
            seen.add(key)
    return value


def _integer(text: str) -> int:
    if len(text) > len(str(MAX_INTEGER)) + 1 or abs(int(text)) > MAX_INTEGER:
        raise ConfigError("config has an integer out of range", given=quote(text), allowed="at most 2**53", todo=_FIX)
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ConfigError("config has a number out of range", given=quote(text), allowed="finite numbers", todo=_FIX)
    return float(text)


def _constant(text: str) -> dict[str, str]:
    return {FLOAT_TAG: text}


def _check_values(config: dict) -> None:
    for count, value in enumerate(_walk(config), start=1):
        if count > MAX_NODES:
            raise _too_many_values()
        if isinstance(value, dict):
            for key in value:
                _check_string(key, MAX_KEY_LENGTH, "a key")
        elif isinstance(value, str):
            _check_string(value, MAX_STRING_LENGTH, "a string")
        elif isinstance(value, list) and len(value) > MAX_LIST_LENGTH:
            given, allowed = f"{len(value):,} entries", f"at most {MAX_LIST_LENGTH:,}"
            raise ConfigError("config has a list that is too long", given=given, allowed=allowed, todo=_FIX)


def _walk(value: _Json) -> Iterator[_Json]:
    """Yield every value of a config, including itself; keys are not values."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)


def _check_string(text: str, limit: int, what: str) -> None:
    if len(text) > limit:
        allowed = f"at most {limit:,} characters"
        raise ConfigError(f"config has {what} that is too long", given=quote(text), allowed=allowed, todo=_FIX)
    if _SURROGATE.search(text):
        todo = "remove the \\ud800-\\udfff escapes that are unpaired"
        raise ConfigError(f"config has {what} that is not valid Unicode", given=quote(text), todo=todo)


def encode_config(text: str) -> str:
    """Return a config's JSON text as the value of `arch=config:`, without padding.

    Raises ConfigError if the text exceeds 2 MiB or is not Unicode.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("config is not valid Unicode", todo="remove the lone surrogates (\\ud800...)") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise too_large(f"{len(data):,} bytes")
    return base64.urlsafe_b64encode(zlib.compress(data, 9)).rstrip(b"=").decode()


def decode_config(value: str) -> str:
    """Return the JSON text inside the value of `arch=config:`. It is not checked to be valid JSON.

    Raises ConfigError if the value is not base64url, not zlib, cut short, not UTF-8, or unpacks to more than 2 MiB. It never
    holds more than that in memory, for any compression.
    """
    try:
        packed = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise too_large(f"more than {MAX_CONFIG_BYTES:,} bytes once unpacked")
        if not unpacker.eof or unpacker.unused_data:
            raise ConfigError("packed config is cut short or goes on behind its end", given=quote(value), todo=_HOW)
        return data.decode()
    except (binascii.Error, zlib.error, ValueError) as error:  # ValueError: characters outside ASCII; bad UTF-8
        raise ConfigError("packed config cannot be unpacked", given=quote(value), todo=_HOW) from error


@functools.lru_cache(maxsize=8)
def canonical_config(text: str) -> str:
    """Return a config's JSON text in canonical form: strict JSON, keys sorted, no white space. Raises ConfigError.

    Names of models are left out (`_name_or_path`): links must not reveal a private one, and no figure depends on it.
    """
    return json.dumps(_without_names(read_config(text)), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _without_names(value: _Json) -> _Json:
    """Return a config without the names that transformers writes into it, in nested configs too."""
    if isinstance(value, dict):
        return {key: _without_names(part) for key, part in value.items() if key not in PRIVATE_NAMES}
    return [_without_names(part) for part in value] if isinstance(value, list) else value


def too_large(given: str) -> ConfigError:
    """Return the error for a config of more than MAX_CONFIG_BYTES."""
    return ConfigError(
        "config is too large",
        given=given,
        allowed=f"at most {MAX_CONFIG_BYTES:,} bytes",
        todo="keep only the architecture's keys",
    )
