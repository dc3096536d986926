"""All the tapes of one piece of work, by batch size."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from sizer.tape.affine import AffineTape
from sizer.tape.loop_choices import with_outputs
from sizer.tape.per_sample import PerSampleTape
from sizer.tape.size_queries import Answer, SizeOracle
from sizer.tape.tape import Tape


class NotTracedError(ValueError):
    """The work is not affine in the batch size, and was not traced at this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeFamily:
    """The tapes of one piece of work over the batch size: plain data, whose size queries are resolved when a tape is taken.

    lines: (first batch, tape over the batch) ascending; each holds up to the next one's first batch. Empty where the work can only
        be traced at each batch size by itself.
    exact: tapes of batch sizes that were traced by themselves and stand before the lines; a batch of 1 is often an exception. All
        below the first line's are among them.
    smallest: the smallest batch size that the model takes.
    """

    lines: tuple[tuple[int, AffineTape | PerSampleTape], ...] = ()
    exact: tuple[Tape, ...] = ()
    smallest: int = 1
    _digest: str = field(default="", init=False, repr=False, compare=False)  # once it is known

    def at(self, batch: int, oracle: SizeOracle | None = None) -> Tape:
        """The tape (bytes per block) at one batch size, with the sizes that the oracle gives.

        Raises NotTracedError where there are no lines and the work was not traced at this batch, and what `at` of a line raises.
        """
        for tape in self.exact:
            if tape.batch == batch:
                return tape.resolve(oracle)
        if not self.lines:
            raise NotTracedError("not traced")
        line = [line for first, line in self.lines if first <= max(batch, 1)][-1]
        return line.at(batch).resolve(oracle)

    def covered(self, batches: Iterable[int]) -> tuple[int, ...]:
        """Those of some batch sizes that it has tapes for: all of them where there are lines."""
        traced = {tape.batch for tape in self.exact}
        return tuple(batch for batch in batches if self.lines or batch in traced)

    def with_dtype(self, dtype: str, *, instead_of: str) -> TapeFamily:
        """The family whose size queries name another dtype: float16 where it takes bfloat16's kernels; itself without any."""
        if not any(tape.size_queries for tape in self.tapes()):
            return self
        return replace(
            self,
            lines=tuple((first, line.with_dtype(dtype, instead_of=instead_of)) for first, line in self.lines),
            exact=tuple(tape.with_dtype(dtype, instead_of=instead_of) for tape in self.exact),
        )

    def with_sizes(self, size: Answer, *, answered: Collection[str]) -> TapeFamily:
        """The family with the bytes that `size` gives for size queries, which grow by as many with each number that does; where it
        gives none a block keeps its own. Queries of the kinds that are `answered` are gone."""
        return replace(
            self,
            lines=tuple((first, line.with_sizes(size, answered=answered)) for first, line in self.lines),
            exact=tuple(tape.with_sizes(size, answered=answered) for tape in self.exact),
        )

    def with_outputs(self, outputs: str | None) -> TapeFamily:
        """The tapes of a loop that frees or keeps the outputs; None leaves it open, and changes nothing."""
        if outputs is None:
            return self
        return replace(
            self,
            lines=tuple((first, line.with_outputs(outputs)) for first, line in self.lines),
            exact=tuple(with_outputs(tape, outputs)[0] for tape in self.exact),
        )

    def digest(self) -> str:
        """A digest of all that decides the sizes and the order of its tapes."""
        if not self._digest:
            object.__setattr__(self, "_digest", self._take_digest())
        return self._digest

    def _take_digest(self) -> str:
        found = hashlib.blake2b(b"%d" % self.smallest)
        for first, line in self.lines:
            if isinstance(line, AffineTape):
                found.update(repr((first, line.size_queries)).encode())
                found.update(line.constant)
                found.update(line.per_item)
            else:
                found.update(repr((first, line.fitted_at, line.outputs)).encode())
        for tape in self.tapes():
            names = (
                tape.batch,
                tape.op_names,
                tape.marks,
                tape.second_forward,
                *tape.loops,
                tape.size_queries,
                sorted(tape.resolved),
                tape.by_address,
                tape.outputs,
                tape.graphs,
            )
            found.update(repr(names).encode())
            for column in (tape.order, tape.sizes, tape.categories, tape.ops):
                found.update(column)
        return found.hexdigest()[:40]

    def tapes(self) -> Iterator[Tape]:
        """Every tape that the family is made of."""
        for _, line in self.lines:
            yield from (line.tape,) if isinstance(line, AffineTape) else (line.first, line.second)
        yield from self.exact
