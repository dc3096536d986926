"""From a request to its counts and traces. Runs in a separate process, which imports torch if a result is missing.

Counts and traces are cached, if there is a cache, and not repeated: only a replay remains. The traced model is that of
`sizer.estimating.model`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from sizer.architecture.loading import resolve_weights
from sizer.base.errors import Refusal, RequestError, TraceError, quote
from sizer.base.versions import parse_version
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.optimizers import check_installed
from sizer.catalogue.recipes import EACH, FULL, NONE, WITH_REFERENCE, chunks_of, is_contrastive, is_library
from sizer.catalogue.sources import SOURCES, import_function
from sizer.estimating.scopes import choices_of, module_choices_of, module_scope_of, reduce_request, work_scope_of
from sizer.estimating.store import (
    EmptyStore,
    Installed,
    ResultStore,
    ScopedResults,
    StoredTapes,
    keep,
    keep_tape,
    read_tape,
    read_value,
)
from sizer.query.request import Request, check_traced
from sizer.query.values import DTYPES
from sizer.report.census import ArchitectureCounts
from sizer.report.kv_cache import KvSegment
from sizer.report.replays import Replays
from sizer.tape.affine import NotAffineError
from sizer.tape.archive import Traced
from sizer.tape.compiled_code import CompiledCode, merge_compiled
from sizer.tape.family import NotTracedError, TapeFamily
from sizer.tape.loop_choices import with_outputs
from sizer.tape.tape import BlockNotes, Tape
from sizer.tracing.batch_lines import LineFacts, trace_lines
from sizer.tracing.cuda.builds import installed_flags
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name
from sizer.tracing.device import Device
from sizer.tracing.meta.missing_kernels import missing_kernel

if TYPE_CHECKING:  # these import torch, which a replay of kept tapes does without
    from torch import nn

    from sizer.architecture.blueprint import Blueprint
    from sizer.estimating.model import Model, Progress
    from sizer.tracing.steps import Work
    from sizer.tracing.trace import Ends
    from sizer.tracing.traced_rank import StageTraces

BY_ITSELF = "traced separately at each batch size, because "  # begins the note of work that is not affine in the batch


class Tracer:
    """The work of one request on one kind of device, traced when first needed.

    `config` is the parsed config.json for the sources "hub" and "config". `request` is the given one with its resolved weights
    on the device, which `loaded` describes.
    """

    def __init__(
        self,
        request: Request,
        gpu: Gpu,
        *,
        config: dict | None = None,
        store: ResultStore | None = None,
        progress: Progress | None = None,
    ) -> None:
        check_traced(request)
        if MODES[request.mode].trains:
            check_installed(request.optimizer)
        self.loaded = resolve_weights(request, gpu, config)
        self.request, self.gpu = reduce_request(self.loaded.request), gpu
        store = EmptyStore() if store is None else store
        self._store = ScopedResults(store, work_scope_of(request))
        self._source, self._config = SOURCES[request.source], config
        self._of_module = ScopedResults(store, module_scope_of(request))
        self._progress = progress or (lambda text: None)
        self._module_choices, self._unpacked = module_choices_of(self.request), dict[str, Traced]()
        self._lender: Tracer | None = None  # one with the same model
        self._alike: Tracer | None = None  # one of the same work on devices of other rules
        self._line_facts = LineFacts()
        self._choices = choices_of(self.request)
        self._tapes = StoredTapes(self._store, self.request, self.device(), self._unpacked)
        self._begun: dict[str, tuple[Device, Tape]] = {}  # by dtype, the tape of `begin`
        self._whole: dict[str, dict[int, Tape]] = {}  # by dtype and batch size, tapes traced on the same device after it

    @cached_property
    def _model(self) -> Model:
        if self._lender is not None:
            return self._lender._model
        from sizer.estimating.model import Model

        return Model(
            self.request, self.loaded, self.device(), config=self._config, store=self._of_module, progress=self._progress
        )

    @cached_property
    def _stages(self) -> StageTraces:
        from sizer.tracing.traced_rank import StageTraces

        return StageTraces()

    def share_model(self, other: Tracer) -> bool:
        """Use another tracer's model, and its findings, if this one's would be equal. Return whether it did."""
        if self._module_choices != other._module_choices:
            return False
        self._lender, self._tapes.unpacked = other, other._tapes.unpacked
        if self._choices == other._choices:
            self._alike, self._line_facts = other, other._line_facts
        return True

    def device(self, *, shared: bool = False) -> Device:
        """Return the facts of the device, for the traces of one dtype; devices of other capabilities may share them."""
        version = None if self.request.torch is None else parse_version(self.request.torch)
        answers_for = self.gpu if self.request.compile is not None or self.request.liger or self.request.fla else None
        # stages are compared by their bytes, and packages read the capability by themselves
        shared = shared and not self._compares_stages and answers_for is None
        shared = shared and not self._calls_library
        return Device(
            self.gpu.backend, self.gpu.capability, version=version, shared=shared, answers_for=answers_for
        )

    @cached_property
    def installed(self) -> Installed:
        """Return the facts of the installed PyTorch that answers on this kind of device need."""
        device = self.device()
        name = f"installed {device.kind} {'.'.join(map(str, device.version))}"
        if (found := read_value(self._of_module, name, Installed, "installed")) is None:
            from sizer.tracing.rule_texts import read_rule_texts

            found = Installed(texts=read_rule_texts(device), built_for=installed_flags())
            keep(self._of_module, name, found)
        return found

    @cached_property
    def counted(self) -> ArchitectureCounts:
        """The counts. Raises RequestError, ConfigError and BuildError."""
        if self._alike is not None:
            return self._alike.counted
        name = f"counted {self._choices}"
        if (counted := read_value(self._store, name, ArchitectureCounts, "counted")) is None:
            counted = self._count_parts() if self.request.is_pipeline else self._model.count(self.request)
            keep(self._store, name, counted)
        return counted

    def _count_parts(self) -> ArchitectureCounts:
        """Return the counts of a source with work of several modules."""
        self._progress("building the pipeline on meta")
        assert self._source.count is not None, "pipelines have separate functions"
        census, notes, sizes = import_function(self._source.count)(self.request, self._config)
        return ArchitectureCounts(census=census, notes=notes, uncounted=(), sequence_length=self.request.sequence_length, **sizes)

    @cached_property
    def replays(self) -> Replays:
        """Return the results of replays of this work's tapes.

        Devices of other rules share them, but they are stored by the rules of each.
        """
        return Replays(self._store.get(self._replayed), shared=None if self._alike is None else self._alike.replays)

    def keep_replays(self) -> None:
        """Store the results of replays."""
        if (packed := self.replays.pack()) is not None:
            self._store.put(self._replayed, packed)

    @property
    def _replayed(self) -> str:
        """Return the cache name of replays. Jobs on devices of other rules, which may run at the same time, have other names."""
        return f"replayed {self.gpu.backend} {self.gpu.capability} {self._choices}"

    def trace(self, dtype: str, batches: Collection[int]) -> Traced:
        """Return the tapes of one dtype at every batch size; if the work is not affine in it, at the requested ones."""
        *_, whole = self.traces(dtype, batches)
        return whole

    def traces(self, dtype: str, batches: Collection[int]) -> Iterator[Traced]:
        """Yield partial results of `trace`, one per batch size in the given order, if each is traced separately."""
        if dtype == "float16" and self._may_stand_in() and (stand_in := self._stand_in(batches)) is not None:
            yield stand_in
            return
        known = self._tapes.find(dtype)
        if known is not None and _covers(known, batches):
            yield self._tapes.sized(known)
            return
        for traced in self._trace(dtype, batches, known or Traced()):
            self._tapes.keep(dtype, traced)
            yield self._tapes.sized(traced)

    def begin(self, dtype: str, batch: int, *, ends: bool) -> Traced | None:
        """Return the tape at one batch size, before `trace` continues from it.

        None if something is cached, or it cannot be traced there. With `ends` it probably is the only trace.
        """
        if self.counted.smallest > batch or self._tapes.find(dtype) is not None:
            return None
        if dtype == "float16" and self._may_stand_in():
            return None
        if (alone := self._tapes.find(dtype, at_batch=batch)) is not None and not alone.failure:
            return self._tapes.sized(alone)
        device = self.device(shared=True)
        try:
            tape = self._run(dtype, batch, device, alone=ends)
        except TraceError:
            return None  # `trace` says why
        self._begun[dtype] = device, tape
        return self._tapes.sized(_alone(device, tape))

    def add_batch(self, dtype: str, begun: Traced, batch: int) -> Traced | None:
        """Return the result of `begin` with the tape at a second batch size.

        None if it cannot be traced there, or if `trace` traces each batch size separately and gives the reason.
        """
        if self._reason_without_line():
            return None
        alone = self._tapes.find(dtype, at_batch=batch)
        if alone is None:
            device, _ = self._begun.get(dtype) or (self.device(shared=True), None)
            try:
                tape = self._run(dtype, batch, device)
            except TraceError:
                return None  # `trace` says why
            alone = _alone(device, tape)
            self._tapes.keep(dtype, alone, at_batch=batch)
            if dtype in self._begun:
                self._whole.setdefault(dtype, {})[batch] = tape
        if alone.failure:
            return None
        alone = self._tapes.sized(alone)
        return replace(
            alone,
            family=TapeFamily(exact=(*begun.family.exact, *alone.family.exact)),
            kernels=tuple(dict.fromkeys((*begun.kernels, *alone.kernels))),
            halves_differ=begun.halves_differ or alone.halves_differ,
            decisions=tuple(dict.fromkeys((*begun.decisions, *alone.decisions))),
            compiled=merge_compiled((begun.compiled, alone.compiled)),
        )

    def keep_begun(self, dtype: str) -> None:
        """Keep the tape of `begin` if no other one is traced."""
        if (begun := self._begun.get(dtype)) is not None:
            self._tapes.keep(dtype, _alone(*begun), at_batch=begun[1].batch)

    def trace_cell(self, dtype: str, batch: int) -> Tape:
        """Return the tape at one batch size with unresolved size queries; it is traced separately if no line is cached.

        Raises TraceError if the step cannot be traced.
        """
        found = self._tapes.find(dtype)
        if found is not None and _covers(found, (batch,)):
            try:
                return self._tapes.sized(found).family.evaluate(batch)
            except NotTracedError:
                check_kernels(found.failure, dtype)
                raise TraceError(found.failure) from None
            except ValueError as error:  # so large that no integer of 64 bits holds its bytes
                raise TraceError(str(error)) from error
        alone = self._tapes.find(dtype, at_batch=batch)
        if alone is None:
            device = self.device(shared=True)
            try:
                tape = self._run(dtype, batch, device)
                alone = _alone(device, tape)
                if batch == 1:
                    self._begun[dtype] = device, tape
            except TraceError as error:
                alone = _alone(device, failure=str(error))
            self._tapes.keep(dtype, alone, at_batch=batch)
        if alone.failure:
            check_kernels(alone.failure, dtype)
            raise TraceError(alone.failure)
        return self._tapes.sized(alone).family.evaluate(batch)

    def compiled(self, dtype: str, batch: int) -> CompiledCode | None:
        """Return the result of torch.compile for a traced cell; None if nothing was compiled or cached."""
        found = self._tapes.find(dtype) or self._tapes.find(dtype, at_batch=batch)
        return None if found is None else found.compiled

    def trace_noted(self, dtype: str, batch: int) -> tuple[Tape, BlockNotes]:
        """Return the tape at one batch size with unresolved size queries and notes on its blocks: always a new trace.

        Raises TraceError if the step cannot be traced.
        """
        notes = BlockNotes()
        tape = self._run(dtype, batch, self.device(), block_notes=notes)
        tape, moved_to = with_outputs(tape, self.request.outputs)
        return tape, replace(notes, ends=[(moved_to(position), phase) for position, phase in notes.ends])

    def trace_accumulating(self, dtype: str, batch: int, accumulates: str) -> Tape:
        """Return the tape at one batch size of a step that accumulates its passes in another way, one of ACCUMULATES.

        Its size queries are not resolved. Raises TraceError if it cannot be traced.
        """
        name = f"{self._tapes.name(dtype, at_batch=batch)} accumulates {accumulates}"
        if (tape := read_tape(self._store, name)) is None:
            tape = self._run(dtype, batch, self.device(), accumulates=accumulates)
            keep_tape(self._store, name, tape)
        return tape

    def kv_segments(self, dtype: str) -> tuple[KvSegment, ...]:
        """Return the bytes of one sequence's cache by its length.

        Empty if its generation cannot be traced, or is of more than text.
        """
        name = f"kv cache {self._tapes.name(dtype)}"
        if (found := read_value(self._store, name, tuple[KvSegment, ...], "segments")) is not None:
            return found
        self._progress(f"tracing the cache in {dtype}")
        try:
            module, loading = self._model.built(dtype)
            from sizer.estimating.work import work_of
            from sizer.tracing.cache_growth import (
                trace_kv_cache,  # imports transformers, which other work does not need
            )

            work = work_of(self.request, dtype)
            repeated = self._model.repeated
            found = trace_kv_cache(
                self._model.blueprint, module, work, device=self.device(), loading=loading, repeated=repeated
            )
        except TraceError:  # the estimate of the dtype says why
            found = ()
        keep(self._store, name, found)
        return found

    def built(self) -> tuple[Blueprint, nn.Module]:
        """Return the traced architecture: its blueprint, and its module on meta."""
        return self._model.blueprint, self._model.module(self.request.dtypes[0])

    def check_batch_of_one(self) -> None:
        """Raise RequestError if the model refuses a batch of one, as `Model.check_batch_of_one`."""
        self._model.check_batch_of_one(self.request.mode)

    def _run(
        self,
        dtype: str,
        batch: int,
        device: Device,
        *,
        short: Ends = False,
        alone: bool = False,
        block_notes: BlockNotes | None = None,
        accumulates: str = EACH,
    ) -> Tape:
        if self.request.is_pipeline:
            self._progress(f"tracing {dtype} at batch {batch}")
            assert self._source.trace is not None, "pipelines have separate functions"
            run = import_function(self._source.trace)
            return run(self.request, self._config, dtype, batch, device, gpu=self.gpu, block_notes=block_notes)
        from sizer.estimating.work import work_of
        from sizer.tracing.depth import TRACES
        from sizer.tracing.trace import trace

        work = replace(work_of(self.request, dtype), accumulates=accumulates)
        blueprint, (module, loading) = self._model.blueprint, self._model.built(dtype)
        self._progress(f"tracing {dtype} at batch {batch}")
        settings: dict[str, Any] = {"batch": batch, "device": device, "loading": loading}
        if self._compares_stages:
            return self._run_stages(dtype, batch, device, block_notes)
        if MODES[self.request.mode].generates:
            from sizer.tracing.generation import trace_generation, trace_noted_generation  # import transformers

            if block_notes is not None:
                return trace_noted_generation(blueprint, module, work, **settings, block_notes=block_notes)
            return trace_generation(blueprint, module, work, **settings, deep=self._model.deep_traces(work.plan))

        at = partial(trace, blueprint, module, work, **settings, short=bool(short), block_notes=block_notes)
        if work.rolls_out:
            from sizer.tracing.rollouts import trace_rollouts  # imports transformers

            noted = block_notes is not None
            return trace_rollouts(
                at, module, blueprint.sequence_length or 1, work.new, backend=device.kind, noted=noted
            )
        # the compiler may decide otherwise in a model with fewer layers
        whole = partial(at, short=short)
        if block_notes is not None or work.compile_scope is not None:
            return whole()
        deep = self._model.deep_traces(work.plan)
        return deep.trace(module, at, device, traces=1 if alone else TRACES, whole=whole)

    @property
    def _calls_library(self) -> bool:
        from sizer.estimating.work import work_of

        return self.request.fla or is_library(work_of(self.request, "").library)

    @property
    def _compares_stages(self) -> bool:
        return self.request.pp > 1 and self.request.rank is None

    def _run_stages(self, dtype: str, batch: int, device: Device, block_notes: BlockNotes | None) -> Tape:
        """Return the tape of the pipeline rank with the most memory."""
        from sizer.estimating.work import work_of
        from sizer.tracing.trace import trace

        blueprint, module = self._model.blueprint, self._model.module(dtype)

        def at(work: Work, *, block_notes: BlockNotes | None = None) -> Tape:
            assert work.plan is not None, "ranks have a plan"
            self._progress(f"tracing {dtype} at batch {batch}, rank {work.plan.rank}")
            return trace(blueprint, module, work, batch=batch, device=device, block_notes=block_notes)

        return self._stages.trace(at, work_of(self.request, dtype), module, batch, block_notes)

    def _trace(self, dtype: str, batches: Collection[int], before: Traced) -> Iterator[Traced]:
        device, begun = self._begun.pop(dtype, None) or (self.device(shared=True), None)
        whole = {} if begun is None else self._whole.pop(dtype, {})
        # neither an evaluation nor a generation repeats a training step
        repeats = self.request.evaluate == NONE and not MODES[self.request.mode].generates

        def at(batch: int, *, short: Ends = False) -> Tape:
            return self._run(dtype, batch, device, short=short)

        def traced(family: TapeFamily, *, failure: str = "", note: str = "") -> Traced:
            return Traced(
                family=family,
                failure=failure,
                note=note,
                kernels=device.kernels(),
                halves_differ=device.halves_differ,
                decisions=tuple(dict.fromkeys((*before.decisions, *device.decisions()))),
                compiled=merge_compiled((before.compiled, device.compiled())),
            )

        try:
            if reason := self._reason_without_line():
                raise NotAffineError(reason)
            if before.note.startswith(BY_ITSELF):
                raise NotAffineError(before.note.removeprefix(BY_ITSELF))
            smallest, known = self.counted.smallest, self._line_facts
            if known.on_no_line:
                raise NotAffineError(known.on_no_line)
            known.has_samples_apart |= self._model.blueprint.one_by_one
            yield traced(
                trace_lines(
                    at, batches, device, smallest=smallest, begun=begun, known=known, whole=whole, repeats=repeats
                )
            )
        except NotAffineError as error:
            note = f"{BY_ITSELF}{error}"
            if len({len(tape.order) for tape in whole.values()}) > 1:
                self._line_facts.on_no_line = str(error)  # events come and go with the batch
            exact = {tape.batch: tape for tape in (*before.family.exact, *([begun] if begun else []))}
            for batch in batches:
                try:
                    exact[batch] = exact.get(batch) or whole.get(batch) or at(batch)
                except TraceError as missing:
                    yield traced(TapeFamily(exact=tuple(exact.values())), failure=str(missing), note=note)
                    return
                whose = self._stages.whose(dtype, batches)
                yield traced(TapeFamily(exact=tuple(exact.values())), note=note + whose)
        except TraceError as error:
            failure, family = str(error), TapeFamily()
            if tuple(batches) == (1,):
                try:
                    family = TapeFamily(exact=(begun or at(1),))  # of a model that takes one sample at a time
                except TraceError as missing:
                    failure = str(missing)
            yield traced(family, failure=failure)

    def _reason_without_line(self) -> str:
        """Return why the request's work has no line over the batch size, for any model; empty if it may have one."""
        request = self.request
        if request.is_pipeline:
            return "a pipeline's call is traced completely"
        if request.compile is not None:
            return "torch.compile decides by the sizes of tensors"
        if request.pp > 1:
            return "a schedule has other steps with more microbatches"
        if is_contrastive(request.objective):
            return "each text is compared with all other texts of the batch"
        if request.objective in WITH_REFERENCE or (request.loss != FULL and chunks_of(request.loss) is None):
            return "the loss has more chunks with more tokens"
        return ""

    def _may_stand_in(self) -> bool:
        """Return whether bfloat16 has tapes, or will have, that float16 may share.

        Tensor cores treat both alike since capability 8.0.
        """
        modern = self.gpu.backend == "cuda" and self.gpu.capability is not None and self.gpu.capability >= (8, 0)
        return modern and ("bfloat16" in self.request.dtypes or self._tapes.find("bfloat16") is not None)

    def _stand_in(self, batches: Collection[int]) -> Traced | None:
        """Return bfloat16's tapes if float16 takes the same kernels."""
        brain = self.trace("bfloat16", batches)
        if not brain.family.lines or brain.halves_differ:
            return None
        return brain.with_dtype("float16", instead_of="bfloat16")


