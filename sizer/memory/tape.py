"""Tapes: every allocation and release of one traced piece of work, and their affine form over the batch size."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sizer.memory.size_queries import AffineSizeQuery, SizeOracle, SizeQuery, by_block, fit_size_queries, gather

CATEGORIES = ("parameter", "buffer", "gradient", "optimizer state", "activation", "temporary", "input", "workspace")
PHASES = ("load", "forward", "backward", "optimizer", "step2")
LIMIT_BYTES = 2**62


class NotAffineError(ValueError):
    """Two tapes of the same work do not differ by `a + b*batch` alone: trace each batch by itself instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """The allocations and releases (bytes as requested, not rounded) of one traced piece of work at one batch size.

    order: array('q') in time order; i >= 0 allocates block i, a negative value ~i (that is -i-1) releases block i.
        Every block is allocated exactly once and released at most once, later.
    sizes: array('q'), bytes requested by block i.
    categories: index into CATEGORIES per block.
    ops, modules: array('l'), index into op_names ("aten.convolution.default", "Module.to") and module_names
        (dotted path, "" for the root) per block.
    marks: (position in `order` where the phase ends, phase name), ascending; the phases are slices of `order`.
    stand_ins: what was assumed where a value was unknown; every report lists them as uncounted.
    questions: by what the size of some blocks is asked of a library; what stands in `sizes` until then is a model.
    answered: the blocks whose size is such an answer.
    second_forward: where in `order` the forward pass of the second step has ended; None where the work has no such place.
    A kernel's inner workspace is an ordinary block of category "workspace" around its op.
    """

    batch: int
    order: array[int]
    sizes: array[int]
    categories: bytes
    ops: array[int]
    modules: array[int]
    op_names: tuple[str, ...]
    module_names: tuple[str, ...]
    marks: tuple[tuple[int, str], ...]
    stand_ins: tuple[str, ...] = ()
    size_queries: tuple[SizeQuery, ...] = ()
    resolved: frozenset[int] = frozenset()
    second_forward: int | None = None

    def resolve(self, answer: SizeOracle | None) -> Tape:
        """The tape with the sizes (bytes) that its questions are answered with; itself where nobody answers."""
        if answer is None or not self.size_queries:
            return self
        return self.sized([answer(q.kind, q.words, q.numbers) for q in self.size_queries])

    def sized(self, answers: Sequence[int | None]) -> Tape:
        """The tape with an answer (bytes) to each of its questions; where that is None the model stands."""
        sizes, answered = self.sizes[:], set()
        for question, size in zip(self.size_queries, answers, strict=True):
            if size is not None:
                answered.update(question.blocks)
                for block in question.blocks:
                    sizes[block] = size
        return replace(self, sizes=sizes, resolved=frozenset(answered))

    def in_words(self, others: dict[str, str]) -> Tape:
        """The tape whose questions have some words in the place of others."""
        return replace(self, size_queries=tuple(question.in_words(others) for question in self.size_queries))

    def describe(self, block: int) -> str:
        """The op and module that allocated a block, as text for messages."""
        return _where(self, block)

    def validate(self) -> Tape:
        """This tape itself, after checking every promise of the class docstring.

        Raises ValueError with the first promise that is broken; the tracer's tests call it.
        """
        count = len(self.sizes)
        columns = {"categories": len(self.categories), "ops": len(self.ops), "modules": len(self.modules)}
        for name, length in columns.items():
            if length != count:
                raise ValueError(f"tape column {name} has {length} rows and sizes has {count}: give one per block")
        _check_range("sizes", self.sizes, None)
        _check_range("categories", self.categories, len(CATEGORIES))
        _check_range("ops", self.ops, len(self.op_names))
        _check_range("modules", self.modules, len(self.module_names))
        _check_order(self)
        _check_marks(self)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineTape:
    """A tape whose sizes are `constant[i] + per_item[i] * batch` bytes; the other columns are those of Tape.

    `exact` holds the tapes of batch sizes that are an exception (a batch of 1 often is) and were traced by themselves.
    `questions` are those whose answers by `answer` are no line; the line is then a model, which stands where none answers.
    `settled` holds lines (constant, per item) through two answers to each, by which a search goes before it asks.
    """

    fitted_at: tuple[int, int]
    order: array[int]
    constant: array[int]
    per_item: array[int]
    categories: bytes
    ops: array[int]
    modules: array[int]
    op_names: tuple[str, ...]
    module_names: tuple[str, ...]
    marks: tuple[tuple[int, str], ...]
    stand_ins: tuple[str, ...] = ()
    exact: tuple[Tape, ...] = ()
    size_queries: tuple[AffineSizeQuery, ...] = ()
    answer: SizeOracle | None = field(default=None, compare=False, repr=False)
    settled: tuple[tuple[int, int] | None, ...] = ()
    second_forward: int | None = None

    @property
    def resolved(self) -> frozenset[int]:
        """The blocks whose size is asked for, and somebody is there to answer."""
        return frozenset(block for q in self.size_queries for block in q.blocks) if self.answer else frozenset()

    def in_words(self, others: dict[str, str]) -> AffineTape:
        """The tape whose questions have some words in the place of others: float16 where it takes bfloat16's kernels.

        Itself where it asks nothing.
        """
        if not self.size_queries and not any(tape.size_queries for tape in self.exact):
            return self
        return replace(
            self,
            exact=tuple(tape.in_words(others) for tape in self.exact),
            size_queries=tuple(question.in_words(others) for question in self.size_queries),
        )

    def at(self, batch: int) -> Tape:
        """The tape (bytes per block) of the same work at another batch size.

        Raises NotAffineError where a size would be negative, ValueError where the batch is not positive or so large
        that the bytes of all blocks together reach 2**62.
        """
        if batch < 1:
            raise ValueError(f"batch was {batch}; it must be at least 1: give a positive integer")
        for tape in self.exact:
            if tape.batch == batch:
                return tape.resolve(self.answer)
        sizes = [a + b * batch for a, b in zip(self.constant, self.per_item, strict=True)]
        if sum(sizes) >= LIMIT_BYTES:
            raise ValueError(f"batch was {batch}; its blocks would take {sum(sizes):.1e} bytes: give a smaller batch")
        if sizes and min(sizes) < 0:
            block = sizes.index(min(sizes))
            raise NotAffineError(
                f"{_where(self, block)} would need {sizes[block]} bytes at batch {batch} "
                f"({self.constant[block]} + {self.per_item[block]}*batch); sizes are 0 bytes or more: "
                f"trace batch {batch} by itself"
            )
        tape = Tape(
            batch=batch,
            order=self.order,
            sizes=array("q", sizes),
            categories=self.categories,
            ops=self.ops,
            modules=self.modules,
            op_names=self.op_names,
            module_names=self.module_names,
            marks=self.marks,
            stand_ins=self.stand_ins,
            size_queries=tuple([question.at(batch) for question in self.size_queries]),
            second_forward=self.second_forward,
        )
        if self.settled:
            return tape.sized([line and line[0] + line[1] * batch for line in self.settled])
        return tape.resolve(self.answer)

    def settle(self, low: int, high: int) -> AffineTape:
        """The tape with lines through the answers at two batch sizes instead of answers; they never fall below 0 bytes."""
        return replace(
            self, exact=(), settled=tuple(self._line(q, low, high) for q in self.size_queries if self.answer)
        )

    def _line(self, question: AffineSizeQuery, low: int, high: int) -> tuple[int, int] | None:
        first, second = (self.answer(q.kind, q.words, q.numbers) for q in (question.at(low), question.at(high)))
        if first is None or second is None:
            return None
        slope = max(0, (second - first) // (high - low))
        return max(0, second - slope * high), slope

    def check(self, third: Tape) -> None:
        """None where a third trace (or its beginning) is predicted to the byte, its questions to the number.

        Raises NotAffineError naming the first op that differs.
        """
        expected = _beginning(replace(self, answer=None).at(third.batch), third)
        _check_same_work(expected, third)
        _check_same_size_queries(expected, third)
        if expected.sizes == third.sizes:
            return
        block = next(i for i, size in enumerate(expected.sizes) if size != third.sizes[i])
        raise NotAffineError(
            f"{_where(third, block)} took {third.sizes[block]} bytes at batch {third.batch}; from batches "
            f"{self.fitted_at[0]} and {self.fitted_at[1]} it should take {expected.sizes[block]}: "
            "trace each batch by itself"
        )


def fit_affine(first: Tape, second: Tape, *, answer: SizeOracle | None = None) -> AffineTape:
    """The affine tape through two traces of the same work at two batch sizes; `answer` sizes the blocks that it asks for.

    The second may be the beginning of the work, up to the end of a phase before the second step: what follows in the first
    tape is then the same step once more, whose blocks grow as their counterparts of the first step do, and the
    optimizer's, which do not grow.
    Raises NotAffineError where order, categories, ops, modules or phases differ, or a size or a question's number does not
    grow by whole bytes or units per item; the message names the first op that differs. Raises ValueError where both tapes
    have the same batch.
    Two traces always define a line: check a third with AffineTape.check.
    """
    if first.batch == second.batch:
        raise ValueError(f"both tapes are of batch {first.batch}; two different batches are needed: trace another one")
    begun = _beginning(first, second)
    _check_same_work(begun, second)
    step = second.batch - first.batch
    slopes = [(after - before) // step for before, after in zip(begun.sizes, second.sizes, strict=True)]
    for block, (size, slope) in enumerate(zip(begun.sizes, slopes, strict=True)):
        if size + slope * step != second.sizes[block]:
            raise NotAffineError(
                f"{_where(first, block)} took {size} bytes at batch {first.batch} and "
                f"{second.sizes[block]} at batch {second.batch}, which is not a whole "
                "number of bytes per item: trace each batch by itself"
            )
    asked, asked_later = by_block(first.size_queries), by_block(second.size_queries)
    if begun is not first:
        counterparts = _counterparts(first, len(slopes))
        for later, block in enumerate(counterparts, len(slopes)):
            if block is not None and asked.get(later) != asked.get(block):
                raise NotAffineError(
                    f"{_where(first, later)} asks another question in the second step: trace both twice"
                )
            if block in asked_later:
                asked_later[later] = asked_later[block]
        slopes += [0 if block is None else slopes[block] for block in counterparts]
    try:
        questions = fit_size_queries(asked, asked_later, (first.batch, second.batch))
    except ValueError as error:
        raise NotAffineError(f"{error}: trace each batch by itself") from error
    return AffineTape(
        fitted_at=(first.batch, second.batch),
        order=first.order,
        constant=array("q", [size - slope * first.batch for size, slope in zip(first.sizes, slopes, strict=True)]),
        per_item=array("q", slopes),
        categories=first.categories,
        ops=first.ops,
        modules=first.modules,
        op_names=first.op_names,
        module_names=first.module_names,
        marks=first.marks,
        stand_ins=tuple(dict.fromkeys(first.stand_ins + second.stand_ins)),
        size_queries=questions,
        answer=answer,
        second_forward=first.second_forward,
    )


def _beginning(tape: Tape, other: Tape) -> Tape:
    """The tape cut to the phases of the other one; the tape itself where the other has them all."""
    if len(other.marks) >= len(tape.marks) or not other.marks:
        return tape
    end = tape.marks[len(other.marks) - 1][0]
    order = tape.order[:end]
    blocks = max(order, default=-1) + 1
    return replace(
        tape,
        order=order,
        sizes=tape.sizes[:blocks],
        categories=tape.categories[:blocks],
        ops=tape.ops[:blocks],
        modules=tape.modules[:blocks],
        marks=tape.marks[: len(other.marks)],
        size_queries=gather(
            {block: question for block, question in by_block(tape.size_queries).items() if block < blocks}
        ),
    )


def _counterparts(tape: Tape, known: int) -> list[int | None]:
    """For each block after the first `known` ones, the block of the first step that it repeats; None where it repeats none.

    Blocks of the first step that are released come again in the second, in the same order and size; those that stay
    (inputs, library workspaces, optimizer state) do not. Raises NotAffineError where the second step differs.
    """
    ends = {phase: position for position, phase in tape.marks}
    begin = ends.get("optimizer", ends.get("forward", 0))
    loaded = max(tape.order[: ends.get("load", 0)], default=-1) + 1
    second = max(tape.order[:begin], default=-1) + 1
    released = {~event for event in tape.order if event < 0}
    again = [block for block in range(loaded, known) if block in released]
    repeated: list[int | None] = [None] * (len(tape.sizes) - known)
    for block, counterpart in zip(again, range(second, second + len(again)), strict=True):
        if counterpart >= len(tape.sizes) or _shape(tape, block) != _shape(tape, counterpart):
            raise NotAffineError(
                f"{_where(tape, block)} does not come again in the second step: trace both steps twice"
            )
        repeated[counterpart - known] = block
    return repeated


def _shape(tape: Tape, block: int) -> tuple[int, int, int]:
    return tape.ops[block], tape.modules[block], tape.sizes[block]


def _check_same_work(one: Tape, other: Tape) -> None:
    """Raise NotAffineError naming the first event at which two tapes are not the same work."""
    ops, modules = one.op_names[: len(other.op_names)], one.module_names[: len(other.module_names)]
    if ops == other.op_names and modules == other.module_names:
        same_columns = one.ops == other.ops and one.modules == other.modules and one.categories == other.categories
        if same_columns and one.order == other.order and one.marks == other.marks:
            return
    for position, (event, counterpart) in enumerate(zip(one.order, other.order, strict=False)):
        if event != counterpart or (event >= 0 and _row(one, event) != _row(other, event)):
            raise _different_work(one, other, position, _event_text(one, event), _event_text(other, counterpart))
    shorter = min(len(one.order), len(other.order))
    if len(one.order) != len(other.order):
        texts = [_event_text(t, t.order[shorter]) if len(t.order) > shorter else "the end" for t in (one, other)]
        raise _different_work(one, other, shorter, texts[0], texts[1])
    if one.marks != other.marks:
        raise _different_work(one, other, shorter, f"phases {one.marks}", f"phases {other.marks}")


def _check_same_size_queries(one: Tape, other: Tape) -> None:
    """Raise NotAffineError naming the first block for which two tapes do not ask the same."""
    expected, found = by_block(one.size_queries), by_block(other.size_queries)
    if expected != found:
        block = min(block for block in expected.keys() | found.keys() if expected.get(block) != found.get(block))
        raise NotAffineError(
            f"{_where(other, block)} asks {found.get(block)} at batch {other.batch}; it should ask {expected.get(block)}: "
            "trace each batch by itself"
        )


def _different_work(one: Tape, other: Tape, position: int, text: str, other_text: str) -> NotAffineError:
    return NotAffineError(
        f"event {position} is {text} at batch {one.batch} and {other_text} at batch {other.batch}; the order must "
        "be the same at every batch: trace each batch by itself"
    )


def _event_text(tape: Tape, event: int) -> str:
    return f"an allocation by {_where(tape, event)}" if event >= 0 else f"the release of {_where(tape, ~event)}"


def _row(tape: Tape, block: int) -> tuple[str, str, int]:
    return tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]], tape.categories[block]


