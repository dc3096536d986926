"""Reading and writing of the values of a server's keys.

Raise RefusedValueError for a value that a key does not take.
"""

from __future__ import annotations

import re

from sizer.base.errors import RefusedValueError
from sizer.catalogue.serving import (
    AUTO,
    CACHE_TYPES,
    ENGINES,
    FILE_TYPES,
    KV_DTYPES,
    LAYOUTS,
    LORA_RANKS,
    MAX_LAYERS,
    MAX_OFFLOAD,
    MAX_SEQS,
    MAX_TOKENS,
)
from sizer.catalogue.weights import WEIGHTS
from sizer.query import values
from sizer.query.values import choice

_UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "": 1,
}
_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?B)?", re.ASCII | re.IGNORECASE)
_MAX_BYTES = 2**50
_KV_NAMES = {
    **dict.fromkeys(("fp8e4m3", "fp8e5m2", "fp8inc"), "fp8"),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "f16", "float16", "half"), AUTO),
}


def read_engine(text: str) -> str:
    """Return the key of an engine. The library transformers is no server: its generation is another mode."""
    if text.lower() == "transformers":
        raise RefusedValueError(", ".join(ENGINES), "ask for mode=generate, generation with transformers")
    return choice(ENGINES, {"llamacpp": "llama.cpp", "ollama": "llama.cpp"})(text)


def read_release(text: str) -> str:
    """Return a version of an engine as "0.9.2"; a leading v and all after the third number are dropped."""
    found = re.fullmatch(
        r"v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?:[.+a-z][0-9A-Za-z.+]{0,40})?", text, re.ASCII
    )
    if found is None:
        raise RefusedValueError("a version such as 0.11.2", "write for example engine_version=0.11.2")
    return ".".join(part.lstrip("0") or "0" for part in found.groups("0"))


def read_util(text: str) -> float:
    """Return a share of the device's memory, above 0 and at most 1, with at most four decimals."""
    if not re.fullmatch(r"(?:0?\.[0-9]{1,4}|1(?:\.0{1,4})?)", text, re.ASCII) or not float(text):
        raise RefusedValueError("numbers above 0 and up to 1, with at most four decimals", "write for example util=0.9")
    return float(text)


def read_tokens(text: str) -> int:
    """Return a number of tokens; 8k is 8,192."""
    digits = values.read_tokens(text)
    number = int(digits) if re.fullmatch(r"[0-9]{1,9}", digits, re.ASCII) else 0
    if not 1 <= number <= MAX_TOKENS:
        raise RefusedValueError(f"tokens from 1 to {MAX_TOKENS:,}; 8k is 8,192", "write for example 8k")
    return number


def read_length(text: str) -> int | str:
    """Return the longest request in tokens, or "auto" (also vLLM's -1) for the longest that fits."""
    return AUTO if text.lower() in (AUTO, "-1") else read_tokens(text)


def read_size(text: str) -> int:
    """Return a number of bytes, with a unit or without."""
    found = _BYTES.fullmatch(text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    number = int(float(found[1]) * units[(found[2] or "").lower()]) if found else _MAX_BYTES + 1
    if number > _MAX_BYTES:
        raise RefusedValueError("bytes, or a number with KiB, MiB, GiB, KB, MB or GB", "write for example 2GiB")
    return number


def format_size(size: int) -> str:
    """Return a number of bytes with the largest binary unit that divides it."""
    unit = next((unit for unit in ("GiB", "MiB") if size and size % _UNITS[unit] == 0), "")
    return f"{size // _UNITS[unit]}{unit}"


def read_want(text: str) -> tuple[int, int]:
    """Return the number of concurrent requests and the tokens of each: 8x32k is eight requests of 32,768 tokens."""
    requests, cross, tokens = text.replace("×", "x").lower().partition("x")
    try:
        if not cross or not re.fullmatch(r"[0-9]{1,6}", requests, re.ASCII) or not 1 <= int(requests) <= MAX_SEQS:
            raise RefusedValueError("", "")
        return int(requests), read_tokens(tokens)
    except RefusedValueError:
        raise RefusedValueError(
            f"requests x tokens, up to {MAX_SEQS:,} requests", "write for example want=8x32k"
        ) from None


def format_want(want: tuple[int, int]) -> str:
    """Return the concurrent requests and the tokens of each, with an x between."""
    return "x".join(map(str, want))


def read_kv(text: str) -> str:
    """Return the dtype of a server's KV cache."""
    return choice((*KV_DTYPES, *CACHE_TYPES), _KV_NAMES)(text)


def read_layers(text: str) -> int:
    """Return a number of layers, from 0."""
    if not re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) or int(text) > MAX_LAYERS:
        raise RefusedValueError(f"whole numbers from 0 to {MAX_LAYERS:,}", "write for example 20")
    return int(text)


def read_offload(text: str) -> float:
    """GiB of weights that a server keeps on the host, with at most three decimals."""
    if not re.fullmatch(r"[0-9]{1,4}(?:\.[0-9]{1,3})?", text, re.ASCII) or float(text) > MAX_OFFLOAD:
        raise RefusedValueError(f"GiB from 0 to {MAX_OFFLOAD:,}, with at most three decimals", "write for example cpu_offload_gb=8")
    return float(text)


def read_lora_rank(text: str) -> int:
    """Return the largest rank of an adapter, one of those that vLLM allows."""
    if text not in map(str, LORA_RANKS):
        raise RefusedValueError(", ".join(map(str, LORA_RANKS)), "write the next larger one: smaller adapters fit its slots")
    return int(text)


def read_layout(text: str) -> dict[str, object]:
    """Return the field of a request for a layout that only servers have; empty for any other value of `weights`."""
    return {"server_weights": text.lower()} if text.lower() in (*LAYOUTS, *FILE_TYPES) and text.lower() not in WEIGHTS else {}