def check_kernels(failure: str, dtype: str) -> None:
    """Raise RequestError for the key `dtype` if a trace failed because an operator has no kernel for it."""
    if (missing := missing_kernel(failure)) is None:
        return
    todo = f"remove it, or ask for float32 or amp-{dtype.removeprefix('amp-')}"
    refusal = Refusal(key="dtype", given=quote(dtype), allowed=f"dtypes with a kernel: {missing}", todo=todo)
    raise RequestError(refusals=[refusal])


def answers_of(gpu: Gpu) -> str:
    """Return the source of the size oracle's answers for a GPU in this process, and why some are missing, in words."""
    name = oracle_name(gpu)
    return f"{name}, {without_cublaslt() or 'all of them'}" if name else "models"


def _alone(device: Device, tape: Tape | None = None, *, failure: str = "") -> Traced:
    """Return a trace at one batch size alone on a device, or why there is none."""
    return Traced(
        family=TapeFamily() if tape is None else TapeFamily(exact=(tape,)),
        failure=failure,
        kernels=device.kernels(),
        decisions=device.decisions(),
        compiled=device.compiled(),
    )


def _covers(traced: Traced, batches: Collection[int]) -> bool:
    """Return True if nothing is left to trace for these batch sizes."""
    there = traced.family.covered(batches)
    return there == tuple(batches) or bool(traced.failure and tuple(batches) != (1,))


def cheapest_first(dtypes: Collection[str]) -> list[str]:
    """Return the dtypes with float32 weights first: the module is cast in place and back only once."""
    return sorted(dtypes, key=lambda d: (not (d == "float32" or d.startswith("amp-")), d == "float16", DTYPES.index(d)))
