"""The estimate of one dtype and batch size of any question on one architecture, each traced once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sizer.base.errors import BuildError, RequestError, SizerError, TraceError
from sizer.catalogue.gpus import Gpu
from sizer.estimating.scopes import reduce_request
from sizer.estimating.store import ResultStore
from sizer.estimating.tracer import Traced, Tracer, answers_of, check_kernels
from sizer.query.request import Request, check_traced, gpu_of
from sizer.query.text import format_query, parse_query
from sizer.report.census import ArchitectureCounts
from sizer.report.decision import Cell, cell_of
from sizer.report.estimate import Estimate, estimate_tape
from sizer.report.fit import Fits, fits_in
from sizer.report.largest_batch import MaxBatch, find_largest_batch, no_batch
from sizer.report.replays import find_unbounded
from sizer.tape.affine import NotAffineError
from sizer.tape.compiled_code import CompiledCode
from sizer.tape.tape import BlockNotes, Tape
from sizer.tracing.cuda.size_oracle import size_oracle_of

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

CANNOT = (RequestError, BuildError, TraceError)  # errors of a derived question although the original one is valid


class Cells:
    """Estimates of questions that differ from `request` in anything but the architecture.

    A question is a Request of one dtype and one batch size. All methods raise one of CANNOT if it cannot be answered.
    """

    def __init__(
        self,
        request: Request,
        *,
        config: dict | None = None,
        store: ResultStore | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config, self._store, self._progress = config, store, progress
        self._tracers: dict[Request, Tracer] = {}
        self._estimates: dict[Request, Estimate] = {}
        self.request = request

    def estimate(self, request: Request) -> Estimate:
        """Return the estimate of a question."""
        if request not in self._estimates:
            (dtype,), gpu, expandable = request.dtypes, gpu_of(request), request.expandable_segments
            tape = self.tape(request)
            self._estimates[request] = estimate_tape(
                tape,
                dtype=dtype,
                gpu=gpu,
                mode=request.mode,
                expandable_segments=expandable,
                unbounded=find_unbounded(
                    tape, gpu.backend, expandable_segments=expandable, replays=self.tracer(request).replays
                ),
                passes=request.accumulate,
            )
        return self._estimates[request]

    def cell(self, request: Request) -> Cell:
        """Return the figures of a question."""
        return cell_of(self.estimate(request))

    def fits(self, request: Request) -> Fits:
        """Return whether a question's work fits its device."""
        if request in self._estimates:
            return self._estimates[request].fits
        return fits_in(self.tape(request), gpu_of(request), expandable_segments=request.expandable_segments)

    def tape(self, request: Request) -> Tape:
        """Return the tape of a question, its size queries resolved for its device."""
        (dtype,), (batch,) = request.dtypes, request.batches
        tracer = self.tracer(request)
        if batch < tracer.counted.smallest:
            tracer.check_batch_of_one()
        return tracer.trace_cell(dtype, batch).resolve(size_oracle_of(gpu_of(request)))

    def compiled(self, request: Request) -> CompiledCode | None:
        """Return the result of torch.compile for a question with a requested tape, None if nothing was compiled."""
        (dtype,), (batch,) = request.dtypes, request.batches
        return self.tracer(request).compiled(dtype, batch)

    def noted(self, request: Request) -> tuple[Tape, BlockNotes]:
        """Return the tape of a question as `tape` does, with notes on its blocks: always a new trace."""
        (dtype,), (batch,) = request.dtypes, request.batches
        tracer = self.tracer(request)
        if batch < tracer.counted.smallest:
            tracer.check_batch_of_one()
        tape, notes = tracer.trace_noted(dtype, batch)
        return tape.resolve(size_oracle_of(gpu_of(request))), notes

    def trace_line(self, request: Request) -> Traced:
        """Return a question's work traced over the batch size: its cell and its largest batch are then replays."""
        (dtype,) = request.dtypes
        traced = self.tracer(request).trace(dtype, request.batches)
        if not traced.family.covered(request.batches):
            check_kernels(traced.failure, dtype)
            raise TraceError(traced.failure)
        return traced

    def is_affine(self, request: Request) -> bool:
        """Return whether a question's work is affine in the batch. Raises TraceError if it cannot be traced."""
        return bool(self.trace_line(request).family.lines)

    def largest_batch(self, request: Request) -> MaxBatch:
        """Return the largest batch size of a question, for any batch size of its own.

        If the work is not affine in the batch, this is the question's own batch size if that fits.
        """
        (dtype,), (batch,), gpu = request.dtypes, request.batches, gpu_of(request)
        known, smallest = self._estimates.get(request), self.tracer(request).counted.smallest
        if batch == smallest and known is not None and known.fits is False:
            return no_batch(dtype, gpu, smallest)
        traced = self.trace_line(request)
        try:
            return find_largest_batch(
                traced.family,
                gpu,
                dtype=dtype,
                oracle=size_oracle_of(gpu),
                oracle_name=answers_of(gpu),
                known=None if traced.family.lines else {batch: self.fits(request)},
                expandable_segments=request.expandable_segments,
                replays=self.tracer(request).replays,
            )
        except NotAffineError as error:
            raise TraceError(str(error)) from error

    def counted(self, request: Request) -> ArchitectureCounts:
        """Return the facts about a question's architecture."""
        return self.tracer(request).counted

    def keep_replays(self) -> None:
        """Store the replays of the questions so far."""
        for tracer in self._tracers.values():
            tracer.keep_replays()

    def tracer(self, request: Request) -> Tracer:
        """Return the tracer of a question; questions on the same module share it."""
        gpu = gpu_of(request)
        key = replace(
            reduce_request(request),
            dtypes=("float32",),
            batches=(1,),
            gpu=_rules_of(gpu) if request.compile is None else gpu.key,
            expandable_segments=False,
        )
        if key not in self._tracers:
            tracer = Tracer(request, gpu, config=self._config, store=self._store, progress=self._progress)
            for other in self._tracers.values():
                if tracer.share_model(other):
                    break
            self._tracers[key] = tracer
        return self._tracers[key]


def one_cell(request: Request) -> Request:
    """Return the question of the one dtype and batch size that a request has, or has in focus. Raises RequestError for more."""
    check_traced(request)
    dtypes, batches = request.dtypes, request.batches
    if request.focus is not None:
        dtypes, batches = (request.focus[0],), (request.focus[1],)
    if len(dtypes) != 1 or len(batches) != 1:
        raise RequestError(
            "this answer is for one dtype and batch size",
            given=format_query(request),
            allowed="one dtype and one batch",
            todo="name them with focus=float32:8",
        )
    return replace(request, dtypes=dtypes, batches=batches, focus=None)


def check_request(request: Request) -> Request:
    """Return the request itself after the checks of a link's values. Raises RequestError."""
    return parse_query(format_query(request))


def why(error: SizerError) -> str:
    """Return the reason why a question has no answer, in one line."""
    return " ".join(str(error).split())


def _rules_of(gpu: Gpu) -> str:
    """Return a text that is equal for devices with equal tapes."""
    return f"{gpu.backend} {gpu.capability}"