def _where(tape: Tape | AffineTape, block: int) -> str:
    module = tape.module_names[tape.modules[block]]
    return f"{tape.op_names[tape.ops[block]]} in {module or 'the root module'} (block {block})"


def _check_range(name: str, column: Sequence[int], stop: int | None) -> None:
    if len(column) and (min(column) < 0 or (stop is not None and max(column) >= stop)):
        allowed = "0 or more" if stop is None else f"0 to {stop - 1}"
        raise ValueError(f"tape column {name} holds {min(column)} to {max(column)}; allowed are {allowed}")


def _check_order(tape: Tape) -> None:
    state = bytearray(len(tape.sizes))
    for position, event in enumerate(tape.order):
        block, before = (event, 0) if event >= 0 else (~event, 1)
        if block >= len(state):
            raise ValueError(f"event {position} names block {block}; the tape has {len(state)}: give each block a size")
        if state[block] != before:
            verb = "allocated twice" if before == 0 else "released while not alive"
            raise ValueError(f"event {position}: block {block} is {verb}; one allocation, then at most one release")
        state[block] = before + 1
    if not all(state):
        raise ValueError(f"block {state.index(0)} is never allocated; every block has one allocation in `order`")


def _check_marks(tape: Tape) -> None:
    positions = [position for position, _ in tape.marks]
    unknown = [name for _, name in tape.marks if name not in PHASES]
    if unknown:
        raise ValueError(f"phase {unknown[0]!r} is unknown; allowed are {', '.join(PHASES)}")
    if len({name for _, name in tape.marks}) != len(tape.marks):
        raise ValueError(f"marks name a phase twice: {[name for _, name in tape.marks]}; each phase ends once")
    if positions != sorted(positions) or (positions and not 0 <= positions[0] <= positions[-1] <= len(tape.order)):
        raise ValueError(f"marks end at {positions}; they must ascend within 0 to {len(tape.order)}")
