"""The tapes of one piece of work over the batch size, from traces at a few of them: lines, and batch 1 where it is off them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, MutableMapping
from functools import cache

import numpy as np

from sizer.tape.affine import AffineTape, NotAffineError, fit_affine
from sizer.tape.family import TapeFamily
from sizer.tape.tape import Tape
from sizer.tracing.device import Device

FITTED_AT = (2, 3)  # batch sizes of the two traces that an affine tape is made from; 1 has special cases
CHECKED_AT = 5  # checks the line where 1 is off it; for one dtype, since the order of events is the architecture's


def trace_lines(
    at: Callable[..., Tape],
    batches: Collection[int],
    device: Device,
    *,
    smallest: int,
    begun: Tape | None = None,
    exceptional: MutableMapping[str, bool],
) -> TapeFamily:
    """The lines over the batch size, with the tape at batch 1 where that is off them. Raises NotAffineError, TraceError.

    `at(batch)` traces the work on `device` at one batch size, `at(batch, short=True)` as `trace` does with `short`. `smallest` is
    the smallest batch size that the model takes. `begun` is the tape at batch 1 where that was traced before; it stands unless the
    module has kept something from this first step. `exceptional` says by kind of device whether batch 1 is off the line, once that
    is known: it is looked at for one dtype.
    """
    line = _affine(at, FITTED_AT)
    one = cache(lambda: begun if begun is not None and _lasting(begun) <= _lasting(line.tape) else at(1))
    if device.kind not in exceptional:
        checked = one if 1 in batches else lambda: at(1, short=True)
        exceptional[device.kind] = _is_exceptional(line, at, checked if smallest == 1 else None)
    apart = smallest == 1 and (exceptional[device.kind] or device.differs_at_one)
    lines = [(1, line)]
    if (beyond := device.changes_at) is not None:
        lines.append((beyond, _affine(at, (beyond, beyond + 1))))
    return TapeFamily(lines=tuple(lines), exact=(one(),) if apart else (), smallest=smallest)


def _lasting(tape: Tape) -> Counter[tuple[str, str]]:
    """Return operators and modules of the blocks that are never released."""
    order = np.asarray(tape.order, np.int64)
    lasting = np.setdiff1d(np.arange(len(tape.sizes)), ~order[order < 0]).tolist()
    return Counter((tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]]) for block in lasting)


def _affine(at: Callable[..., Tape], batches: tuple[int, int]) -> AffineTape:
    """The affine tape of two traces, the second cut short where the steps repeat each other.

    Else of two whole ones, both made anew: a module may keep something from the first step that it ever did.
    """
    try:
        return fit_affine(at(batches[0]), at(batches[1], short=True))
    except NotAffineError:
        return fit_affine(*map(at, batches))


def _is_exceptional(line: AffineTape, at: Callable[..., Tape], one: Callable[[], Tape] | None) -> bool:
    """Return whether batch 1, where it is possible, differs from the line: a tensor with a dimension of 1 is contiguous in more
    ways.

    The check of the line at a third batch size comes with it. Raises NotAffineError where that fails.
    """
    if one is not None:
        try:
            line.check(one())
            return False
        except NotAffineError:
            pass
    line.check(at(CHECKED_AT, short=True))
    return one is not None
