"""One dtype of a report: every requested batch size and the largest that fits, from the tapes of the work."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sizer.catalogue.gpus import Gpu
from sizer.report.estimate import Estimate, estimate_tape
from sizer.report.interval import left_out
from sizer.report.largest_batch import MaxBatch, find_largest_batch
from sizer.report.replays import Replays, find_unbounded
from sizer.tape.affine import NotAffineError
from sizer.tape.family import TapeFamily
from sizer.tape.size_queries import SizeOracle
from sizer.tape.tape import Tape, resolve_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Results from the tapes of one dtype.

    `max_batch` is None until it has been searched. `first` is the tape at the smallest replayed batch size, None without one.
    """

    estimates: tuple[Estimate, ...] = ()
    max_batch: MaxBatch | None = None
    notes: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    first: Tape | None = None

    def with_cells(self, other: Column, batches: Sequence[int]) -> Column:
        """Return the column with the cells of another one added, in the order of `batches`."""
        firsts = [tape for tape in (self.first, other.first) if tape is not None]
        return replace(
            self,
            estimates=tuple(sorted((*self.estimates, *other.estimates), key=lambda row: batches.index(row.batch))),
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
            stand_ins=tuple(dict.fromkeys((*self.stand_ins, *other.stand_ins))),
            first=min(firsts, key=lambda tape: tape.batch, default=None),
        )

    def with_dtype(self, dtype: str) -> Column:
        """Return the column renamed to another dtype."""
        return replace(
            self,
            estimates=tuple(replace(row, dtype=dtype) for row in self.estimates),
            max_batch=self.max_batch and replace(self.max_batch, dtype=dtype),
        )


def read_cells(
    family: TapeFamily,
    batches: Iterable[int],
    *,
    dtype: str,
    gpu: Gpu,
    mode: str,
    oracle: SizeOracle | None = None,
    expandable_segments: bool = False,
    first: Collection[int] = (),
    replays: Replays | None = None,
    passes: int = 1,
    stops: bool = False,
) -> Iterator[Column]:
    """Yield the column of one dtype as it grows: the batch sizes in `first`, up to one that fits, then all of them.

    A batch size without a tape gets a note instead of an estimate. Results in `replays`, which other columns may share, are not
    replayed again. `passes` is the number of accumulated passes in a step. With `stops` the batch sizes that `left_out` names
    are not replayed.
    """
    replays = replays or Replays()
    rows: dict[int, tuple[Estimate, Tape]] = {}
    notes: dict[int, str] = {}
    batches = tuple(batches)

    def replay(wanted: Iterable[int]) -> None:
        tapes = []
        for batch in wanted:
            try:
                tapes.append(family.evaluate(batch))
            except ValueError as error:
                notes[batch] = f"batch {batch}: {error}"
        for tape in resolve_all(tapes, oracle):
            row = estimate_tape(
                tape,
                dtype=dtype,
                gpu=gpu,
                mode=mode,
                expandable_segments=expandable_segments,
                unbounded=find_unbounded(tape, gpu.backend, expandable_segments=expandable_segments, replays=replays),
                passes=passes,
            )
            rows[tape.batch] = row, tape

    def column() -> Column:
        done = [rows[batch] for batch in batches if batch in rows]
        return Column(
            estimates=tuple(row for row, _ in done),
            notes=tuple(notes[batch] for batch in batches if batch in notes),
            stand_ins=tuple(dict.fromkeys(text for _, tape in done for text in tape.stand_ins)),
            first=done[0][1] if done else None,
        )

    if first and len(batches) > 1:
        for batch in first:
            replay([batch])
            if batch in rows and rows[batch][0].fits is True:
                break
        yield column()
    if stops:
        for batch in batches:
            if batch not in left_out(batches, {size: row.fits for size, (row, _) in rows.items()}):
                replay([batch] if batch not in rows.keys() | notes.keys() else [])
    else:
        replay(batch for batch in batches if batch not in rows.keys() | notes.keys())
    yield column()


def with_largest(
    column: Column,
    family: TapeFamily,
    *,
    dtype: str,
    gpu: Gpu,
    oracle: SizeOracle | None = None,
    expandable_segments: bool = False,
    oracle_name: str | None = None,
    replays: Replays | None = None,
) -> Column:
    """Return the complete column of `read_cells` with the largest batch size that fits.

    `oracle_name` names the source of the oracle's answers.
    """
    try:
        largest = find_largest_batch(
            family,
            gpu,
            dtype=dtype,
            oracle=oracle,
            oracle_name=oracle_name,
            known={row.batch: row.fits for row in column.estimates},
            expandable_segments=expandable_segments,
            replays=replays or Replays(),
        )
    except NotAffineError as error:
        largest = MaxBatch(dtype=dtype, batch=None, possible_batch=None, reason=str(error), tried=True)
    return replace(column, max_batch=largest)


def read_columns(
    tapes: Mapping[str, TapeFamily],
    batches: Iterable[int],
    *,
    gpu: Gpu,
    mode: str,
    oracle: SizeOracle | None = None,
    expandable_segments: bool = False,
) -> dict[str, Column]:
    """Return the complete column of every dtype."""
    batches, columns = tuple(batches), {}
    for dtype, family in tapes.items():
        *_, cells = read_cells(
            family, batches, dtype=dtype, gpu=gpu, mode=mode, oracle=oracle, expandable_segments=expandable_segments
        )
        columns[dtype] = with_largest(
            cells, family, dtype=dtype, gpu=gpu, oracle=oracle, expandable_segments=expandable_segments
        )
    return columns
