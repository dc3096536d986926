"""The estimate: request → counts and tapes → report. Runs in a separate process, which imports torch if a result is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import GENERATION_KEYS, MODES, SERVER_FIELDS
from sizer.catalogue.parallel import PARALLEL_KEYS, PARALLELS
from sizer.catalogue.recipes import GRPO, NO_SYNC, SUMMED
from sizer.estimating.cautions import cautions, of_each_rank, of_server, on_the_host, target, versions
from sizer.estimating.store import ResultStore
from sizer.estimating.tracer import Tracer, answers_of, cheapest_first, check_kernels
from sizer.query.request import Request, gpu_of
from sizer.query.text import format_query
from sizer.query.values import DTYPES
from sizer.report.column import Column, read_cells, with_largest
from sizer.report.estimate import Estimate
from sizer.report.explanation import Formula
from sizer.report.interval import left_out
from sizer.report.kv_cache import KvCache, build_kv_cache
from sizer.report.largest_batch import likely_largest, no_batch
from sizer.report.loop_decisions import LoopDecision, decision, loop_decisions, summed_losses
from sizer.report.replays import peak_reserved_bytes
from sizer.report.report import Focus, Report, build_report, default_focus
from sizer.tape.archive import Traced
from sizer.tape.compiled_code import merge_compiled
from sizer.tape.tape import Tape
from sizer.tracing.cuda.by_capability import CUDNN
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name, size_oracle_of
from sizer.tracing.explain import convolutions, explain, formulas
from sizer.tracing.meta.missing_kernels import missing_kernel

if TYPE_CHECKING:
    from sizer.estimating.model import Progress


def estimate(
    request: Request,
    *,
    config: dict | None = None,
    gpu: Gpu | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> Report:
    """Return the report (bytes) of a request, for every requested dtype and batch size.

    `config` is the parsed config.json for the sources "hub" and "config". `gpu` replaces the request's device. `store` has
    earlier counts and traces of the architecture. Raises RequestError, ConfigError and BuildError. A step that cannot be traced
    is not an error here: the report then has the counts, and the reason in `failures`.
    """
    reports = Estimator(request, config=config, gpu=gpu, store=store, progress=progress).reports()
    return list(reports)[-1].focused(request.focus)


def estimate_cell(
    request: Request,
    *,
    config: dict | None = None,
    gpu: Gpu,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> tuple[Report, Tape]:
    """Return the report (bytes) of a request for one dtype and one batch size, and its tape.

    Raises the errors of `estimate`, and TraceError if the step cannot be traced.
    """
    estimator = Estimator(request, config=config, gpu=gpu, store=store, progress=progress)
    report = list(estimator.reports())[-1]
    (dtype,), (batch,) = request.dtypes, request.batches
    if not report.estimates:
        raise TraceError("the step cannot be traced", todo=report.failures.get(dtype) or "; ".join(report.notes))
    return report, estimator.tape(dtype, batch)


class Estimator:
    """One request on one device, answered bit by bit."""

    def __init__(
        self,
        request: Request,
        *,
        config: dict | None = None,
        gpu: Gpu | None = None,
        store: ResultStore | None = None,
        progress: Progress | None = None,
        stops: bool = False,
    ) -> None:
        """Take a request as `estimate` does; with `stops` a dtype ends after two consecutive batch sizes that do not fit."""
        self.request, self.gpu, self._stops = request, gpu or gpu_of(request), stops
        if request.expandable_segments and self.gpu.backend != "cuda":
            raise RequestError(
                "expandable",
                given=f"'1' on {self.gpu.name}",
                allowed="1 only on a CUDA device: other allocators have no expandable segments",
                todo="remove it",
            )
        self._serves = MODES[request.mode].serves
        self._config, self._store, self._progress = config, store, progress or (lambda text: None)
        if self._serves:
            return
        self._tracer = Tracer(request, self.gpu, config=config, store=store, progress=progress)
        self._oracle = size_oracle_of(self.gpu)
        self._traced: dict[str, Traced] = {}
        self._columns: dict[str, Column] = {}
        self._left_out: dict[str, str] = {}  # by dtype, why an answer on all dtypes leaves it out
        self._growth: str | None = None  # dtype with batch sizes that are traced one by one at the moment
        self._versions = versions()

    def reports(self) -> Iterator[Report]:
        """Yield the growing report.

        It begins with the counts. The first dtype follows: the first batch size, all of them, and the largest that fits. Then
        come the batch sizes of the other dtypes, one dtype at a time, and the largest of each.

        A requested batch of 1 comes before anything else is traced, unless another batch size is in focus.

        The dtype in focus comes first. A report proposes its focus independently, so that the same query with another focus can
        share it. The last report is complete. Raises the errors of `estimate`.
        """
        if self._serves:
            from sizer.estimating.server_report import serve

            yield serve(
                self.request,
                self.gpu,
                config=self._config,
                store=self._store,
                progress=self._progress,
                echo=_echo(self.request),
            )
            return
        batches = self._possible_batches()
        yield self._report(self.request.dtypes)
        dtypes = self._in_order()
        for done, dtype in enumerate(dtypes):
            self._progress(f"{dtype}, {done + 1} of {len(dtypes)}")
            pending = dtypes if done == 0 else dtypes[1:]
            try:
                first = self._first_batch(dtype, batches) if done == 0 else None
                if first is not None and (begun := self._begin(dtype, first, batches)) is not None:
                    self._traced[dtype] = begun
                    self._columns[dtype] = next(self._cells(dtype, begun, (first,)))
                    yield self._report(pending)
                    if self._is_answered_by_one(dtype, batches):
                        self._tracer.keep_begun(dtype)
                        self._columns[dtype] = replace(self._columns[dtype], max_batch=no_batch(dtype, self.gpu, 1))
                        continue
                    if self._ends_with_two(dtype, begun, batches):
                        self._tracer.keep_begun(dtype)
                        continue
                yield from self._growing(dtype, batches, pending)
                self._check_kernels(dtype)
            except RequestError as error:
                self._leave_out(dtype, error)
            if dtype in self._columns and done == 0:
                self._find_largest(dtype)
                if len(dtypes) > 1:
                    yield self._report(dtypes[1:])
        for done, dtype in enumerate(dtypes[1:], 1):
            if dtype in self._columns:
                self._progress(f"the largest batch in {dtype}")
                self._find_largest(dtype)
                if done + 1 < len(dtypes):
                    yield self._report(dtypes[done + 1 :])
        yield self._report(())
        self._tracer.keep_replays()

    def _growing(self, dtype: str, batches: tuple[int, ...], pending: list[str]) -> Iterator[Report]:
        """Yield the report with the cells of a dtype as they come.

        Batch sizes that are traced separately come one by one, the one in focus first.
        """
        begun, shown = self._columns.get(dtype), None  # `begun` has one batch size
        focus = self.request.focus
        in_turn = sorted(batches, key=lambda batch: focus is not None and focus[0] == dtype and batch != focus[1])
        for traced in self._tracer.traces(dtype, in_turn):
            self._traced[dtype] = traced
            if not (there := traced.family.covered(batches)):
                continue
            known = () if shown is None else {row.batch for row in shown.estimates}
            for column in self._cells(dtype, traced, tuple(batch for batch in there if batch not in known)):
                if shown is not None:
                    column = shown.with_cells(column, batches)
                elif begun is not None and begun.estimates[0].batch not in {row.batch for row in column.estimates}:
                    column = begun.with_cells(column, batches)
                self._columns[dtype] = column
                self._growth = dtype if len(there) < len(batches) and not traced.failure else None
                yield self._report(pending)
            shown = self._columns[dtype]
            missing = tuple(batch for batch in batches if batch not in there)
            if missing and missing == self._left_out_of(shown, batches):
                self._growth = None
                break
        if not there:
            self._columns.pop(dtype, None)

    def _left_out_of(self, column: Column, batches: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch sizes that a column leaves out."""
        return left_out(batches, {row.batch: row.fits for row in column.estimates}) if self._stops else ()

    def _leave_out(self, dtype: str, refused: RequestError) -> None:
        """Leave a dtype out that a trace has refused.

        Raises the refusal if the question names dtypes, or every dtype is refused.
        """
        self._left_out[dtype] = f"{dtype} is left out: {refused}"
        if self.request.dtypes != DTYPES or len(self._left_out) == len(DTYPES):
            raise refused
        self._traced.pop(dtype, None)
        self._columns.pop(dtype, None)

    def _check_kernels(self, dtype: str) -> None:
        """Leave a dtype out if an operator has no kernel for it and the question names no dtypes.

        Raises RequestError if the question names it.
        """
        failure = self._traced[dtype].failure
        if dtype in self._columns or (missing := missing_kernel(failure)) is None:
            return
        if self.request.dtypes != DTYPES:
            check_kernels(failure, dtype)
        self._left_out[dtype] = f"{dtype} is left out: {missing}"

    def tape(self, dtype: str, batch: int) -> Tape:
        """Return the tape behind the estimate of one dtype and batch size, after `reports` has reached it."""
        return self._traced[dtype].family.evaluate(batch, self._oracle)

    def _in_order(self) -> list[str]:
        """Return the dtypes in the order of tracing: the one in focus first, then those with float32 weights."""
        first = self.request.focus[0] if self.request.focus is not None else self._preferred_dtype()
        return sorted(cheapest_first(self.request.dtypes), key=lambda dtype: dtype != first)

    def _preferred_dtype(self) -> str:
        """Return the dtype to look at first: language models are trained and served in bfloat16."""
        counted, dtypes = self._tracer.counted, self.request.dtypes
        language = counted.sequence_length is not None and counted.image_size is None
        return "bfloat16" if language and "bfloat16" in dtypes else dtypes[0]

    def _first_batch(self, dtype: str, batches: tuple[int, ...]) -> int | None:
        """Return the batch size to trace before the lines over the batch, which use its trace; None to begin with them.

        It is 1, or the smallest of a generation, since its line is checked there.
        """
        if 1 not in batches and not MODES[self.request.mode].generates:
            return None
        first = min(batches)
        return first if self.request.focus in (None, (dtype, first)) else None

    def _begin(self, dtype: str, first: int, batches: tuple[int, ...]) -> Traced | None:
        """Return the tape at the first batch size. It is the only one if 1 is all that was requested and will not fit."""
        gradients = MODES[self.request.mode].trains and self.request.train == "all"
        least_bytes = self._weights_bytes(dtype) * (2 if gradients else 1)
        ends = batches == (1,) and self.request.dtypes == (dtype,) and least_bytes > self.gpu.total_bytes
        return self._tracer.begin(dtype, first, ends=ends)

    def _weights_bytes(self, dtype: str) -> int:
        """Return the bytes of the parameters in a dtype, unsharded and unquantized."""
        return self._tracer.counted.census.parameters * (2 if dtype in ("bfloat16", "float16") else 4)

    def _is_answered_by_one(self, dtype: str, batches: tuple[int, ...]) -> bool:
        """Return True if a batch of 1 is all that was requested, and does not fit: a line over the batch adds nothing then."""
        fits = [row.fits for row in self._columns[dtype].estimates]  # none if it cannot be replayed
        return batches == (1,) and self.request.dtypes == (dtype,) and fits == [False]

    def _ends_with_two(self, dtype: str, begun: Traced, batches: tuple[int, ...]) -> bool:
        """Return True if neither of the first two batch sizes fits, which ends the dtype, and add the second one.

        A line over the batch adds nothing then.
        """
        fits = [row.fits for row in self._columns[dtype].estimates]
        is_alone = self.request.dtypes == (dtype,) and not MODES[self.request.mode].generates
        ends = self._stops and is_alone and len(batches) > 1 and [1, *batches[1:]] == sorted(batches)
        if not ends or fits != [False] or (both := self._tracer.add_batch(dtype, begun, batches[1])) is None:
            return False
        *_, column = self._cells(dtype, both, batches[:2])
        if [row.fits for row in column.estimates] != [False, False]:
            return False
        self._traced[dtype] = both
        self._columns[dtype] = replace(column, max_batch=no_batch(dtype, self.gpu, 1))
        return True

    def _cells(self, dtype: str, traced: Traced, batches: tuple[int, ...]) -> Iterator[Column]:
        """Yield the batch sizes of a dtype as they come; float16 reuses bfloat16's results if both share tapes."""
        if self._is_like_bfloat16(dtype):
            yield self._columns["bfloat16"].with_dtype(dtype)
            return
        yield from read_cells(
            traced.family,
            batches,
            dtype=dtype,
            gpu=self.gpu,
            mode=self.request.mode,
            oracle=self._oracle,
            expandable_segments=self.request.expandable_segments,
            first=self._looked_at_first(dtype, traced, batches),
            replays=self._tracer.replays,
            passes=self.request.accumulate,
            stops=self._stops,
        )

    def _find_largest(self, dtype: str) -> None:
        """Add the largest batch size that fits to the column of a dtype."""
        if self._is_like_bfloat16(dtype):
            self._columns[dtype] = self._columns["bfloat16"].with_dtype(dtype)
            return
        self._columns[dtype] = with_largest(
            self._columns[dtype],
            self._traced[dtype].family,
            dtype=dtype,
            gpu=self.gpu,
            oracle=self._oracle,
            oracle_name=answers_of(self.gpu),
            expandable_segments=self.request.expandable_segments,
            replays=self._tracer.replays,
        )

    def _is_like_bfloat16(self, dtype: str) -> bool:
        """Return True for float16 if it has the tapes of bfloat16, and bfloat16's column is there."""
        there = dtype == "float16" and "bfloat16" in self._columns
        return there and self._traced[dtype].family is self._traced["bfloat16"].family

    def _looked_at_first(self, dtype: str, traced: Traced, batches: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch sizes of a dtype to look at first: the one in focus, which may have to be found."""
        if (focus := self.request.focus) is not None:
            return (focus[1],) if focus[0] == dtype and focus[1] in batches else ()
        others = self._columns.keys() - {dtype}
        return () if others else likely_largest(traced.family, batches, self.gpu, self._oracle)

    def _possible_batches(self) -> tuple[int, ...]:
        """Return the requested batch sizes, without 1 if the model refuses it. Raises the model's RequestError if none is left."""
        batches = self.request.batches
        if self._tracer.counted.smallest == 1:
            return batches
        left = tuple(batch for batch in batches if batch != 1)
        if not left:
            self._tracer.check_batch_of_one()
        return left

    def _report(self, pending: tuple[str, ...] | list[str]) -> Report:
        request, counted, device = self.request, self._tracer.counted, self._tracer.device()
        if not pending:
            self._progress("putting the report together")
        traced = {dtype: self._traced[dtype] for dtype in request.dtypes if dtype in self._traced}
        columns = {dtype: self._columns[dtype] for dtype in request.dtypes if dtype in self._columns}
        kv_caches = () if pending else self._kv_caches(columns)
        focus = self._focus(columns)
        notes = [f"{dtype}: {one.note}" for dtype, one in traced.items() if one.note]
        notes += [f"{dtype}: {traced[dtype].failure}" for dtype in columns if self._is_cut_short(traced[dtype])]
        if counted.smallest > 1 and 1 in request.batches:
            notes.insert(0, f"batch 1 is left out: {counted.refusal}")
        notes += self._left_out.values()
        for dtype, column in columns.items():
            if left := self._left_out_of(column, self._possible_batches()):
                notes.append(f"{dtype}: batch {', '.join(map(str, left))} not computed: two smaller batch sizes do not fit")
        return build_report(
            query=format_query(replace(request, focus=None), complete=True),
            versions=self._versions,
            census=counted.census,
            columns=columns,
            gpu=self.gpu,
            mode=request.mode,
            request={
                **_echo(request),
                "dtypes": tuple(dtype for dtype in request.dtypes if dtype not in self._left_out),
                "sequence_length": counted.sequence_length,
                "image_size": counted.image_size,
                "frames": counted.frames,
            },
            focus=focus,
            pending=pending,
            failures={
                dtype: one.failure
                for dtype, one in traced.items()
                if dtype not in columns and dtype not in self._left_out
            },
            notes=(*counted.notes, *notes),
            cautions=(
                *of_each_rank(request),
                *of_server(request, self.gpu),
                *cautions(device, self.gpu, self._tracer.installed.built_for),
                *self._tracer.loaded.cautions,
                *on_the_host(request, kv_caches),
            ),
            target=target(device),
            assumptions=tuple(dict.fromkeys(str(kernel) for one in traced.values() for kernel in one.kernels)),
            uncounted=(*counted.uncounted, *self._unanswered(traced)),
            explanation=None if pending else self._explain(traced),
            formulas=self._formulas,
            kv_caches=kv_caches,
            loop=() if pending or focus is None else self._loop(focus),
            compiled=merge_compiled(one.compiled for one in traced.values()),
        )

    def _loop(self, focus: Focus) -> Iterator[LoopDecision]:
        """Yield the memory of other training loops at the estimate in focus, or at the request's own focus."""
        request = self.request
        if not MODES[request.mode].trains:
            return
        cells = {(row.dtype, row.batch): row for column in self._columns.values() for row in column.estimates}
        looked_at = request.focus or (focus.dtype, focus.batch)
        estimate = cells.get(looked_at) or cells[focus.dtype, focus.batch]
        yield from loop_decisions(
            self._open_tape(estimate.dtype, estimate.batch),
            estimate,
            self.gpu,
            outputs=request.outputs,
            expandable_segments=request.expandable_segments,
            replays=self._tracer.replays,
        )
        if request.accumulate > 1 and request.pp == 1 and request.objective != GRPO:  # GRPO's trainer accumulates in one way only
            yield from self._accumulation_decisions(estimate)

    def _accumulation_decisions(self, estimate: Estimate) -> Iterator[LoopDecision]:
        """Yield the memory of other ways to accumulate; each is a separate trace."""
        request, dtype, batch = self.request, estimate.dtype, estimate.batch

        def tape(accumulates: str) -> Tape:
            return self._tracer.trace_accumulating(dtype, batch, accumulates).resolve(self._oracle)

        try:
            yield summed_losses(tape(SUMMED), estimate, passes=request.accumulate)
            if PARALLELS[request.parallel].shards:
                expandable = request.expandable_segments
                reserved = peak_reserved_bytes(tape(NO_SYNC), self.gpu.backend, expandable)
                more = reserved - estimate.peak_reserved_bytes
                yield decision("passes are accumulated under no_sync: gradients stay unsharded until the last", more, estimate)
        except TraceError:
            return  # the question's own step was traced: an error of a variant is no part of the answer

    def _open_tape(self, dtype: str, batch: int) -> Tape:
        """Return the tape of an estimate that leaves open whether the loop keeps outputs."""
        if self.request.outputs is None:
            return self.tape(dtype, batch)
        tracer = Tracer(replace(self.request, outputs=None), self.gpu, config=self._config, store=self._store)
        tracer.share_model(self._tracer)
        if self._traced[dtype].family.lines:  # lines are kept, and float16 may use those of bfloat16
            return tracer.trace(dtype, (batch,)).family.evaluate(batch, self._oracle)
        return tracer.trace_cell(dtype, batch).resolve(self._oracle)

    def _is_cut_short(self, traced: Traced) -> bool:
        """Return whether a trace that failed has left some batch sizes without cells, and not all."""
        batches = self._possible_batches()
        return traced.failure != "" and len(traced.family.covered(batches)) < len(batches)

    @cached_property
    def _formulas(self) -> dict[str, Formula]:
        return formulas(self._tracer.device(), self.gpu, texts=self._tracer.installed.texts)

    def _kv_caches(self, columns: Mapping[str, Column]) -> tuple[KvCache, ...]:
        """Return the caches of a generation, by dtype."""
        if not MODES[self.request.mode].generates:
            return ()
        tokens = (
            (self._tracer.counted.sequence_length or 0) + self.request.new - 1
        )  # the last token is not in the cache
        of_dtypes = ((dtype, self._tracer.kv_segments(dtype), column.estimates) for dtype, column in columns.items())
        return tuple(
            build_kv_cache(segments, dtype=dtype, tokens=tokens)
            for dtype, segments, rows in of_dtypes
            if segments and rows
        )

    def _focus(self, columns: Mapping[str, Column]) -> Focus | None:
        """Return the default focus: for a dtype that still grows, its smallest batch size."""
        first = self._preferred_dtype()
        for dtype in sorted(columns, key=lambda dtype: dtype != first):
            rows = columns[dtype].estimates
            if (found := default_focus(rows[:1] if dtype == self._growth else rows)) is not None:
                return found
        return None

    def _explain(self, traced: dict[str, Traced]):
        """Return the kernels and rules behind the tapes; dtypes may share one."""
        request = self.request
        return explain(
            self._tracer.device(),
            traced={dtype: one for dtype, one in traced.items() if dtype in self._columns},
            optimizer=request.optimizer if MODES[request.mode].trains else None,
            implementation=request.optimizer_impl,
            gpu=self.gpu,
            expandable_segments=request.expandable_segments,
            answered=self._answered(),
            texts=self._tracer.installed.texts,
        )

    def _answered(self) -> bool:
        """Return False if cuDNN was queried about convolutions and answered none of the queries."""
        tapes = [column.first for column in self._columns.values() if column.first is not None]
        asked = [(tape, query) for tape in tapes for query in tape.size_queries if query.kind == CUDNN]
        return not asked or any(not tape.resolved.isdisjoint(query.blocks) for tape, query in asked)

    def _unanswered(self, traced: Mapping[str, Traced]) -> tuple[str, ...]:
        """Return a note for convolution workspaces that cuDNN does not size, or an empty tuple."""
        queries = (query for one in traced.values() for tape in one.family.tapes() for query in tape.size_queries)
        answered = self._answered()
        resolved = answered and oracle_name(self.gpu) is not None and without_cublaslt() is None
        return (
            (convolutions(self.gpu, answered=answered),)
            if not resolved and any(query.kind == CUDNN for query in queries)
            else ()
        )


def _echo(request: Request) -> dict[str, object]:
    echo = asdict(request)
    unused: tuple[str, ...] = () if MODES[request.mode].generates else GENERATION_KEYS
    unused = ("cache",) if unused and request.objective == GRPO else unused
    unused += () if request.parallel != "none" else PARALLEL_KEYS
    unused += () if MODES[request.mode].serves else SERVER_FIELDS
    for name in ("config", "focus", *unused):
        echo.pop(name)
    return echo
