"""From a request to what is counted and traced of it. Imports torch; runs in a process of its own.

What was counted or traced once is kept, where there is somewhere to keep it, and not done again: all that is left is a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import nn

from sizer.architecture import make_blueprint
from sizer.architecture.blueprint import Blueprint
from sizer.architecture.census import take_census
from sizer.architecture.loaded import as_loaded
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.distributed.sharding import check_plan
from sizer.errors import RequestError, TraceError
from sizer.kept import Kept, KeptTapes, NothingKept, choices_of, keep, keep_depths, read_depths, read_kept
from sizer.memory.affine import NotAffineError
from sizer.memory.archive import Traced
from sizer.memory.block_notes import BlockNotes
from sizer.memory.census import Census
from sizer.memory.family import TapeFamily
from sizer.memory.kv_cache import KvSegment
from sizer.memory.replays import Replays
from sizer.memory.tape import Tape
from sizer.query_values import DTYPES
from sizer.request import Request
from sizer.tracing.batch_lines import FITTED_AT, trace_lines
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name
from sizer.tracing.depth import DeepTraces, Repeated, find_repeated
from sizer.tracing.device import Device
from sizer.tracing.generation import trace_generation, trace_noted_generation
from sizer.tracing.kv_cache import trace_kv_cache
from sizer.tracing.loading import Loading
from sizer.tracing.stages import StageTraces
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, build_loaded, trace
from sizer.versions import parse_version
from sizer.work import as_traced, plan_of, work_of

COUNTED_IN = "bfloat16"  # the dtype in which quantised modules are counted, whose other weights are of the dtype that is asked for

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What is known of an architecture before its steps are traced.

    `smallest` is the smallest batch size that it takes, `refusal` why that is not 1. The other fields are the Blueprint's.
    """

    census: Census
    sequence_length: int | None
    image_size: tuple[int, int] | None
    notes: tuple[str, ...]
    uncounted: tuple[str, ...]
    smallest: int = 1
    refusal: str = ""


