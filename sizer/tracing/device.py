"""Device facts for rules, a compute capability that records its comparisons, and findings of a trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from sizer.base.versions import Version, installed_version
from sizer.catalogue.gpus import Backend, Gpu
from sizer.tape.archive import Decision, Kernel, Range
from sizer.tape.compiled_code import CompiledCode, merge_compiled

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    name: getattr(operator, name) for name in ("lt", "le", "eq", "ne", "ge", "gt")
}


class Capability(tuple[int, int]):
    """Compute capability (major, minor). Comparisons of it, and of its numbers, are recorded in `decisions`.

    For other uses (a sum, a text made from it) there is `plain`, which is not recorded.
    """

    decisions: set[Decision]

    def __new__(cls, plain: tuple[int, int]) -> Capability:
        """Return the capability of a device, without recorded comparisons."""
        made = super().__new__(cls, plain)
        made.decisions = set()
        return made

    def among(self, *ranges: Range) -> bool:
        """Return whether it is in one of some ranges, both ends included.

        The ranges are recorded as a single comparison: it makes no difference which of them matches.
        """
        outcome = _is_among(self.plain, ranges)
        self.decisions.add(("capability", "among", ranges, outcome))
        return outcome

    @property
    def plain(self) -> tuple[int, int]:
        """Capability (major, minor) as plain numbers."""
        major, minor = tuple.__iter__(self)
        return major, minor

    def __getitem__(self, index: int) -> _Number:  # type: ignore[override] # no slices
        """Return major (0) or minor (1)."""
        return _Number(tuple.__getitem__(self, index), ("major", "minor")[index], self.decisions)

    def __iter__(self) -> NoReturn:
        """Refuse iteration: the numbers of an iteration would be plain ones. Raises TypeError."""
        raise TypeError("a rule compares a capability; where its numbers themselves are wanted, ask for .plain")

    def __hash__(self) -> NoReturn:
        """Refuse hashing: a value looked up by a capability depends on the whole capability. Raises TypeError."""
        raise TypeError("a rule compares a capability; where it is a key, ask for .plain")


class _Number(int):
    """Major or minor number with recorded comparisons."""

    name: str
    decisions: set[Decision]

    def __new__(cls, value: int, name: str, decisions: set[Decision]) -> _Number:
        made = super().__new__(cls, value)
        made.name, made.decisions = name, decisions
        return made

    __hash__ = int.__hash__


def _compare_capability(name: str) -> Callable[[Capability, tuple[int, int]], bool]:
    def compare(self: Capability, other: tuple[int, int]) -> bool:
        outcome = COMPARISONS[name](self.plain, other)
        self.decisions.add(("capability", name, other, outcome))
        return outcome

    return compare


def _compare_number(name: str) -> Callable[[_Number, int], bool]:
    def compare(self: _Number, other: int) -> bool:
        outcome = COMPARISONS[name](int(self), other)
        self.decisions.add((self.name, name, other, outcome))
        return outcome

    return compare


for _name in COMPARISONS:
    setattr(Capability, f"__{_name}__", _compare_capability(_name))
    setattr(_Number, f"__{_name}__", _compare_number(_name))


def decide_alike(capability: tuple[int, int], decisions: Iterable[Decision]) -> bool:
    """Return whether each of the comparisons has the same outcome for this capability."""
    sides: dict[str, Any] = {"capability": capability, "major": capability[0], "minor": capability[1]}
    compare: dict[str, Callable[[Any, Any], bool]] = COMPARISONS | {"among": _is_among}
    return all(compare[name](sides[what], other) == outcome for what, name, other, outcome in decisions)


def _is_among(capability: tuple[int, int], ranges: Iterable[Range]) -> bool:
    return any(low <= capability <= high for low, high in ranges)


# -------------------------------------------------------------------------------------------------------------- device


if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("cuda", "mps", "cpu")


class Device:
    """Facts of a device, for the traces of one model in one dtype.

    They are the kind "cuda", "mps" or "cpu", and the capability (major, minor) for CUDA. The version (major, minor) of PyTorch
    selects the rules in `sizer.tracing.device_rules`; it is the installed version by default.

    If traces are `shared`, sizes that depend on the capability only become size queries (`cuda.by_capability`). `answers_for`
    is the GPU with the number of multiprocessors for compiled code or Liger's layers; None if the traces are valid for every
    GPU of the capability. `kernels()` are the chosen kernels and the reasons, for the report; `where` returns the current
    module.
    """

    def __init__(
        self,
        kind: Backend,
        capability: tuple[int, int] | None = None,
        *,
        version: Version | None = None,
        shared: bool = False,
        answers_for: Gpu | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"no rules for device {kind!r}: give one of {', '.join(KINDS)}")
        if (kind == "cuda") != (capability is not None):
            raise ValueError("a compute capability goes with kind 'cuda' and with no other")
        self.kind = kind
        self._capability = None if capability is None else Capability(capability)
        self.version = version or installed_version()
        self.shared = shared
        self.answers_for = answers_for
        self._compiled: list[CompiledCode] = []
        self.dtype = ""
        self._modules: dict[tuple[str, str, str], set[str]] = {}
        self.where: Callable[[], str] = str
        self.is_on_host: Callable[[Tensor], bool] = lambda tensor: tensor.is_cpu  # also meta tensors that represent host memory
        self.halves_differ = False  # whether a traced operator treats float16 and bfloat16 differently
        self.differs_at_one = False  # whether a traced operator uses another kernel for a batch of one
        self.changes_at: int | None = None  # the batch size from which a traced operator uses another kernel

    @property
    def capability(self) -> Capability:
        """Compute capability of a CUDA device. Raises ValueError for other devices, which have none."""
        if self._capability is None:
            raise ValueError(f"a device {self.kind!r} has no compute capability: ask its kind first")
        return self._capability

    def note_choice(self, operator: str, kernel: str, why: str) -> None:
        """Note the kernel chosen for an operator, and the reason."""
        self._modules.setdefault((operator, kernel, why), set()).add(self.where())

    def repeat_choices(self, like: Callable[[str], Iterable[str]]) -> None:
        """Note every choice also for the modules that are `like` the noted ones."""
        for modules in self._modules.values():
            modules.update([other for path in modules for other in like(path)])

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the chosen kernels, in the order of their first use."""
        return tuple(
            Kernel(operator=operator, kernel=kernel, why=why, modules=len(modules))
            for (operator, kernel, why), modules in self._modules.items()
        )

    def note_compiled(self, code: CompiledCode | None) -> None:
        """Note the compiler's findings in one trace."""
        if code is not None:
            self._compiled.append(code)

    def compiled(self) -> CompiledCode | None:
        """Return the compiler's findings in all traces, None if no code was compiled."""
        return merge_compiled(self._compiled)

    def decisions(self) -> tuple[Decision, ...]:
        """Return the recorded comparisons of the capability."""
        return () if self._capability is None else tuple(sorted(self._capability.decisions, key=repr))
