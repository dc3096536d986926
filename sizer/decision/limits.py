"""Limits of a device: the largest batch, the longest sequence, the largest image.

For a generation these are the most sequences, the longest prompt, and the most tokens. All other keys stay as requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import peak_requested_bytes
from sizer.base.errors import SizerError
from sizer.catalogue.modes import MODES
from sizer.catalogue.pipelines import MAX_FRAMES
from sizer.catalogue.recipes import GRPO
from sizer.decision.cells import CANNOT, Cells, one_cell, why
from sizer.decision.pipeline_levers import FRAMES
from sizer.distributed.context_parallel import BLOCK, PIECES
from sizer.estimating.store import ResultStore
from sizer.query.request import Request, check_eager, gpu_of
from sizer.query.text import format_query
from sizer.query.values import MAX_BATCH, MAX_IMAGE, MAX_NEW, MAX_SEQUENCE_LENGTH, MIN_IMAGE
from sizer.report.census import ArchitectureCounts
from sizer.report.decision import Limit, LimitReport
from sizer.report.fit import Fits
from sizer.report.largest_batch import search

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

LINES = 4  # lines, through two values each, to the start of the search: most memory is a sum of several powers of a size
PIPELINE_SIDE = 64  # step in pixels of the search for a pipeline's largest image: every VAE divides it
CLOSE = 256  # the fraction of a value within which the next value needs no other line
MOST_EVENTS = 3 * 2**15  # of a tape, if each batch size is traced separately: a trace of some seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A size of a sample to solve for, by its key in the query.

    It has a title, the smallest and largest value, a function that returns the question with another value, and one that
    returns the question's current value. That is None if the model, or the mode, has no such size. The values are multiples of
    `step` after `offset`, which `smallest` and `largest` count. The search starts from at most `lines` lines. `bound` says why
    larger values are not tried.
    """

    key: str
    title: str
    smallest: int
    largest: int
    with_value: Callable[[Request, int], Request]
    value: Callable[[Request, ArchitectureCounts], int | None]
    step: int = 1
    offset: int = 0
    lines: int = LINES
    bound: str = ""

    def of(self, value: int) -> int:
        """Return the value of the query's key for a value that is counted in steps."""
        return value * self.step + self.offset

    def in_steps(self, request: Request) -> Size:
        """Return the size in the steps that a question allows.

        Sequences sharded over ranks are divisible by them; those of context parallel have whole blocks of attention. The sides
        of a pipeline's images are divisible by its VAE.
        """
        if self.key == "image" and request.is_pipeline:
            return replace(self, smallest=1, step=PIPELINE_SIDE, largest=self.largest // PIPELINE_SIDE)
        if self.key != "seq" or not (request.sp or request.cp > 1):
            return self
        step = request.tp if request.sp else PIECES * BLOCK * request.cp
        return replace(self, step=step, largest=self.largest // step)


def _generates(request: Request) -> bool:
    """Return True if a question's sequences are prompts."""
    return MODES[request.mode].generates or request.objective == GRPO


def _sequence_length(request: Request, known: ArchitectureCounts) -> int | None:
    return None if _generates(request) else known.sequence_length


def _prompt_length(request: Request, known: ArchitectureCounts) -> int | None:
    return known.sequence_length if _generates(request) else None


def _new_tokens(request: Request, known: ArchitectureCounts) -> int | None:
    return request.new if MODES[request.mode].generates else None


def _image_side(request: Request, known: ArchitectureCounts) -> int | None:
    return None if known.image_size is None else max(known.image_size)


def _batch_size(request: Request, known: ArchitectureCounts) -> int:
    return request.batches[0]


BATCH = Size(
    key="batch",
    title="Largest batch",
    smallest=1,
    largest=MAX_BATCH,
    with_value=lambda request, batch: replace(request, batches=(batch,)),
    value=_batch_size,
    lines=1,  # all samples are equal
)

SIZES = (
    Size(
        key="seq",
        title="Longest sequence",
        smallest=1,
        largest=MAX_SEQUENCE_LENGTH,
        with_value=lambda request, length: replace(request, sequence_length=length),
        value=_sequence_length,
    ),
    Size(
        key="seq",
        title="Longest prompt",
        smallest=1,
        largest=MAX_SEQUENCE_LENGTH,
        with_value=lambda request, length: replace(request, sequence_length=length),
        value=_prompt_length,
    ),
    Size(
        key="new",
        title="Most new tokens",
        smallest=1,
        largest=MAX_NEW,
        with_value=lambda request, tokens: replace(request, new=tokens),
        value=_new_tokens,
    ),
    Size(
        key="image",
        title="Largest square image",
        smallest=MIN_IMAGE,
        largest=MAX_IMAGE,
        with_value=lambda request, side: replace(request, image_size=(side, side)),
        value=_image_side,
    ),
    Size(
        key="frames",
        title="Most frames",
        smallest=0,
        largest=(MAX_FRAMES - 1) // FRAMES,
        with_value=lambda request, frames: replace(request, frames=frames),
        value=lambda request, known: known.frames,
        step=FRAMES,
        offset=1,
    ),
)


def limits(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> Iterator[LimitReport]:
    """Yield the growing limits of the one dtype and batch size of a request, on its device: batch, sequence and image.

    A limit surely fits by its own trace, and with one more it does not. It does not depend on earlier questions. It assumes
    that work that fits at one size fits at every smaller one. Raises RequestError for a request of several dtypes or batch
    sizes, and the errors of an estimate if the work itself has none.
    """
    request = one_cell(request)
    check_eager(request, "the largest sizes that fit")
    cells = Cells(request, config=config, store=store, progress=progress)
    report_progress = progress or (lambda text: None)
    known = cells.counted(request)
    sizes = [size for size in SIZES if size.value(request, known) is not None]
    report = LimitReport(query=format_query(request, complete=True), pending=("batch", *(size.key for size in sizes)))
    yield report
    report_progress("largest batch")
    report = replace(report, limits=(_batch(request, cells),), pending=report.pending[1:])
    yield report
    for size in sizes:
        report_progress(size.title.lower())
        found = _solve(size.in_steps(request), request, cells)
        report = replace(report, limits=(*report.limits, found), pending=report.pending[1:])
        yield report


def _batch(request: Request, cells: Cells) -> Limit:
    title = "Most sequences at once" if MODES[request.mode].generates else BATCH.title
    try:
        if request.pp == 1 and not MODES[request.mode].generates and not cells.is_affine(request):
            return _solve(_traced_batches(request, cells), request, cells)
        found = cells.largest_batch(request)
    except CANNOT as error:
        return Limit(key="batch", title=title, value=None, possible_value=None, reason=why(error))
    limit = Limit(key="batch", title=title, value=found.batch, possible_value=found.possible_batch, reason=found.reason)
    limit = replace(limit, most_value=found.interval.most)
    return _with_cell(limit, replace(request, batches=(found.batch,)) if found.batch else None, cells)


def _traced_batches(request: Request, cells: Cells) -> Size:
    """Return the batch size as a size of separately traced work, limited to traces of some seconds."""
    step = request.batch_step
    smallest, now = cells.counted(request).smallest // step, request.batches[0] // step
    size = replace(BATCH, smallest=smallest, largest=MAX_BATCH // step, step=step)
    try:
        few, more = (len(cells.tape(size.with_value(request, size.of(n))).order) for n in (smallest, smallest + 1))
    except CANNOT:  # a model that takes one sample at a time
        return size
    largest = max(now, smallest + (MOST_EVENTS - few) // max(more - few, 1))
    bound = ", since each batch size is traced separately"
    return replace(size, largest=min(largest, size.largest), bound=bound)


def _solve(size: Size, request: Request, cells: Cells) -> Limit:
    """Return the limit of one size, found by traces.

    A few traces give the start of the search. Then steps that double, and bisection, find the limit.
    """
    refused: dict[int, SizerError] = {}
    verdicts: dict[int, Fits] = {}

    def at(value: int) -> Request:
        return size.with_value(request, size.of(value))

    def fits(value: int, wanted: tuple[Fits, ...]) -> bool:
        if value not in verdicts:
            try:
                verdicts[value] = cells.fits(at(value))
            except CANNOT as error:
                refused[value] = error
                verdicts[value] = False
        return verdicts[value] in wanted

    given = size.value(request, cells.counted(request))
    assert given is not None, "the model has such a size"
    now = max(1, (given - size.offset) // size.step)
    if size.key == "new" and fits(size.largest, (True,)):
        start = near = size.largest
    else:
        start, near = _reach(size, now, at, cells)
    sure = search(lambda value: fits(value, (True,)), size.largest, start=start, low=size.smallest - 1)
    possible = sure
    if (sure + 1) not in refused and sure < size.largest:
        start = max(sure + 1, round(near * sure / start))
        possible = search(lambda value: fits(value, (True, "uncertain")), size.largest, start=start, low=sure)
    smallest = size.smallest - 1
    limit = Limit(
        key=size.key,
        title=size.title,
        value=size.of(sure) if sure > smallest else None,
        possible_value=size.of(possible) if possible > smallest else None,
        reason=_reason(size, sure, possible, now, refused),
        most_value=_most(size, possible, refused),
    )
    return _with_cell(limit, at(sure) if sure > smallest else None, cells)


def _reach(size: Size, now: int, at: Callable[[int], Request], cells: Cells) -> tuple[int, int]:
    """Return two values: with these, tensors alone fill the device next to its largest context, and next to its smallest.

    A line through two values gives the next, until they are close. A refused value is the answer.
    """
    if size.key == "new" and (tokens := _tokens_before_failure(at(size.largest), cells)) is not None:
        return tokens, tokens
    gpu = gpu_of(cells.request)
    # A sequence's activations grow with its length, an image's with the square of its side.
    power = 2 if size.key == "image" else 1
    before, value = (max(size.smallest, now // 2), now) if now > size.smallest else (now, min(2 * now, size.largest))
    try:
        before_bytes, value_bytes = (peak_requested_bytes(cells.tape(at(one))) for one in (before, value))
    except CANNOT:
        return now, now

    def on_the_line(room: int) -> int:
        found = (room - value_bytes) / slope + value**power
        return round(min(max(found, 1) ** (1 / power), size.largest))

    reach = near = value
    for _ in range(size.lines):
        if before == value or (slope := (value_bytes - before_bytes) / (value**power - before**power)) <= 0:
            break
        reach, near = (on_the_line(gpu.total_bytes - held) for held in (gpu.context_high_bytes, gpu.context_low_bytes))
        if abs(reach - value) <= value // CLOSE:
            break
        try:
            reached_bytes = peak_requested_bytes(cells.tape(at(reach)))
        except CANNOT:
            break
        before, before_bytes, value, value_bytes = value, value_bytes, reach, reached_bytes
    return reach, near


def _tokens_before_failure(request: Request, cells: Cells) -> int | None:
    """Return the number of tokens that a generation reaches before memory runs out; None if its last loop does not tell.

    A growing cache has the same size at a token, for any number of tokens to come.
    """
    if request.cache != "dynamic":
        return None
    try:
        tape = cells.tape(request)
    except CANNOT:
        return None
    gpu = gpu_of(request)
    capacity = gpu.total_bytes - gpu.context_high_bytes
    found = replay_events(tape, gpu.backend, capacity, request.expandable_segments).loops
    if len(found) != len(tape.loops) or not found or found[-1].refused is None:
        return None
    return max(1, request.new - tape.loops[-1].count + found[-1].done)


def _most(size: Size, possible: int, refused: dict[int, SizerError]) -> int | None:
    """Return the largest value that can fit; 0 if not even the smallest can.

    None if the search ended before a value that cannot fit.
    """
    if possible >= size.largest and possible + 1 not in refused:
        return None
    return size.of(possible) if possible >= size.smallest else 0


def _reason(size: Size, sure: int, possible: int, now: int, refused: dict[int, SizerError]) -> str:
    if (error := refused.get(possible + 1)) is not None:
        return f"at {size.of(possible + 1)} the model refuses it: {why(error)}"
    if sure >= size.largest:
        return f"searched up to {size.of(size.largest)}{size.bound}"
    if sure < size.smallest:
        return f"not even {size.of(size.smallest)} fits for sure"
    if possible >= size.largest:
        return f"it may still fit there; searched up to {size.of(size.largest)}{size.bound}"
    return ""


def _with_cell(limit: Limit, question: Request | None, cells: Cells) -> Limit:
    if not question:
        return limit
    try:
        return replace(limit, query=format_query(question), cell=cells.cell(question))
    except CANNOT as error:
        return replace(limit, reason=why(error))
