"""Cached counts and traces of one architecture: their names, and the devices that share them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from sizer.base.codec import DecodeError, decode, encode
from sizer.catalogue.gpu_keys import CAPABILITIES
from sizer.estimating.scopes import choices_of
from sizer.query.request import Request
from sizer.report.explanation import RuleTexts
from sizer.tape.archive import Traced, pack, unpack
from sizer.tape.family import TapeFamily
from sizer.tape.tape import Tape
from sizer.tracing.cuda.by_capability import sized
from sizer.tracing.device import Device, decide_alike

if TYPE_CHECKING:
    from sizer.tracing.depth import Depths

T = TypeVar("T")


class ResultStore(Protocol):
    """Storage of the counts and traces of one architecture. Names say everything else that a result depends on."""

    def get(self, name: str) -> bytes | None:
        """Return the bytes stored under a name, None if there are none."""

    def put(self, name: str, data: bytes) -> None:
        """Keep something under a name."""


class EmptyStore:
    """Keeps nothing."""

    def get(self, name: str) -> bytes | None:
        """None."""
        return None

    def put(self, name: str, data: bytes) -> None:
        """Do nothing."""


class ScopedResults:
    """Results of one scope (`sizer.estimating.scopes`). The scope is the first line of each name.

    Each value begins with its name's digest, which binds it to its question: bytes that come from another name are no result.
    """

    def __init__(self, store: ResultStore, scope: str) -> None:
        self._store, self._scope = store, scope

    def get(self, name: str) -> bytes | None:
        """Return the value of a name, None if there is none."""
        full = f"{self._scope}\n{name}"
        data, bound = self._store.get(full), digest_name(full)
        return data[len(bound) :] if data is not None and data.startswith(bound) else None

    def put(self, name: str, data: bytes) -> None:
        """Keep a value."""
        full = f"{self._scope}\n{name}"
        self._store.put(full, digest_name(full) + data)


def digest_name(name: str) -> bytes:
    """Return the digest that a value begins with."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Facts on the installed PyTorch that an answer needs besides its traces.

    These are the texts of a device's rules, and the GPUs that it was built for (`sizer.tracing.cuda.builds`).
    """

    texts: RuleTexts
    built_for: tuple[str, ...]


class StoredTapes:
    """Cached tapes of one request's work, by dtype, for one kind of device, unpacked once for all requests on a module.

    A cached tape is shared by devices of several capabilities, and by loops that keep or free outputs. `sized` makes it this
    request's.
    """

    def __init__(self, store: ResultStore, request: Request, device: Device, unpacked: dict[str, Traced]) -> None:
        self.unpacked = unpacked  # by the names that they are kept under
        self._store, self._device, self._choices = store, device, choices_of(request)
        self._capability = device.capability.plain if device.kind == "cuda" else None
        self._outputs = request.outputs
        # By the identity of the shared result: that result, and its form for this request
        self._adapted: dict[int, tuple[Traced, Traced]] = {}

    def name(self, dtype: str, *, capability: tuple[int, int] | None = None, at_batch: int | None = None) -> str:
        """Return the name under which the tapes of a dtype traced for this device, or for another capability, are stored."""
        device = self._device
        rules = (device.kind, *(capability or self._capability or ()), *device.version)
        alone = "" if at_batch is None else f" at batch {at_batch}"
        if (gpu := device.answers_for) is not None:  # its number of multiprocessors decides, too
            alone += f" for {gpu.key} {gpu.name} {gpu.total_bytes}"
        return f"traced {dtype} {'.'.join(map(str, rules))} {self._choices}{alone}"

    def find(self, dtype: str, *, at_batch: int | None = None) -> Traced | None:
        """Return the result traced for this device's capability, or for one with equal answers to all comparisons of its rules."""
        own = self._capability
        if (found := self._read(self.name(dtype, at_batch=at_batch))) is not None:
            return found
        if own is None or self._device.answers_for is not None:
            return None
        for capability in CAPABILITIES:
            found = self._read(self.name(dtype, capability=capability, at_batch=at_batch))
            if found is not None and decide_alike(own, found.decisions):
                return found
        return None

    def keep(self, dtype: str, traced: Traced, *, at_batch: int | None = None) -> None:
        """Keep the tapes of a dtype."""
        name = self.name(dtype, at_batch=at_batch)
        self.unpacked[name] = traced
        self._store.put(name, pack(traced))

    def sized(self, traced: Traced) -> Traced:
        """Return a result with the sizes of this device's capability and the loop of the request."""
        if self._capability is None and self._outputs is None:
            return traced
        if id(traced) not in self._adapted:
            own = traced.family
            if self._capability is not None:
                own = sized(own, self._capability, self._device.version)
            self._adapted[id(traced)] = traced, replace(traced, family=own.with_outputs(self._outputs))
        return self._adapted[id(traced)][1]

    def _read(self, name: str) -> Traced | None:
        """Return the result stored under a name, unpacked once."""
        if name not in self.unpacked and (data := self._store.get(name)) is not None:
            with contextlib.suppress(DecodeError):  # bytes that another version stored are traced again
                self.unpacked[name] = unpack(data)
        return self.unpacked.get(name)


def keep_depths(store: ResultStore, name: str, depths: Depths) -> None:
    """Keep a few depths of a model."""
    note = json.dumps([[asdict(one) for one in depths.candidate], depths.attempt])
    store.put(name, pack(Traced(family=TapeFamily(exact=depths.tapes), note=note)))


def read_depths(store: ResultStore, name: str) -> Depths | None:
    """Return the depths that `keep_depths` stored; None without any, or from another version."""
    from sizer.tracing.depth import Depths, Repeated  # import torch

    if (data := store.get(name)) is None:
        return None
    with contextlib.suppress(DecodeError, ValueError, TypeError, KeyError):
        traced = unpack(data)
        lists, attempt = json.loads(traced.note)
        candidate = tuple(Repeated(**{**one, "stacks": tuple(one["stacks"])}) for one in lists)
        return Depths(tapes=traced.family.exact, candidate=candidate, attempt=tuple(attempt))
    return None


def keep_tape(store: ResultStore, name: str, tape: Tape) -> None:
    """Keep one tape."""
    store.put(name, pack(Traced(family=TapeFamily(exact=(tape,)))))


def read_tape(store: ResultStore, name: str) -> Tape | None:
    """Return a tape that `keep_tape` stored; None without one, or from another version."""
    if (data := store.get(name)) is not None:
        with contextlib.suppress(DecodeError, ValueError):
            (tape,) = unpack(data).family.exact
            return tape
    return None


def read_value(store: ResultStore, name: str, kind: type[T], path: str) -> T | None:
    """Return a value that `keep` stored, of a type of the codec; None without one, or from another version."""
    if (data := store.get(name)) is not None:
        with contextlib.suppress(DecodeError, ValueError):
            return decode(kind, json.loads(data), path)
    return None


def keep(store: ResultStore, name: str, value: object) -> None:
    """Keep a value of a type that the codec knows."""
    store.put(name, json.dumps(encode(value)).encode("ascii"))
