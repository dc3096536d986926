"""The device that a key names: one of the catalogue, or a custom device such as `custom:24GiB@8.9`.

A custom device is a CUDA device: its memory as PyTorch reports it, and its compute capability. The capability has no default,
because kernels, their workspaces and the memory of the process outside the allocator depend on it.

*Known limitations*: its number of multiprocessors is unknown. The memory of the process outside the allocator is therefore a
range over the catalogue's devices of the same capability. Workspaces are modelled, because no library can be queried for them.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import cache

from sizer.base.errors import GIVEN_LIMIT, RefusedValueError, did_you_mean, letters, suggest
from sizer.base.units import GIB
from sizer.catalogue.contexts import Context, context_between
from sizer.catalogue.gpus import GPUS, RANGED, Gpu, read_rows

CUSTOM = "custom"
EXAMPLE = "custom:24GiB@8.9"
CAPABILITIES: tuple[tuple[int, int], ...] = tuple(
    sorted({gpu.capability for gpu in GPUS.values() if gpu.maker == "NVIDIA" and gpu.capability is not None})
)

_MAKERS = ("", "nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "oam")
_SAME_MEMORY, _SIMILAR_MEMORY = 0.003, 0.05  # maximum relative differences of a reported memory
_UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
_PARTS = re.compile(r"sxm[0-9]?|pcie|hbm[0-9]e?|gpu|generation|edition|workstation|server|blackwell")  # parts of drivers' names
_COUNTED = re.compile(r"([0-9]{1,3})\s*[x×*]\s*(\S.*)|(\S*[0-9].*?)\s*[x×*]\s*([0-9]{1,3})", re.IGNORECASE)
_MACHINE = re.compile(r"(cuda|gpu)(:?[0-9]+)?|mps|nvidia|amd|apple", re.IGNORECASE)  # devices of a machine, not a model
_FORM = re.compile(
    r"custom:([0-9]{1,7}(?:\.[0-9]{1,3})?) ?(MiB|GiB|MB|GB)@([0-9]{1,2})\.([0-9])", re.ASCII | re.IGNORECASE
)
_MAKER = re.compile(r"^(nvidia|amd|apple|intel)?(geforce|radeon|instinct)?")
_SMALLEST_GIB, _LARGEST_GIB = 2, 4096
_SUGGESTIONS = 3


def find_gpu(key: str) -> Gpu:
    """Return the device with this key; case, separators and the maker's name in front are ignored.

    The driver's name, such as "NVIDIA A100-SXM4-80GB", is accepted too. A custom device has the canonical form as its `key`.

    Raises RefusedValueError, with similar keys, if there is none.
    """
    if is_custom(key):
        return _custom_gpu(key)
    if (known := _known(key)) is not None:
        return GPUS[known]
    raise RefusedValueError(
        f"a key that `python -m sizer gpus` lists, or a device of your own as in {EXAMPLE}",
        _of_many(key) or _suggestion(key) or "write for example gpu=rtx-4090",
    )


def _known(text: str) -> str | None:
    """Return the key of the catalogue's device that a text is the key or the name of, or None."""
    if text in GPUS:
        return text
    if len(text) > GIVEN_LIMIT:
        return None
    return _by_letters().get(_MAKER.sub("", letters(text))) or _key_of_name(text)


@cache
def _by_printed_name() -> dict[str, list[str]]:
    """Return the keys of devices by the letters of the names that a driver and the catalogue print."""
    found: dict[str, list[str]] = {}
    for row in read_rows():
        for name in filter(None, {letters(row["driver_name"]), letters(row["name"])}):
            found.setdefault(name, []).append(row["key"])
    return found


def _key_of_name(name: str) -> str | None:
    """Return the key of the only device that a driver, or the catalogue, prints by this name; None for another name.

    The name may contain the form factor, and the memory, which must match the device.
    """
    printed = _by_printed_name().get(letters(name), [])
    if len(printed) == 1:
        return printed[0]
    words = re.split(r"[\s_()-]+", re.sub(r"(\d) (gb)", r"\1\2", name.lower()))
    words = [word for word in words if word and word not in _MAKERS]
    sizes = [word for word in words if re.fullmatch(r"[0-9]{1,4}gb", word)]
    named = [word for word in words if word not in sizes]
    bare = [word for word in named if not _PARTS.fullmatch(word)]
    for asked in (named + sizes, named, bare + sizes, bare):
        if (found := _by_letters().get("".join(map(letters, asked)))) is not None:
            sized = letters(GPUS[found].name)
            return found if all(size in sized for size in sizes) else None
    return None


