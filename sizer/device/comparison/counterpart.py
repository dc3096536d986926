"""The request and the device for an estimate that is compared with a measurement. No torch."""

from __future__ import annotations

import re
from dataclasses import replace

from sizer.base.errors import DeviceError, quote
from sizer.base.versions import OLDEST, format_version, parse_version
from sizer.catalogue.contexts import context_of
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.device.record.measurement import DeviceFacts, Measurement
from sizer.query.request import Request
from sizer.query.text import parse_query

KINDS = ("cuda", "mps", "cpu")  # device types for which an estimate has rules


def request_of(measurement: Measurement) -> Request:
    """Return the request of a measurement, with the rules of the measured PyTorch; of the installed one if those are not known."""
    request = parse_query(measurement.query)
    try:
        version = parse_version(measurement.versions.get("torch", "").partition("+")[0])
    except ValueError:  # one of PyTorch's nightly builds
        return request
    return replace(request, torch=format_version(version)) if version >= OLDEST else request


def gpu_of(facts: DeviceFacts) -> Gpu:
    """Return the device for an estimate that is compared with a measurement on `facts`.

    This is the catalogue's entry if name, capability and memory agree, else a device made from the facts: its memory is the
    reported memory, its context is derived from its resident threads. Raises DeviceError for a kind of device without rules.
    """
    if facts.kind not in KINDS:
        raise DeviceError(
            "there is no estimate for this kind of device",
            given=quote(facts.device),
            allowed=", ".join(KINDS),
            todo="measure on another one",
        )
    known = max((gpu for gpu in GPUS.values() if _is_same(gpu, facts)), key=lambda gpu: len(_words(gpu)), default=None)
    if known is not None:
        return known if facts.total_bytes is None else replace(known, total_bytes=facts.total_bytes)
    typical = _typical(facts)
    total, source = facts.total_bytes, "as the device reported"
    if total is None:
        total, source = typical.total_bytes, f"the device did not report its memory; the memory of {typical.name} is used"
    unknown = replace(
        typical,
        key=facts.kind,
        name=facts.name or facts.device,
        capability=facts.capability,
        total_bytes=total,
        source=source,
    )
    return unknown if facts.resident_threads is None else _with_context(unknown, facts.resident_threads)


def _with_context(gpu: Gpu, threads: int) -> Gpu:
    context = context_of(threads, gpu.capability)
    return replace(
        gpu,
        context_low_bytes=context.low_bytes,
        context_bytes=context.typical_bytes,
        context_high_bytes=context.high_bytes,
    )


def _is_same(gpu: Gpu, facts: DeviceFacts) -> bool:
    """Return whether a device matches an entry of the catalogue: its type, the words of its model, and its memory within a tenth.
    """
    if gpu.backend != facts.kind:
        return False
    if gpu.backend == "cpu":
        return True
    if not _words(gpu) <= set(re.findall(r"[a-z0-9]+", facts.name.lower())):
        return False
    near = facts.total_bytes is None or abs(facts.total_bytes - gpu.total_bytes) <= gpu.total_bytes // 10
    stands_in = gpu.maker != "NVIDIA"  # the modelled capability differs from PyTorch's
    return near and (stands_in or facts.capability is None or facts.capability == gpu.capability)


def _words(gpu: Gpu) -> set[str]:
    """Return the words of an entry's model: if several entries match a device's name, the longest one is meant ("RTX 4070 Ti")."""
    return {word for word in gpu.key.split("-") if not re.fullmatch(r"\d+gb", word)}


def _typical(facts: DeviceFacts) -> Gpu:
    """Return the catalogue's entry that serves as a template for an unknown device.

    Its context is used if the threads are not known.
    """
    same = [gpu for gpu in GPUS.values() if gpu.backend == facts.kind]
    return next((gpu for gpu in same if facts.capability is not None and gpu.capability == facts.capability), same[0])
