"""Explanation of a report: the assumed kernels, their internal memory, and which figures are exact or modelled.

Plain values, and the same as sections of plain lines, which the command line and the page both show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sizer.base.units import format_bytes, pluralize
from sizer.tape.tape import CATEGORIES, Tape

_WORKSPACE = CATEGORIES.index("workspace")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """Kernel assumed for an operator: the reason, the dtypes of the request, and the largest number of modules."""

    operator: str
    kernel: str
    why: str
    dtypes: tuple[str, ...]
    modules: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceUse:
    """Internal memory of an operator's kernel: the most bytes at once, at one batch size, over the named dtypes.

    `calls` counts the calls in one traced piece of work. `kept` is True if some of the memory stays to the end. `formula` says
    how the bytes are computed and in which source. `modelled` is True if only a closed library knows the true bytes.
    """

    op: str
    bytes: int
    calls: int
    kept: bool
    dtypes: tuple[str, ...]
    batch: int
    formula: str
    modelled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Explanation of the bytes that an operator's kernel holds internally.

    `modelled` is True if they are a model. `asked` is the text to use if the bytes are a library's own answers.
    """

    text: str
    modelled: bool = False
    asked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorText:
    """Text of an operator's rule about the bytes inside its kernel.

    `by_cudnn` is True if cuDNN decides the bytes, `convolves` if cuDNN can be queried for them.
    """

    name: str
    text: str
    by_cudnn: bool = False
    convolves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitationText:
    """A known limitation of the rules for some operators; of all work if `operators` is empty."""

    text: str
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTexts:
    """Texts of the rules of a kind of device: plain data, so that a cached answer is explained without torch.

    `allocations` are the operators with kernels that hold memory, `products` those that call cuBLAS, empty for other devices.
    `convolutions` are all operators that convolve on CUDA.
    """

    allocations: tuple[OperatorText, ...] = ()
    products: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    limitations: tuple[LimitationText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of a report's computation.

    `rules` names the rules' device and PyTorch version. `margins` lists for each dtype the parts of the process's range, at one
    batch size.
    """

    rules: str
    kernels: tuple[KernelUse, ...] = ()
    workspaces: tuple[WorkspaceUse, ...] = ()
    stand_ins: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    modelled: tuple[str, ...] = ()
    allocator: tuple[str, ...] = ()
    margins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A title with its lines of plain text."""

    title: str
    lines: tuple[str, ...]


def explain_workspaces(
    tapes: Mapping[str, Tape], formulas: Mapping[str, Formula] | None = None
) -> tuple[WorkspaceUse, ...]:
    """Return the workspaces of tapes by dtype, largest first; dtypes with equal figures of an operator share a row."""
    rows: dict[tuple[str, int, int, bool, bool], list[str]] = {}
    for dtype, tape in tapes.items():
        answered = _answered(tape)
        for op, (size, calls, kept) in _bytes_in_kernels(tape).items():
            if size == 0:  # queried, and zero on this device
                continue
            rows.setdefault((op, size, calls, kept, op in answered), []).append(dtype)
    batch = next(iter(tapes.values())).batch if tapes else 0
    uses = []
    for (op, size, calls, kept, is_answered), dtypes in rows.items():
        formula = (formulas or {}).get(op, Formula(text=""))
        uses.append(
            WorkspaceUse(
                op=op,
                bytes=size,
                calls=calls,
                kept=kept,
                dtypes=tuple(dtypes),
                batch=batch,
                formula=(formula.asked if is_answered else "") or formula.text,
                modelled=formula.modelled and not is_answered,
            )
        )
    return tuple(sorted(uses, key=lambda use: (-use.bytes, use.op)))


def _answered(tape: Tape) -> set[str]:
    """Return the operators with an answer to every size query."""
    answered = tape.resolved
    asked = {tape.op_names[tape.ops[block]] for question in tape.size_queries for block in question.blocks}
    open_ = {
        tape.op_names[tape.ops[block]]
        for question in tape.size_queries
        for block in question.blocks
        if block not in answered
    }
    return asked - open_


def _bytes_in_kernels(tape: Tape) -> dict[str, tuple[int, int, bool]]:
    """(most bytes of workspace at once, calls, whether some stays) by operator; stages of one call follow each other."""
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    calls: dict[int, int] = {}
    ended: dict[int, int] = {}
    order = np.asarray(tape.order, np.int64)
    blocks = np.where(order >= 0, order, ~order)
    workspaces = np.flatnonzero(np.frombuffer(tape.categories, np.uint8)[blocks] == _WORKSPACE)
    asked, blocks = order[workspaces] >= 0, blocks[workspaces]
    columns = (workspaces, asked, np.asarray(tape.ops)[blocks], np.asarray(tape.sizes)[blocks])
    for position, asks, op, size in zip(*(column.tolist() for column in columns), strict=True):
        now = alive.get(op, 0)
        if asks:
            calls[op] = calls.get(op, 0) + (now == 0 and ended.get(op) != position - 1)
            now += size
            most[op] = max(most.get(op, 0), now)
        else:
            now -= size
        alive[op], ended[op] = now, position
    return {tape.op_names[op]: (size, calls[op], alive[op] > 0) for op, size in most.items()}


def sections(explanation: Explanation) -> tuple[Section, ...]:
    """Return the explanation as titled lines, without empty sections."""
    uses: list[KernelUse | WorkspaceUse] = [*explanation.kernels, *explanation.workspaces]
    every = tuple(dict.fromkeys(dtype for use in uses for dtype in use.dtypes))
    batch = explanation.workspaces[0].batch if explanation.workspaces else 0
    found = (
        Section(
            title=f"Kernels, by the rules of {explanation.rules}",
            lines=tuple(_kernel_lines(explanation.kernels, every)),
        ),
        Section(
            title=f"Internal memory of kernels, at batch {batch}",
            lines=tuple(_workspace_lines(explanation.workspaces, every)),
        ),
        Section(title="Stand-ins for unknown values", lines=explanation.stand_ins),
        Section(title="Exact", lines=explanation.exact),
        Section(title="Modelled or left out", lines=explanation.modelled),
        Section(title="Allocator", lines=explanation.allocator),
        Section(title="The range of the process, and its parts", lines=explanation.margins),
    )
    return tuple(section for section in found if section.lines)


def _kernel_lines(kernels: Iterable[KernelUse], every: tuple[str, ...]) -> Iterator[str]:
    for use in kernels:
        where = f", {use.modules} modules" if use.modules > 1 else ""
        yield f"{use.operator}: {use.kernel} ({use.why}){where}{_dtypes(use.dtypes, every)}"


def _workspace_lines(workspaces: Iterable[WorkspaceUse], every: tuple[str, ...]) -> Iterator[str]:
    """Yield one line for each formula, and below it the bytes in each operator."""
    by_formula: dict[tuple[str, bool], list[WorkspaceUse]] = {}
    for use in workspaces:
        by_formula.setdefault((use.formula, use.modelled), []).append(use)
    for (formula, modelled), uses in by_formula.items():
        yield f"{'Modelled: ' if modelled else ''}{formula or 'No formula is given.'}"
        for use in uses:
            calls = pluralize(use.calls, "call")
            op = use.op.removeprefix("aten.").removesuffix(".default")
            yield f"  {op}: {format_bytes(use.bytes)}, {calls}{', kept' if use.kept else ''}{_dtypes(use.dtypes, every)}"


def _dtypes(dtypes: tuple[str, ...], every: tuple[str, ...]) -> str:
    return "" if set(dtypes) == set(every) else f"; {', '.join(dtypes)}"