def _of_many(text: str) -> str | None:
    """Return a suggestion for several devices ("8xH100"), or for a device of a machine ("cuda:0"); None for another text."""
    if len(text) > GIVEN_LIMIT:
        return None
    if _MACHINE.fullmatch(text.strip()):
        return "write the device's model, for example gpu=rtx-4090 or gpu=m4-24gb"
    if (found := _COUNTED.fullmatch(text.strip())) is None:
        return None
    number, one = (found[1], found[2]) if found[1] else (found[4], found[3])
    key = _known(one) or next(iter(_held(one)), None)
    return key and f"write gpu={key}&ranks={number} with parallel=fsdp, ddp, tp or pp"


@cache
def _by_letters() -> dict[str, str]:
    return {letters(key): key for key in GPUS}


def key_of_driver(name: str, total_bytes: int | None = None) -> str | None:
    """Return the key of a device by the name that a driver prints, None if the catalogue has none.

    Args:
        name: Such as "NVIDIA A100-SXM4-80GB"; separators do not count.
        total_bytes: Memory of the device if it is known, which decides between sizes of one name.
    """
    known = {letters(row["driver_name"]): row["key"] for row in read_rows() if row["driver_name"]}
    found = known.get(letters(name)) or _key_of_words(name, total_bytes)
    if found is None or total_bytes is None:
        return found
    return found if abs(GPUS[found].total_bytes / total_bytes - 1) <= _SIMILAR_MEMORY else None


def _key_of_words(name: str, total_bytes: int | None) -> str | None:
    """Return the key that equals the first words of a name, with or without its memory; of several sizes the nearest."""
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word not in _MAKERS]
    sizes = [word for word in words if re.fullmatch(r"[0-9]{1,4}gb", word)]
    begins = [words[:count] for count in range(len(words), 0, -1)]
    for begin in (*begins, *(begin + sizes for begin in begins)):
        if (found := _by_letters().get(letters("".join(begin)))) is not None:
            return found
    model = letters("".join(words))
    alike = [key for key in GPUS if model and re.fullmatch(rf"{re.escape(model)}[0-9]+gb", letters(key))]
    if len(alike) > 1 and total_bytes is not None:
        alike.sort(key=lambda key: abs(GPUS[key].total_bytes - total_bytes))
        return alike[0]
    return alike[0] if len(alike) == 1 else None


def keys_of_memory(total_bytes: int) -> list[str]:
    """Return the keys of NVIDIA's and AMD's devices with a memory within 0.3 % of a size, the nearest first.

    WSL shows all memory of GeForce and RTX cards, which Linux's driver keeps a part of: 23.99 GiB of an RTX 4090, not 23.52.
    """
    far = {key: abs(gpu.total_bytes / total_bytes - 1) for key, gpu in GPUS.items() if gpu.maker in ("NVIDIA", "AMD")}
    for key in (key for key in far if key.startswith(("rtx-", "gtx-"))):
        whole = -(-GPUS[key].total_bytes // GIB) * GIB
        far[key] = min(far[key], abs(whole / total_bytes - 1))
    return sorted((key for key in far if far[key] <= _SAME_MEMORY), key=lambda key: far[key])


def is_custom(key: str) -> bool:
    """Return True if a key describes a custom device."""
    return key.lower().startswith(f"{CUSTOM}:") or key.lower() == CUSTOM


def split_custom(key: str) -> tuple[str, str]:
    """Return memory ("24GiB") and capability ("8.9") of a custom device, as in its key."""
    memory, _, capability = key.partition(":")[2].partition("@")
    return memory, capability


def format_capability(capability: tuple[int, int]) -> str:
    """Return a compute capability in NVIDIA's notation ("8.9")."""
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
    """Return the memory range of a process outside the allocator, over the catalogue's devices of a capability."""
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
    """Return similar keys: those with the text in the key or name, else those with similar spelling."""
    return did_you_mean(_held(text)[:_SUGGESTIONS]) or suggest(text, GPUS, _SUGGESTIONS)


def _held(text: str) -> list[str]:
    """Return the keys of devices with the text in their key or name."""
    wanted = _MAKER.sub("", letters(text)) or letters(text)
    held = [
        key for key, gpu in GPUS.items() if wanted in letters(key) or wanted in letters(f"{gpu.maker} {gpu.name}")
    ]
    return held if len(wanted) > 1 else []
