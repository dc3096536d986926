"""A stranger's `quantization_config` as plain values: which method it names, and its settings. No torch."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sizer.base.config_json import read_config
from sizer.base.errors import ConfigError, quote
from sizer.catalogue.presets import find_preset
from sizer.query.request import Request

UNNAMED = "unnamed"  # the method of a `quantization_config` without a name, as MLX writes it
_MODELOPT = "modelopt"
MOST_REPEATS = 6  # per pattern; published ones have at most four
_PARSER: Any = re._parser  # type: ignore[attr-defined]  # typeshed does not have it
_REPEATING = (_PARSER.MAX_REPEAT, _PARSER.MIN_REPEAT, _PARSER.POSSESSIVE_REPEAT)
_FP8 = "fp8"
WORD = 32  # bits of the integers that weights are packed into
_DTYPES = ("float32", "bfloat16", "float16")
_LONGEST_TEXT, _DEEPEST = 1000, 10
PLACES = ("quantization_config", "compression_config")  # the latter is how compressed-tensors called it
_MLX = "quantization"  # key of MLX's settings in older files
_ALIASES = {"intel/auto-round": "auto-round"}  # AutoRound's name before 0.5
_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
)  # transformers searches the text model, too (get_hf_quantizer, 5.23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Quantization of a checkpoint. `method` is its `quant_method`, `settings` are the other values, as in the JSON.

    `dtype` is the dtype of its other tensors ("float16"), or "bfloat16" if the config names none, as in gpt-oss.
    """

    method: str
    settings: Mapping[str, Any]
    dtype: str


def quantization_of(request: Request, config: dict | None) -> Quantization | None:
    """Return the quantization of a request's checkpoint, or None if its config has none.

    `config` is the parsed config.json for the sources "hub" and "config" (None: the request's own, or its preset's).
    Raises ConfigError if its quantization is malformed.
    """
    if config is None and request.config is not None:
        config = read_config(request.config)
    if config is None and request.source == "hf":
        config = find_preset(request.name).config
    if config is None:
        return None
    for part in (config, *(config.get(name) for name in _PARTS)):
        for place in PLACES:
            if isinstance(part, dict) and part.get(place):
                return _with_experts(_read(part[place], _dtype(config, part)), config, part)
    if isinstance(of_mlx := config.get(_MLX), dict) and "bits" in of_mlx:
        return _read(of_mlx, _dtype(config))
    return None


def _with_experts(quantization: Quantization, *parts: dict) -> Quantization:
    """Return a quantization with the format of its experts, which DeepSeek V4 names outside of `quantization_config`.

    models/deepseek_v4/configuration_deepseek_v4.py, DeepseekV4Config.__post_init__, 5.24.
    """
    named = next((part["expert_dtype"] for part in parts if part.get("expert_dtype")), None)
    if named is None or quantization.method != _FP8 or "expert_dtype" in quantization.settings:
        return quantization
    return replace(quantization, settings={**quantization.settings, "expert_dtype": _plain(named, 0)})


def _read(raw: object, dtype: str) -> Quantization:
    settings = _plain(raw, _DEEPEST)
    if not isinstance(settings, dict):
        raise ConfigError("quantization_config is malformed", given=quote(raw), allowed="{...}")
    bitsandbytes = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    method = "bitsandbytes" if bitsandbytes else settings.pop("quant_method", None)
    producer = settings.get("producer")
    if _MODELOPT in (method, isinstance(producer, dict) and producer.get("name")) or str(method).startswith(f"{_MODELOPT}_"):
        return Quantization(method=_MODELOPT, settings=settings, dtype=dtype)
    if not isinstance(method, str):
        method = UNNAMED if method is None else quote(method)
    method = _ALIASES.get(method, method)
    return Quantization(method=method, settings=settings, dtype=dtype)


def _dtype(*parts: dict) -> str:
    """Return the dtype that a config names; without one, bfloat16."""
    named = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name in _DTYPES), "bfloat16")


def _plain(value: object, deep: int) -> object:
    """Return a copy of a JSON value. Raises ConfigError if it is too deep, or contains a text that is too long."""
    if isinstance(value, dict) and deep:
        return {key: _plain(item, deep - 1) for key, item in value.items()}
    if isinstance(value, list) and deep:
        return [_plain(item, deep - 1) for item in value]
    if isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > _LONGEST_TEXT):
        allowed = f"{_DEEPEST} levels, texts of {_LONGEST_TEXT} characters"
        raise ConfigError("quantization_config is malformed", given=quote(value), allowed=allowed)
    return value


def whole(settings: Mapping[str, Any], key: str, otherwise: int | None, allowed: tuple[int, ...] = ()) -> int:
    """Return an integer of the settings, one of `allowed` if given. Raises ConfigError."""
    value = settings.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int) or (allowed and value not in allowed):
        wanted = ", ".join(map(str, allowed)) or "a whole number"
        raise ConfigError("quantization_config is malformed", given=f"{key} = {quote(value)}", allowed=wanted)
    return value


def groups_of(settings: Mapping[str, Any], inputs: int, otherwise: int = 128) -> int:
    """Return the number of groups of the inputs; the last group may be smaller. −1 means a single group."""
    size = whole(settings, "group_size", otherwise)
    if size < 1 and size != -1:
        given = f"group_size = {size}"
        raise ConfigError("quantization_config is malformed", given=given, allowed="-1, 1 and more")
    return 1 if size == -1 else ceil(inputs, size)


def ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


@functools.lru_cache(maxsize=4096)
def checked_pattern(pattern: str, key: str = "") -> str:
    """Return an untrusted regular expression, found under a `key` of its settings.

    Raises ConfigError if it is invalid, or if matching a name may take exponential time: nested repetitions, or more than
    MOST_REPEATS in sequence.
    """
    given = f"{key}: {quote(pattern)}" if key else quote(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _PARSER.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        allowed = "names, or patterns"
        raise ConfigError("quantization_config is malformed", given=given, allowed=allowed) from error
    repeats = _repeats(parsed, inside=False)
    if repeats is None or repeats > MOST_REPEATS:
        raise ConfigError(
            "quantization_config has a pattern that may match for ever",
            given=given,
            allowed=f"at most {MOST_REPEATS} repetitions (* + {{m,n}}), none inside another",
            todo="write it without the repetitions",
        )
    return pattern


def _repeats(parsed: Iterable[tuple[object, object]], *, inside: bool) -> int | None:
    """Return how many repetitions a parsed pattern has, None if one is inside another."""
    count = 0
    for operation, argument in parsed:
        repeats = operation in _REPEATING
        if repeats and inside:
            return None
        for part in _parts_of(argument):
            found = _repeats(part, inside=inside or repeats)
            if found is None:
                return None
            count += found
        count += repeats
    return count


def _parts_of(argument: object) -> Iterator[Iterable[tuple[object, object]]]:
    """Yield the patterns inside an operation of a parsed pattern."""
    if isinstance(argument, _PARSER.SubPattern):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from _parts_of(item)