class Tracer:
    """The architecture and work of one request on one kind of device, built and traced when first needed.

    `config` is the parsed config.json for the sources "hub" and "config". The module is built once for all dtypes. `request` is the
    one that was asked for with the weights that it comes to on the device, of which `loaded` tells.
    """

    def __init__(
        self,
        request: Request,
        gpu: Gpu,
        *,
        config: dict | None = None,
        kept: Kept | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.loaded = as_loaded(request, gpu, config)
        self.request, self.gpu = as_traced(self.loaded.request), gpu
        self._config = config
        self._kept = NothingKept() if kept is None else kept
        self._progress = progress or (lambda text: None)
        self._exceptional: dict[str, bool] = {}  # by kind of device, whether batch 1 is off the line, once known
        self._choices = choices_of(self.request)
        self._tapes = KeptTapes(self._kept, self.request, self.device(), {})
        self._begun: dict[str, tuple[Device, Tape]] = {}  # by dtype, the tape at batch 1 that came before the others
        self._modules: dict[str, tuple[nn.Module, Loading | None]] = {}
        self._deep_traces: dict[tuple, DeepTraces] = {}  # by how the module is spread over ranks
        self._lender: Tracer | None = None
        self._stages = StageTraces()

    def device(self, *, shared: bool = False) -> Device:
        """The facts of the device, for the traces of one dtype, which devices of other capabilities may share."""
        version = self.request.torch and parse_version(self.request.torch)
        shared = shared and not self._compares_stages  # stages are compared by their bytes
        return Device(self.gpu.backend, self.gpu.capability, version=version, shared=shared)

    @cached_property
    def counted(self) -> Counted:
        """The counts. Raises RequestError, ConfigError and BuildError."""
        if self._lender is not None and self._choices == self._lender._choices:
            return self._lender.counted
        name = f"counted {self._choices}"
        if (counted := read_kept(self._kept, name, Counted, "counted")) is None:
            counted = self._count()
            keep(self._kept, name, counted)
        return counted

    @cached_property
    def replays(self) -> Replays:
        """What was found by replays of this work's tapes; devices of other rules share it, but it is kept by the rules of each."""
        alike = self._lender is not None and self._choices == self._lender._choices
        return Replays(self._kept.get(self._replayed), shared=self._lender.replays if alike else None)

    def keep_replays(self) -> None:
        """Keep what was replayed."""
        if (packed := self.replays.pack()) is not None:
            self._kept.put(self._replayed, packed)

    @property
    def _replayed(self) -> str:
        """What replays are kept under: jobs on devices of other rules, which may run beside this one, keep theirs apart."""
        return f"replayed {self.gpu.backend} {self.gpu.capability} {self._choices}"

    def trace(self, dtype: str, batches: Collection[int]) -> Traced:
        """The tapes of one dtype at every batch size; where the work is not affine in it, at those that were asked for."""
        if dtype == "float16" and (stand_in := self._stand_in(batches)) is not None:
            return stand_in
        found = self._tapes.find(dtype)
        if found is None or not _covers(found, batches):
            found = self._trace(dtype, batches, found or Traced())
            self._tapes.keep(dtype, found)
        return self._tapes.sized(found)

    def begin(self, dtype: str) -> Traced | None:
        """The tape at batch 1, before `trace` goes on from it; None where something is kept, or it cannot be traced there."""
        if dtype == "float16" or self.counted.smallest > 1 or self._tapes.find(dtype) is not None:
            return None  # float16 may have bfloat16's tapes
        device = self.device(shared=True)
        try:
            tape = self._run(dtype, 1, device)
        except TraceError:
            return None  # `trace` says why
        self._begun[dtype] = device, tape
        return self._tapes.sized(Traced(family=TapeFamily(exact=(tape,)), kernels=device.kernels()))

    def trace_cell(self, dtype: str, batch: int) -> Tape:
        """The tape at one batch size, its size queries not resolved: traced there alone where no line is kept.

        Raises TraceError where the step cannot be traced.
        """
        found = self._tapes.find(dtype)
        if found is not None and _covers(found, (batch,)):
            if found.failure:
                raise TraceError(found.failure)
            try:
                return self._tapes.sized(found).family.at(batch)
            except ValueError as error:  # so large that no integer of 64 bits holds its bytes
                raise TraceError(str(error)) from error
        alone = self._tapes.find(dtype, at_batch=batch)
        if alone is None:
            device = self.device(shared=True)
            try:
                tape = self._run(dtype, batch, device)
                family, failure = TapeFamily(exact=(tape,)), ""
                if batch == 1:
                    self._begun[dtype] = device, tape
            except TraceError as error:
                family, failure = TapeFamily(), str(error)
            alone = Traced(family=family, failure=failure, kernels=device.kernels(), decisions=device.decisions())
            self._tapes.keep(dtype, alone, at_batch=batch)
        if alone.failure:
            raise TraceError(alone.failure)
        return self._tapes.sized(alone).family.at(batch)

    def trace_noted(self, dtype: str, batch: int) -> tuple[Tape, BlockNotes]:
        """The tape at one batch size, its size queries not resolved, with what it does not hold of its blocks: always a new trace.

        Raises TraceError where the step cannot be traced.
        """
        notes = BlockNotes()
        return self._run(dtype, batch, self.device(), block_notes=notes), notes

    def kv_segments(self, dtype: str) -> tuple[KvSegment, ...]:
        """What one sequence's cache holds by its length; empty where its generation cannot be traced, or is of more than text."""
        name = f"kv cache {self._tapes.name(dtype)}"
        if (found := read_kept(self._kept, name, tuple[KvSegment, ...], "segments")) is not None:
            return found
        self._progress(f"tracing the cache in {dtype}")
        try:
            found = trace_kv_cache(
                self._blueprint,
                self._module(dtype),
                work_of(self.request, dtype),
                device=self.device(),
                loading=self._loading(dtype),
            )
        except TraceError:  # the estimate of the dtype says why
            found = ()
        keep(self._kept, name, found)
        return found

    def built(self) -> tuple[Blueprint, nn.Module]:
        """The architecture as it is traced: its blueprint, and its module on meta."""
        return self._blueprint, self._module(self.request.dtypes[0])

    def shares_module(self, other: Tracer) -> bool:
        """Whether another tracer's module is the one that this one would build."""
        return self._module_choices == other._module_choices

    @property
    def _module_choices(self) -> str:
        """What the module depends on."""
        same = ("source", "name", "revision", "config", "head", "attention", "checkpointing")
        sizes = ("mode", "sequence_length", "image_size")
        adapters = (
            "weights",
            "train",
            "adapter",
            "adapter_rank",
            "adapter_alpha",
            "adapter_targets",
            "adapter_dropout",
        )
        names = (*same, *sizes, *adapters)
        return repr([getattr(self.request, name) for name in names])

    def take_module(self, other: Tracer) -> None:
        """Use another tracer's blueprint and module, which it must share, and what it has found out."""
        self._lender, self._tapes.unpacked, self._deep_traces = other, other._tapes.unpacked, other._deep_traces
        if self._choices == other._choices:
            self._exceptional = other._exceptional

    # --------------------------------------------------------------------------------------------- counting and tracing

    @cached_property
    def _blueprint(self) -> Blueprint:
        if self._lender is not None:
            return self._lender._blueprint
        self._progress("building the model on meta")
        return make_blueprint(self.request, self._config, self.loaded)

    def _module(self, dtype: str) -> nn.Module:
        """The module for the traces of a dtype: one for all, unless it is quantised."""
        return self._built(dtype)[0]

    def _loading(self, dtype: str) -> Loading | None:
        """How the module of a dtype was loaded, where it is quantised."""
        return self._built(dtype)[1]

    def _built(self, dtype: str) -> tuple[nn.Module, Loading | None]:
        if self._lender is not None:
            return self._lender._built(dtype)
        blueprint, checkpointing = self._blueprint, self.request.checkpointing
        key = "" if blueprint.replace_layers is None else dtype
        if key not in self._modules:
            if blueprint.replace_layers is None:
                self._modules[key] = build(blueprint, checkpointing=checkpointing), None
            else:
                told = {"device": self.device(), "tell_frozen": self.request.train != "all"}
                self._modules[key] = build_loaded(blueprint, checkpointing=checkpointing, dtype=dtype, **told)
        return self._modules[key]

    def _count(self) -> Counted:
        blueprint, module = self._blueprint, self._module(COUNTED_IN)
        if (plan := plan_of(self.request)) is not None:
            check_plan(module, plan, blueprint.sequence_length)
        counted = Counted(
            census=take_census(module, name=blueprint.name),
            sequence_length=blueprint.sequence_length,
            image_size=blueprint.image_size,
            notes=(*blueprint.notes, *blueprint.describe(module)),
            uncounted=blueprint.uncounted,
        )
        try:
            self.check_batch_of_one()
        except RequestError as error:
            return replace(counted, smallest=FITTED_AT[0], refusal=str(error))
        return counted

    def check_batch_of_one(self) -> None:
        """Raise the model's own RequestError where it refuses a batch of 1 (batch norm over a single value, say)."""
        try:
            self._blueprint.example(1, MODES[self.request.mode].trains)
        except TraceError:
            return  # there are no inputs at all: each dtype's trace says why

    def _run(
        self, dtype: str, batch: int, device: Device, *, short: bool = False, block_notes: BlockNotes | None = None
    ) -> Tape:
        work = work_of(self.request, dtype)
        blueprint, (module, loading) = self._blueprint, self._built(dtype)
        self._progress(f"tracing {dtype} at batch {batch}")
        told = {"batch": batch, "device": device, "loading": loading}
        if self._compares_stages:
            return self._run_stages(dtype, batch, device, block_notes)
        if MODES[self.request.mode].generates and block_notes is not None:
            return trace_noted_generation(blueprint, module, work, **told, block_notes=block_notes)
        if MODES[self.request.mode].generates:
            return trace_generation(blueprint, module, work, **told)

        at = partial(trace, blueprint, module, work, **told, short=short, block_notes=block_notes)
        return at() if block_notes is not None else self._deep().trace(module, at, device)

    @property
    def _compares_stages(self) -> bool:
        return self.request.pp > 1 and self.request.rank is None

    def _run_stages(self, dtype: str, batch: int, device: Device, block_notes: BlockNotes | None) -> Tape:
        """The tape of the rank of a pipeline that needs most."""
        module = self._module(dtype)

        def at(work: Work, **notes: BlockNotes | None) -> Tape:
            self._progress(f"tracing {dtype} at batch {batch}, rank {work.plan.rank}")
            return trace(self._blueprint, module, work, batch=batch, device=device, **notes)

        return self._stages.trace(at, work_of(self.request, dtype), module, batch, block_notes)

    def _deep(self) -> DeepTraces:
        """What traces fewer layers of the module than it has, where that is possible.

        A quantised module was loaded as a whole: whatever its layers, each of its traces begins with all that was loaded. A stage
        of a pipeline has few layers. DDP's buckets, and the parameters that ZeRO-1
        gives each rank, end where they are full, in the middle of layers: those of few layers do not tell where.
        """
        plan = plan_of(self.request)
        kind = () if plan is None else (plan.parallel, plan.tp > 1, plan.sp, plan.lp, plan.cp > 1)
        if kind not in self._deep_traces:
            possible = plan is None or (plan.splits and plan.pp == 1)
            name = f"depths {kind} {self._module_choices}"
            shown, show = read_depths(self._kept, name), partial(keep_depths, self._kept, name)
            self._deep_traces[kind] = DeepTraces(self._repeated if possible else (), shown=shown, show=show)
        return self._deep_traces[kind]

    @cached_property
    def _repeated(self) -> tuple[Repeated, ...]:
        if self._lender is not None:
            return self._lender._repeated
        return find_repeated(self._module(COUNTED_IN))

    def _trace(self, dtype: str, batches: Collection[int], before: Traced) -> Traced:
        device, begun = self._begun.pop(dtype, None) or (self.device(shared=True), None)

        def at(batch: int, *, short: bool = False) -> Tape:
            return self._run(dtype, batch, device, short=short)

        failure = note = ""
        try:
            if self.request.pp > 1:
                raise NotAffineError("a schedule has other steps with more microbatches")
            told = {"begun": begun, "exceptional": self._exceptional}
            family = trace_lines(at, batches, device, smallest=self.counted.smallest, **told)
        except NotAffineError as error:
            note = f"traced at each batch size by itself, because {error}"
            exact = {tape.batch: tape for tape in (*before.family.exact, *([begun] if begun else []))}
            try:
                exact |= {batch: at(batch) for batch in batches if batch not in exact}
            except TraceError as missing:
                failure = str(missing)
            family = TapeFamily(exact=tuple(exact.values()))
            note += self._stages.whose(dtype, batches)
        except TraceError as error:
            failure, family = str(error), TapeFamily()
            if tuple(batches) == (1,):
                try:
                    family = TapeFamily(exact=(begun or at(1),))  # of a model that takes one sample at a time
                except TraceError as missing:
                    failure = str(missing)
        return Traced(
            family=family,
            failure=failure,
            note=note,
            kernels=device.kernels(),
            halves_differ=device.halves_differ,
            decisions=tuple(dict.fromkeys((*before.decisions, *device.decisions()))),
        )

    def _stand_in(self, batches: Collection[int]) -> Traced | None:
        """bfloat16's tapes where float16 takes the same kernels: tensor cores treat them alike since capability 8.0."""
        modern = self.gpu.backend == "cuda" and self.gpu.capability is not None and self.gpu.capability >= (8, 0)
        if not modern or ("bfloat16" not in self.request.dtypes and self._tapes.find("bfloat16") is None):
            return None
        brain = self.trace("bfloat16", batches)
        if not brain.family.lines or brain.halves_differ:
            return None
        return brain.with_dtype("float16", instead_of="bfloat16")


def answers_of(gpu: Gpu) -> str:
    """Whose answers the size oracle of a GPU gives in this process, and why not all of them, in words."""
    name = oracle_name(gpu)
    return f"{name}, {without_cublaslt() or 'all of them'}" if name else "models"


def _covers(traced: Traced, batches: Collection[int]) -> bool:
    """Whether nothing is left to trace for these batch sizes."""
    known = {tape.batch for tape in traced.family.exact}
    return bool(traced.family.lines) or known.issuperset(batches) or bool(traced.failure and tuple(batches) != (1,))


def cheapest_first(dtypes: Collection[str]) -> list[str]:
    """The dtypes with float32 weights first: the module is cast in place and back only once."""
    return sorted(dtypes, key=lambda d: (not (d == "float32" or d.startswith("amp-")), d == "float16", DTYPES.index(d)))
