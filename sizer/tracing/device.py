"""A device as far as rules depend on it, and what a trace finds out by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sizer.versions import Version, installed_version

KINDS = ("cuda", "mps", "cpu")


@dataclass(slots=True)
class Choice:
    """A kernel that was taken for an operator, why, and per dtype of the contract the modules that took it."""

    operator: str
    kernel: str
    why: str
    modules: dict[str, set[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operator}: {self.kernel} ({self.why})"


class Device:
    """The facts of a device: kind "cuda", "mps" or "cpu"; capability (major, minor) for CUDA; the version (major, minor) of the
    PyTorch whose rules are followed, the installed one where none is given. The rules themselves are `sizer.tracing.rules`.

    Made for one trace or several of the same model: `choices` collects which kernels were taken and why, for the report; `dtype` is
    the dtype being traced and `where` returns the module at work, both for `choices`.
    """

    def __init__(self, kind: str, capability: tuple[int, int] | None = None, *, version: Version | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"no rules for device {kind!r}: give one of {', '.join(KINDS)}")
        if (kind == "cuda") != (capability is not None):
            raise ValueError("a compute capability goes with kind 'cuda' and with no other")
        self.kind = kind
        self.capability = capability
        self.version = version or installed_version()
        self.choices: dict[str, Choice] = {}
        self.dtype = ""
        self.where: Callable[[], str] = str
        self.halves_differ = False  # whether a traced operator treats float16 and bfloat16 differently
        self.differs_at_one = False  # whether a traced operator takes another kernel for a batch of one
        self.changes_at: int | None = None  # the batch size from which a traced operator takes another kernel

    def note_choice(self, operator: str, kernel: str, why: str) -> None:
        """Note which kernel was taken for an operator and why."""
        choice = Choice(operator, kernel, why)
        choice = self.choices.setdefault(str(choice), choice)
        choice.modules.setdefault(self.dtype, set()).add(self.where())
