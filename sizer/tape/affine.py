"""The affine form of tapes over the batch size: the same work at any batch, from traces at two."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from sizer.tape.communication import bytes_per_item
from sizer.tape.loop_choices import with_outputs
from sizer.tape.size_queries import AffineSizeQuery, Answer, by_block, fit_size_queries, gather
from sizer.tape.tape import Tape, stream_of

LIMIT_BYTES = 2**62


class NotAffineError(ValueError):
    """Two tapes of the same work do not differ by `a + b*batch` alone: trace each batch separately instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineTape:
    """A tape with sizes of `constant[i] + per_item[i] * batch` bytes; all other fields are those of `tape`, the first trace.

    `size_queries` have answers that are on no line; the line of their blocks is a model. `collectives_per_item` are the bytes by
    which each of the tape's collectives grows.
    """

    fitted_at: tuple[int, int]
    tape: Tape
    constant: array[int]
    per_item: array[int]
    size_queries: tuple[AffineSizeQuery, ...] = ()
    collectives_per_item: tuple[int, ...] = ()

    def with_dtype(self, dtype: str, *, instead_of: str) -> AffineTape:
        """Return the tape with size queries of another dtype."""
        queries = tuple(query.with_dtype(dtype, instead_of=instead_of) for query in self.size_queries)
        return replace(self, tape=self.tape.with_dtype(dtype, instead_of=instead_of), size_queries=queries)

    def with_outputs(self, outputs: str | None) -> AffineTape:
        """Return the tape of a loop that frees or keeps the outputs (sizer.tape.loop_choices)."""
        return replace(self, tape=with_outputs(self.tape, outputs)[0])

    def with_sizes(self, size: Answer, *, answered: Collection[str]) -> AffineTape:
        """Return the tape with given sizes, as `TapeFamily.with_sizes`."""
        constant, per_item = self.constant[:], self.per_item[:]
        for query in self.size_queries:
            at_none, at_one = (size(query.kind, query.words, query.evaluate(batch).numbers) for batch in (0, 1))
            if at_none is not None and at_one is not None:
                for block in query.blocks:
                    constant[block], per_item[block] = at_none, at_one - at_none
        left = tuple(query for query in self.size_queries if query.kind not in answered)
        tape = self.tape.with_sizes(size, answered=answered)
        return replace(self, tape=tape, constant=constant, per_item=per_item, size_queries=left)

    def evaluate(self, batch: int) -> Tape:
        """Return the tape (bytes per block) of the same work at another batch size, with unresolved size queries.

        Raises NotAffineError if a size would be negative, ValueError if the batch is not positive or so large that the bytes of
        all blocks together reach 2**62.
        """
        if batch < 1:
            raise ValueError(f"batch was {batch}; it must be at least 1: give a positive integer")
        constant, per_item = np.asarray(self.constant), np.asarray(self.per_item)
        if (total := int(constant.sum()) + int(per_item.sum()) * batch) >= LIMIT_BYTES:
            raise ValueError(f"batch was {batch}; its blocks would take {total:.1e} bytes: give a smaller batch")
        largest = int(np.abs(constant).sum()) + int(np.abs(per_item).sum()) * batch
        sizes = constant + per_item.astype(np.int64 if largest < 2**63 else object) * batch
        if len(sizes) and sizes.min() < 0:
            block = int(sizes.argmin())
            raise NotAffineError(
                f"{self.tape.describe(block)} would need {sizes[block]} bytes at batch {batch} "
                f"({self.constant[block]} + {self.per_item[block]}*batch); sizes are 0 bytes or more: "
                f"trace batch {batch} separately"
            )
        queries = tuple([query.evaluate(batch) for query in self.size_queries])
        more = batch - self.tape.batch
        collectives = (
            replace(row, bytes=row.bytes + more * slope)
            for row, slope in zip(self.tape.collectives, self.collectives_per_item, strict=True)
        )
        return replace(
            self.tape,
            batch=batch,
            sizes=array("q", sizes.astype(np.int64).tobytes()),
            size_queries=queries,
            collectives=tuple(collectives),
        )

    def check(self, third: Tape) -> None:
        """Raise NotAffineError, naming the first op that differs, unless a third trace is predicted to the byte.

        Its size queries must be predicted to the number. The trace may be the beginning of the work.
        """
        check_tape(self.evaluate(third.batch), third, self.fitted_at)


