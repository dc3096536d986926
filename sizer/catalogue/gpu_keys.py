"""The device that a key names: one of the catalogue, or one of one's own, as in `custom:24GiB@8.9`.

A device of one's own is CUDA's: its memory as PyTorch reports it, and its compute capability. The capability has no default, since
kernels, their workspaces and what the process holds outside the allocator follow from it.

*Known limitations*: nothing tells how many multiprocessors it has, so what the process holds outside the allocator is a range over
the catalogue's devices of its capability, and no library is asked for workspaces: they are modelled.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import cache

from sizer.base.errors import RefusedValueError, did_you_mean, letters, suggest
from sizer.catalogue.contexts import Context, context_between
from sizer.catalogue.gpus import GPUS, RANGED, Gpu

CUSTOM = "custom"
EXAMPLE = "custom:24GiB@8.9"
CAPABILITIES: tuple[tuple[int, int], ...] = tuple(
    sorted({gpu.capability for gpu in GPUS.values() if gpu.maker == "NVIDIA" and gpu.capability is not None})
)

_UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
_FORM = re.compile(
    r"custom:([0-9]{1,7}(?:\.[0-9]{1,3})?) ?(MiB|GiB|MB|GB)@([0-9]{1,2})\.([0-9])", re.ASCII | re.IGNORECASE
)
_MAKER = re.compile(r"^(nvidia|amd|apple|intel)?(geforce|radeon|instinct)?")
_SMALLEST_GIB, _LARGEST_GIB = 2, 4096
_SUGGESTIONS = 3


def find_gpu(key: str) -> Gpu:
    """The device with this key; case, separators and the maker's name before it do not count.

    The `key` of one of one's own is its canonical form.

    Raises RefusedValueError, with the keys that may have been meant, where there is none.
    """
    if key in GPUS:
        return GPUS[key]
    if is_custom(key):
        return _custom_gpu(key)
    if (same := _by_letters().get(_MAKER.sub("", letters(key)))) is not None:
        return GPUS[same]
    raise RefusedValueError(
        f"a key that `python -m sizer gpus` lists, or a device of your own as in {EXAMPLE}",
        _suggestion(key) or "write for example gpu=rtx-4090",
    )


@cache
def _by_letters() -> dict[str, str]:
    return {letters(key): key for key in GPUS}


def is_custom(key: str) -> bool:
    """Return True if a key describes a custom device."""
    return key.lower().startswith(f"{CUSTOM}:") or key.lower() == CUSTOM


def split_custom(key: str) -> tuple[str, str]:
    """Memory ("24GiB") and capability ("8.9") of a device of one's own, as its key has them."""
    memory, _, capability = key.partition(":")[2].partition("@")
    return memory, capability


def format_capability(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it ("8.9")."""
    return ".".join(map(str, capability))


def _custom_gpu(key: str) -> Gpu:
    found = _FORM.fullmatch(key)
    if found is None:
        raise _refused_custom()
    number, unit, capability = Decimal(found[1]), _unit(found[2]), (int(found[3]), int(found[4]))
    total_bytes = int(number * _UNITS[unit])
    if capability not in CAPABILITIES or not _SMALLEST_GIB * 2**30 <= total_bytes <= _LARGEST_GIB * 2**30:
        raise _refused_custom()
    memory, written, context = f"{number.normalize():f}", format_capability(capability), _context(capability)
    return Gpu(
        key=f"{CUSTOM}:{memory}{unit}@{written}",
        name=f"CUDA device of capability {written} ({memory} {unit})",
        total_bytes=total_bytes,
        backend="cuda",
        capability=capability,
        context_low_bytes=context.low_bytes,
        context_bytes=context.typical_bytes,
        context_high_bytes=context.high_bytes,
        source=f"as given; outside PyTorch: {context.source}",
        maker="NVIDIA",
    )


def _unit(text: str) -> str:
    return next(unit for unit in _UNITS if unit.lower() == text.lower())


def _context(capability: tuple[int, int]) -> Context:
    """Return what a process holds outside the allocator on any of the catalogue's devices of a capability."""
    alike = [gpu for gpu in RANGED if gpu.maker == "NVIDIA" and gpu.capability == capability]
    contexts = [
        Context(
            low_bytes=gpu.context_low_bytes,
            typical_bytes=gpu.context_bytes,
            high_bytes=gpu.context_high_bytes,
            source=gpu.source,
        )
        for gpu in alike
    ]
    return context_between(
        contexts, f"any of the catalogue's {len(alike)} of capability {format_capability(capability)}"
    )


def _refused_custom() -> RefusedValueError:
    known = ", ".join(map(format_capability, CAPABILITIES))
    return RefusedValueError(
        f"{CUSTOM}:<memory>@<capability>, memory from {_SMALLEST_GIB} GiB to {_LARGEST_GIB:,} GiB in MiB, GiB, MB or GB as "
        f"PyTorch reports it, capability one of {known}",
        f"write for example gpu={EXAMPLE}",
    )


def _suggestion(text: str) -> str | None:
    """The keys that may have been meant: those whose key or name holds the text, else those that look like it."""
    wanted = _MAKER.sub("", letters(text)) or letters(text)
    held = (
        key for key, gpu in GPUS.items() if wanted in letters(key) or wanted in letters(f"{gpu.maker} {gpu.name}")
    )
    return did_you_mean(list(held)[:_SUGGESTIONS] if len(wanted) > 1 else ()) or suggest(text, GPUS, _SUGGESTIONS)
