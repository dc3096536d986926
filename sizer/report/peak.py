"""Memory alive at the peak: the largest tensors, the bytes by module, and the reason for the peak.

Plain data, in bytes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sizer.allocator.addresses import Addresses, find_addresses
from sizer.base.units import format_bytes, pluralize
from sizer.catalogue.gpus import Gpu
from sizer.tape.tape import CATEGORIES, FROZEN, BlockNotes, PhaseOfStep, Tape, Tensor, blocks_alive

LARGEST = 40  # rows of tensors; the rest is counted together
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Equal tensors alive at the peak: `count` of them, with `bytes` in total.

    `module` has layer numbers replaced by "*"; for parameters, gradients and optimizer state it is the parameter's name.
    `phase` is the phase of their allocation. A kernel's workspace has no shape and no dtype.
    """

    count: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    op: str
    module: str
    phase: str

    def describe(self) -> str:
        """Return the group in one line: "64 × [1, 8192, 4096] bfloat16, activation, aten.mm in model.layers.*.mlp"."""
        what = f"{self.tensor}, {self.category}" if self.dtype else self.category
        return f"{self.count:,} × {what}, {self.op} in {self.module or 'the model itself'}"

    @property
    def tensor(self) -> str:
        """Shape and dtype as PyTorch writes them."""
        return tensor_text(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Bytes that a module's own work holds at the peak, by category, without its children's.

    The root's path is the empty text.
    """

    path: str
    by_category: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReport:
    """Memory alive at the allocation peak of one dtype and batch size.

    The bytes of `tensors` (the largest groups first) and `rest_bytes` (of `rest_count` other blocks) sum to `allocated_bytes`,
    as do the bytes of `modules` and of `at_peak`. `phase`, `step` (of two), `op` and `module` are those of the allocation that
    made the peak; `sentence` explains it. `script` is a PyTorch program for the work; if there is none it is empty, and
    `no_script` says why. `remedy` names a way to lower the peak: for a pipeline its part, for a language model in training its
    logits.
    """

    query: str
    dtype: str
    batch: int
    allocated_bytes: int
    reserved_bytes: int
    phase: str
    step: int
    op: str
    module: str
    sentence: str
    at_peak: dict[str, int]
    tensors: tuple[TensorGroup, ...]
    rest_count: int
    rest_bytes: int
    modules: tuple[ModuleBytes, ...]
    script: str = ""
    no_script: str = ""
    remedy: str = ""


def find_peak(
    tape: Tape, notes: BlockNotes, gpu: Gpu, *, query: str, dtype: str, expandable_segments: bool
) -> PeakReport:
    """Return the blocks alive at the peak of a tape's work on a device; on a device large enough if the work does not fit."""
    placed = find_addresses(tape, gpu, expandable_segments=expandable_segments)
    position, allocated = placed.peak(tape)
    alive = [block for block in blocks_alive(tape.order[:position]) if placed.block_bytes[block]]
    groups = _groups(tape, notes, placed, alive)
    at, made = notes.phase_at(position - 1), tape.order[position - 1]
    by_category: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
    for block in alive:
        by_category[CATEGORIES[tape.categories[block]]] += placed.block_bytes[block]
    op, module = tape.op_names[tape.ops[made]], tape.module_names[tape.modules[made]]
    return PeakReport(
        query=query,
        dtype=dtype,
        batch=tape.batch,
        allocated_bytes=allocated,
        reserved_bytes=placed.reserved[position - 1],
        phase=at.phase,
        step=at.step,
        op=op,
        module=module,
        sentence=_sentence(at, op, module, groups, allocated),
        at_peak=dict(by_category),
        tensors=tuple(groups[:LARGEST]),
        rest_count=sum(group.count for group in groups[LARGEST:]),
        rest_bytes=sum(group.bytes for group in groups[LARGEST:]),
        modules=_modules(tape, notes, placed, alive),
    )


def tensor_text(shape: tuple[int, ...], dtype: str) -> str:
    """Return shape and dtype of a tensor as PyTorch writes them; "workspace" if there is no tensor."""
    return f"[{', '.join(map(str, shape))}] {dtype}" if dtype else "workspace"


def with_children(modules: Iterable[ModuleBytes]) -> dict[str, dict[str, int]]:
    """Return the bytes by category of every module with its children, by path. The root, "", has all bytes."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for row in modules:
        parts = row.path.split(".") if row.path else []
        for count in range(len(parts) + 1):
            totals[".".join(parts[:count])].update(row.by_category)
    return {path: dict(total) for path, total in totals.items()}


def _owner(tape: Tape, notes: BlockNotes, block: int) -> str:
    """Return the parameter, buffer or module of a block."""
    return notes.parameters.get(block) or tape.module_names[tape.modules[block]]


def _module_of(tape: Tape, notes: BlockNotes, block: int) -> str:
    """Return the module of a block. Gradients and optimizer state count for their parameter's module."""
    owner = _owner(tape, notes, block)
    named = block in notes.parameters or CATEGORIES[tape.categories[block]] in ("parameter", FROZEN, "buffer")
    return owner.rpartition(".")[0] if named else owner


def _groups(tape: Tape, notes: BlockNotes, placed: Addresses, alive: list[int]) -> list[TensorGroup]:
    """Return the blocks alive, grouped by equality, the largest groups first."""
    sizes: dict[tuple, list[int]] = defaultdict(list)
    born = _births(tape, notes)
    none = Tensor(shape=(), dtype="")
    for block in alive:
        tensor = notes.tensors.get(block, none)
        category, op = CATEGORIES[tape.categories[block]], tape.op_names[tape.ops[block]]
        where = _NUMBER.sub("*", _owner(tape, notes, block))
        sizes[tensor.shape, tensor.dtype, category, op, where, born[block]].append(placed.block_bytes[block])
    groups = [
        TensorGroup(
            count=len(taken),
            bytes=sum(taken),
            shape=shape,
            dtype=dtype,
            category=category,
            op=op,
            module=module,
            phase=phase,
        )
        for (shape, dtype, category, op, module, phase), taken in sizes.items()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


def _births(tape: Tape, notes: BlockNotes) -> list[str]:
    """Return the phase of each block's allocation."""
    phases, begin = [""] * len(tape.sizes), 0
    for end, at in notes.ends:
        for event in tape.order[begin:end]:
            if event >= 0:
                phases[event] = at.phase
        begin = end
    return phases


def _modules(tape: Tape, notes: BlockNotes, placed: Addresses, alive: list[int]) -> tuple[ModuleBytes, ...]:
    own: dict[str, Counter[str]] = defaultdict(Counter)
    for block in alive:
        own[_module_of(tape, notes, block)][CATEGORIES[tape.categories[block]]] += placed.block_bytes[block]
    return tuple(ModuleBytes(path=path, by_category=dict(own[path])) for path in sorted(own))


# ---------------------------------------------------------------------------------------------------- the peak in one sentence

STAY = ("parameter", FROZEN, "buffer", "optimizer state")  # from step to step; all else comes and goes

_DURING = {
    "load": "while the model is moved to the device",
    "rollout": "while completions are generated",
    "reference": "while log-probabilities are computed without gradients",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "step2": "after the second step",
    "evaluate": "in the evaluation",
    "prefill": "while the prompt is read",
    "decode": "while tokens are generated",
}


def _sentence(at: PhaseOfStep, op: str, module: str, groups: list[TensorGroup], allocated: int) -> str:
    """Describe where the peak is, the tensors that take most of the memory that comes and goes, and how much stays."""
    stay = [group for group in groups if group.category in STAY]
    alike: dict[tuple, list[TensorGroup]] = defaultdict(list)
    for group in [group for group in groups if group.category not in STAY] or groups:
        alike[group.shape, group.dtype].append(group)
    (shape, dtype), largest = max(alike.items(), key=lambda item: sum(group.bytes for group in item[1]))
    number, size = sum(group.count for group in largest), sum(group.bytes for group in largest)
    step = f" of step {at.step}" if at.step else ""
    where = f"{_DURING.get(at.phase, f'while {at.phase} works')}{step}, by {op} in {module or 'the model itself'}"
    what = f"{pluralize(number, 'tensor')} of {tensor_text(shape, dtype)}" if dtype else pluralize(number, "workspace")
    share = f"{format_bytes(size)} of {format_bytes(allocated)} ({size / allocated:.0%})"
    all_the_time = format_bytes(sum(group.bytes for group in stay))
    rest = f"; {all_the_time} are there all the time ({_categories(stay)})" if stay else ""
    return f"{where[0].upper()}{where[1:]}: {what} ({_categories(largest)}), {share}{rest}."


def _categories(groups: list[TensorGroup]) -> str:
    """Return the categories of some groups, that with the most bytes first."""
    held: Counter[str] = Counter()
    for group in groups:
        held[group.category] += group.bytes
    return ", ".join(category for category, _ in held.most_common())
