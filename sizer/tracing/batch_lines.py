"""Tapes of one piece of work over the batch size, from traces at a few batch sizes: lines, and batch sizes off the lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from sizer.tape.affine import AffineTape, NotAffineError, beginning, fit_affine
from sizer.tape.family import TapeFamily
from sizer.tape.per_sample import PerSampleTape, fit_per_sample
from sizer.tape.tape import Tape
from sizer.tracing.device import Device

FITTED_AT = (2, 3)  # batch sizes of the two traces of an affine tape; 1 has special cases
CHECKED_AT = 5  # checks the line if 1 is off it; for one dtype, since the order of events depends on the architecture
MORE_SAMPLES = (0, 1)  # added to both batch sizes for a PerSampleTape: the second sample may differ from the third

SHARE_OF_SAMPLE = 1 / 16  # of the blocks at batch 1: a second sample adds more if it has blocks of its own


@dataclass(slots=True)
class LineFacts:
    """Facts from traces of one dtype that hold for the others, since the order of events depends on the architecture.

    `one_is_apart` says by kind of device whether batch 1 is off the line, `has_samples_apart` whether there are events for each
    sample of the batch. `on_no_line` is the reason if events depend on the batch size, so that no line exists; else empty.
    """

    one_is_apart: dict[str, bool] = field(default_factory=dict)
    has_samples_apart: bool = False
    on_no_line: str = ""


def trace_lines(
    trace_at: Callable[..., Tape],
    batches: Collection[int],
    device: Device,
    *,
    smallest: int,
    begun: Tape | None = None,
    known: LineFacts,
    whole: dict[int, Tape] | None = None,
    repeats: bool = True,
) -> TapeFamily:
    """Return the lines over the batch size, with the tapes of batch sizes that are off them.

    Args:
        trace_at: `trace_at(batch)` traces the work on `device` at one batch size, `trace_at(batch, short=True)` as `trace` with
            `short`.
        batches: The batch sizes.
        device: The device.
        smallest: The smallest batch size that the model supports.
        begun: An earlier tape, which is valid unless the module has kept tensors from this first step.
        known: Facts from traces of other dtypes; facts from these traces are added.
        whole: Receives the tapes of whole traces by batch size, which are valid also if NotAffineError is raised.
        repeats: Whether steps repeat each other; if not, no trace is cut short.

    Raises:
        NotAffineError: The tapes are on no line.
        TraceError: A trace fails.
    """
    at = _Traces(trace_at, {} if whole is None else whole, repeats=repeats)
    if begun is not None and begun.batch in FITTED_AT:
        at.whole[begun.batch] = begun
    line = _fit(at, FITTED_AT, known, begun if begun is not None and begun.batch == 1 else None)
    if begun is not None and not _lasting(begun) <= _lasting(line.tape):
        begun = None
    one = cache(lambda: begun if begun is not None and begun.batch == 1 else at(1))
    if isinstance(line, PerSampleTape):
        below = range(smallest, line.fitted_at[0])  # the first samples differ from later ones
        exact = tuple(one() if batch == 1 else at(batch) for batch in below)
    else:
        if device.kind not in known.one_is_apart:
            checked = one if 1 in batches else lambda: at(1, short=True)
            third = begun if begun is not None and begun.batch not in (1, *FITTED_AT) else None
            known.one_is_apart[device.kind] = _is_exceptional(line, at, checked if smallest == 1 else None, third)
        apart = smallest == 1 and (known.one_is_apart[device.kind] or device.differs_at_one)
        exact = (one(),) if apart else ()
    lines: list[tuple[int, AffineTape | PerSampleTape]] = [(1, line)]
    if (beyond := device.changes_at) is not None:
        lines.append((beyond, _fit(at, (beyond, beyond + 1), known, None)))
    return TapeFamily(lines=tuple(lines), exact=exact, smallest=smallest)


class _Traces:
    """Traces at several batch sizes. No whole trace is repeated."""

    def __init__(self, at: Callable[..., Tape], whole: dict[int, Tape], *, repeats: bool) -> None:
        self._at, self.whole, self._repeats = at, whole, repeats

    def __call__(self, batch: int, *, short: bool | Callable[[Tape], bool] = False) -> Tape:
        if batch in self.whole:
            return self.whole[batch]
        is_whole = not (short and self._repeats)

        def ends(begun: Tape) -> bool:
            nonlocal is_whole
            is_whole = callable(short) and not short(begun)
            return not is_whole

        tape = self._at(batch, short=False if is_whole else ends if callable(short) else True)
        if is_whole:
            self.whole[batch] = tape
        return tape

    def forget(self, batch: int) -> bool:
        """Repeat whole traces, beginning with the trace of a batch size.

        Return False if that trace gives the same tape: then all whole traces stay valid.
        """
        before = dict(self.whole)
        self.whole.clear()
        if batch in before and self(batch) == before[batch]:
            self.whole.update(before)
            return False
        return True


def _lasting(tape: Tape) -> Counter[tuple[str, str]]:
    """Return operators and modules of the blocks that are never released."""
    order = np.asarray(tape.order, np.int64)
    lasting = np.ones(len(tape.sizes), np.bool_)
    lasting[~order[order < 0]] = False
    blocks = np.flatnonzero(lasting).tolist()
    return Counter((tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]]) for block in blocks)


def _fit(at: _Traces, batches: tuple[int, int], known: LineFacts, begun: Tape | None) -> AffineTape | PerSampleTape:
    """Return the tape over the batch size from two traces, the second cut short if the steps repeat each other.

    A second trace continues if its first step shows that it is off the line. If both whole traces are on a line, they are
    valid. Otherwise both are traced again as a whole: a module may keep tensors from its first step, or from its last one. If
    the first trace is then unchanged, earlier whole traces stay valid. If the tape at batch 1, `begun`, shows that samples have
    blocks of their own, the second trace is whole at once. A PerSampleTape is checked here.

    Raises NotAffineError and TraceError.
    """
    if known.has_samples_apart:
        return _fit_whole(at, batches, known)
    failed: NotAffineError | None = None
    try:
        if begun is not None and _grows(begun, at(batches[0])):
            return _fit_whole(at, batches, known)
        first = at(batches[0])
        second = at(batches[1], short=partial(_fits, first))
        with suppress(NotAffineError):
            return fit_affine(first, second)
        if _has_more(first, second):
            return _fit_whole(at, batches, known)
    except NotAffineError as error:
        failed = error
    if not at.forget(batches[0]) and failed is not None:
        raise failed
    return _fit_whole(at, batches, known)


def _fits(first: Tape, begun: Tape) -> bool:
    """Return whether a line goes through a tape and the beginning of one at another batch size."""
    try:
        fit_affine(first, begun)
    except NotAffineError:
        return False
    return True


def _has_more(first: Tape, second: Tape) -> bool:
    """Return whether the second tape has more events than the beginning of the first one: a sample may have events of its own.

    The first trace is then valid, unless the tapes over the batch disagree with a third one.
    """
    return len(second.order) > len(beginning(first, second).order)


def _grows(one: Tape, other: Tape) -> bool:
    """Return whether a tape of a larger batch has enough further blocks for each sample to have its own."""
    return len(other.sizes) - len(one.sizes) > SHARE_OF_SAMPLE * len(one.sizes)


def _fit_whole(at: _Traces, batches: tuple[int, int], known: LineFacts) -> AffineTape | PerSampleTape:
    """Return the tape over the batch size from two whole traces, or more for a PerSampleTape."""
    try:
        return fit_affine(at(batches[0]), at(batches[1]))
    except NotAffineError as error:
        for more in MORE_SAMPLES:
            with suppress(NotAffineError):
                line = fit_per_sample(at(batches[0] + more), at(batches[1] + more))
                line.check(at(CHECKED_AT + batches[0] - FITTED_AT[0] + more, short=True))
                known.has_samples_apart = True
                return line
        raise error


def _is_exceptional(
    line: AffineTape, at: Callable[..., Tape], one: Callable[[], Tape] | None, third: Tape | None
) -> bool:
    """Return whether batch 1, if possible, differs from the line: a tensor with a dimension of 1 is contiguous in more ways.

    The line is also checked at a third batch size, with the tape `third` if given. Raises NotAffineError if that check fails.
    """
    if one is not None:
        try:
            line.check(one())
            return False
        except NotAffineError:
            pass
    line.check(at(CHECKED_AT, short=True) if third is None else third)
    return one is not None