def fit_affine(first: Tape, second: Tape) -> AffineTape:
    """Return the affine tape through two traces of the same work at two batch sizes.

    The second trace may be the beginning of the work, up to the end of a phase before the second step. The rest of the first
    tape is then a repetition of the step. Its blocks and size queries grow as their counterparts of the first step do; the
    optimizer's do not grow.

    Raises NotAffineError if order, categories, ops, modules or phases differ, or if a size or a size query's number does not
    grow by whole bytes or units per item; the message names the first op that differs. Raises ValueError if both tapes have the
    same batch.

    Two traces always define a line: check a third with AffineTape.check.
    """
    if first.batch == second.batch:
        raise ValueError(f"both tapes are of batch {first.batch}; two different batches are needed: trace another one")
    begun = beginning(first, second)
    check_same_work(begun, second)
    step = second.batch - first.batch
    slopes = [(after - before) // step for before, after in zip(begun.sizes, second.sizes, strict=True)]
    for block, (size, slope) in enumerate(zip(begun.sizes, slopes, strict=True)):
        if size + slope * step != second.sizes[block]:
            raise NotAffineError(
                f"{first.describe(block)} took {size} bytes at batch {first.batch} and "
                f"{second.sizes[block]} at batch {second.batch}, which is not a whole "
                "number of bytes per item: trace each batch separately"
            )
    queried, queried_later = by_block(first.size_queries), by_block(second.size_queries)
    if begun is not first:
        counterparts = _counterparts(first, len(slopes))
        for later, earlier in enumerate(counterparts, len(slopes)):
            if earlier is not None and queried.get(later) != queried.get(earlier):
                raise NotAffineError(
                    f"{first.describe(later)} has another size query in the second step: trace both twice"
                )
            if earlier in queried_later:
                queried_later[later] = queried_later[earlier]
            elif earlier is None and later in queried:
                queried_later[later] = queried[later]
        slopes += [0 if earlier is None else slopes[earlier] for earlier in counterparts]
    try:
        size_queries = fit_size_queries(queried, queried_later, (first.batch, second.batch))
        per_item = bytes_per_item(first.collectives, second.collectives, [phase for _, phase in second.marks], step)
    except ValueError as error:
        raise NotAffineError(f"{error}: trace each batch separately") from error
    return AffineTape(
        fitted_at=(first.batch, second.batch),
        tape=replace(first, stand_ins=tuple(dict.fromkeys(first.stand_ins + second.stand_ins))),
        constant=array("q", [size - slope * first.batch for size, slope in zip(first.sizes, slopes, strict=True)]),
        per_item=array("q", slopes),
        size_queries=size_queries,
        collectives_per_item=per_item,
    )


def check_tape(whole: Tape, third: Tape, fitted_at: tuple[int, int]) -> None:
    """Raise NotAffineError if a third trace, or its beginning, differs from the prediction of the traces at two batch sizes."""
    expected = beginning(whole, third)
    check_same_work(expected, third)
    _check_same_size_queries(expected, third)
    _check_same_collectives(expected, third)
    if expected.sizes == third.sizes:
        return
    block = next(i for i, size in enumerate(expected.sizes) if size != third.sizes[i])
    raise NotAffineError(
        f"{third.describe(block)} took {third.sizes[block]} bytes at batch {third.batch}; from batches "
        f"{fitted_at[0]} and {fitted_at[1]} it should take {expected.sizes[block]}: trace each batch separately"
    )


def beginning(tape: Tape, other: Tape) -> Tape:
    """Return the tape cut to the phases of another one; unchanged if the other has them all."""
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
        streams=tape.streams[:blocks],
        awaited=frozenset(block for block in tape.awaited if block < blocks),
        settled=tuple((position, block) for position, block in tape.settled if position <= end),
        outputs=_known(tape.outputs, blocks),
        graphs=_known(tape.graphs, blocks),
        half_outputs=frozenset(block for block in tape.half_outputs if block < blocks),
        marks=tape.marks[: len(other.marks)],
        size_queries=gather(
            {block: question for block, question in by_block(tape.size_queries).items() if block < blocks}
        ),
        collectives=tuple(row for row in tape.collectives if row.phase in {phase for _, phase in other.marks}),
    )


