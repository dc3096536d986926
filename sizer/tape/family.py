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
    """Tapes of one piece of work over the batch size: plain data, with size queries that are resolved when a tape is taken.

    Args:
        lines: (first batch, tape over the batch) ascending; each is valid up to the next one's first batch. Empty if each batch
            size must be traced separately.
        exact: Tapes of separately traced batch sizes, which take precedence over the lines; a batch of 1 is often an exception.
            It has all batch sizes below the first line's.
        smallest: The smallest batch size that the model accepts.
    """

    lines: tuple[tuple[int, AffineTape | PerSampleTape], ...] = ()
    exact: tuple[Tape, ...] = ()
    smallest: int = 1
    _digest: str = field(default="", init=False, repr=False, compare=False)  # once it is known

    def evaluate(self, batch: int, oracle: SizeOracle | None = None) -> Tape:
        """Return the tape (bytes per block) at one batch size, with the sizes of the oracle.

        Raises NotTracedError if there are no lines and the work was not traced at this batch, and a line's errors.
        """
        for tape in self.exact:
            if tape.batch == batch:
                return tape.resolve(oracle)
        if not self.lines:
            raise NotTracedError("not traced")
        line = [line for first, line in self.lines if first <= max(batch, 1)][-1]
        return line.evaluate(batch).resolve(oracle)

    def covered(self, batches: Iterable[int]) -> tuple[int, ...]:
        """Return the batch sizes with tapes: all of them if there are lines."""
        traced = {tape.batch for tape in self.exact}
        return tuple(batch for batch in batches if self.lines or batch in traced)

    def with_dtype(self, dtype: str, *, instead_of: str) -> TapeFamily:
        """Return the family with size queries of another dtype; unchanged without size queries.

        It is used for float16 if that takes bfloat16's kernels.
        """
        if not any(tape.size_queries for tape in self.tapes()):
            return self
        return replace(
            self,
            lines=tuple((first, line.with_dtype(dtype, instead_of=instead_of)) for first, line in self.lines),
            exact=tuple(tape.with_dtype(dtype, instead_of=instead_of) for tape in self.exact),
        )

    def with_sizes(self, size: Answer, *, answered: Collection[str]) -> TapeFamily:
        """Return the family with the bytes that `size` returns for size queries.

        The sizes grow by the same bytes with each number that grows. If `size` returns None a block keeps its size. Queries of
        the kinds in `answered` are removed.
        """
        return replace(
            self,
            lines=tuple((first, line.with_sizes(size, answered=answered)) for first, line in self.lines),
            exact=tuple(tape.with_sizes(size, answered=answered) for tape in self.exact),
        )

    def with_outputs(self, outputs: str | None) -> TapeFamily:
        """Return the tapes of a loop that frees or keeps the outputs; None leaves the choice open, and changes nothing."""
        if outputs is None:
            return self
        return replace(
            self,
            lines=tuple((first, line.with_outputs(outputs)) for first, line in self.lines),
            exact=tuple(with_outputs(tape, outputs)[0] for tape in self.exact),
        )

    def digest(self) -> str:
        """Return a digest of all inputs of the sizes and the order of its tapes."""
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
        """Yield every tape of the family."""
        for _, line in self.lines:
            yield from (line.tape,) if isinstance(line, AffineTape) else (line.first, line.second)
        yield from self.exact
