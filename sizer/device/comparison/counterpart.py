"""The question and the device that an estimate is made for, so that it may be held against a measurement. No torch."""

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

KINDS = ("cuda", "mps", "cpu")  # of devices that an estimate has rules for


def request_of(measurement: Measurement) -> Request:
    """The question of a measurement, by the rules of the PyTorch that was measured; the installed one where they are not known."""
    request = parse_query(measurement.query)
    try:
        version = parse_version(measurement.versions.get("torch", "").partition("+")[0])
    except ValueError:  # one of PyTorch's nightly builds
        return request
    return replace(request, torch=format_version(version)) if version >= OLDEST else request


def gpu_of(facts: DeviceFacts) -> Gpu:
    """The device that an estimate is made for, so that it may be held against a measurement on `facts`.

    The catalogue's entry where name, capability and memory agree, else one made from the facts: its memory is what the
    device itself reported, its context follows from the threads that it can hold. Raises DeviceError for a kind of device
    that no estimate has rules for.
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
        total, source = typical.total_bytes, f"the device did not say how much memory it has; taken is {typical.name}'s"
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
    """Return whether a device is an entry of the catalogue: of one kind, the words of its model in the name, memory within a
    tenth."""
    if gpu.backend != facts.kind:
        return False
    if gpu.backend == "cpu":
        return True
    if not _words(gpu) <= set(re.findall(r"[a-z0-9]+", facts.name.lower())):
        return False
    near = facts.total_bytes is None or abs(facts.total_bytes - gpu.total_bytes) <= gpu.total_bytes // 10
    stands_in = gpu.maker != "NVIDIA"  # its capability is not the one that PyTorch reports
    return near and (stands_in or facts.capability is None or facts.capability == gpu.capability)


def _words(gpu: Gpu) -> set[str]:
    """The words of an entry's model: a device whose name has more of them is meant by the longer entry ("RTX 4070 Ti")."""
    return {word for word in gpu.key.split("-") if not re.fullmatch(r"\d+gb", word)}


def _typical(facts: DeviceFacts) -> Gpu:
    """The catalogue's entry that an unknown device is made from; its context stays where the threads are not known."""
    same = [gpu for gpu in GPUS.values() if gpu.backend == facts.kind]
    return next((gpu for gpu in same if facts.capability is not None and gpu.capability == facts.capability), same[0])