def _known(passes: tuple[tuple[int, ...], ...], blocks: int) -> tuple[tuple[int, ...], ...]:
    """Return the first `blocks` blocks by pass."""
    return tuple(tuple(block for block in one if block < blocks) for one in passes)


def _counterparts(tape: Tape, known: int) -> list[int | None]:
    """Return for each block after the first `known` ones the block of the first step that it repeats; None without one.

    Released blocks of the first step come again in the second, in the same order and size. Blocks that stay (inputs, library
    workspaces, optimizer state) do not. Raises NotAffineError if the second step differs.
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
                f"{tape.describe(block)} does not come again in the second step: trace both steps twice"
            )
        repeated[counterpart - known] = block
    return repeated


def _shape(tape: Tape, block: int) -> tuple[int, int, int, int]:
    return tape.ops[block], tape.modules[block], tape.sizes[block], stream_of(tape, block)


def check_same_work(one: Tape, other: Tape) -> None:
    """Raise NotAffineError naming the first event at which two tapes are not the same work."""
    ops, modules = one.op_names[: len(other.op_names)], one.module_names[: len(other.module_names)]
    if ops == other.op_names and modules == other.module_names:
        same_columns = one.ops == other.ops and one.modules == other.modules and one.categories == other.categories
        same_streams = (one.streams, one.awaited, one.settled) == (other.streams, other.awaited, other.settled)
        if (
            same_columns
            and same_streams
            and one.order == other.order
            and one.marks == other.marks
            and one.loops == other.loops
        ):
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
    if one.loops != other.loops:
        raise _different_work(one, other, shorter, f"loops {one.loops}", f"loops {other.loops}")
    if one.settled != other.settled:
        raise _different_work(one, other, shorter, f"waits {one.settled}", f"waits {other.settled}")


def _check_same_size_queries(one: Tape, other: Tape) -> None:
    """Raise NotAffineError for the first block with different size queries."""
    expected, found = by_block(one.size_queries), by_block(other.size_queries)
    if expected != found:
        block = min(block for block in expected.keys() | found.keys() if expected.get(block) != found.get(block))
        raise NotAffineError(
            f"{other.describe(block)} has the size query {found.get(block)} at batch {other.batch}; "
            f"it should be {expected.get(block)}: trace each batch separately"
        )


def _check_same_collectives(one: Tape, other: Tape) -> None:
    """Raise NotAffineError if the collectives of two tapes differ."""
    if one.collectives != other.collectives:
        expected, found = set(one.collectives), set(other.collectives)
        raise NotAffineError(
            f"collectives are {found - expected} at batch {other.batch}; they should be {expected - found}: "
            "trace each batch separately"
        )


def _different_work(one: Tape, other: Tape, position: int, text: str, other_text: str) -> NotAffineError:
    return NotAffineError(
        f"event {position} is {text} at batch {one.batch} and {other_text} at batch {other.batch}; the order must "
        "be the same at every batch: trace each batch separately"
    )


def _event_text(tape: Tape, event: int) -> str:
    return f"an allocation by {tape.describe(event)}" if event >= 0 else f"the release of {tape.describe(~event)}"


def _row(tape: Tape, block: int) -> tuple[str, str, int, int, bool]:
    names = tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]]
    return *names, tape.categories[block], stream_of(tape, block), block in tape.awaited
