"""The estimate: request → blueprint → census and tapes → report. Imports torch; runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version

from torch import nn

from sizer import versions as pytorch
from sizer.architecture import make_blueprint
from sizer.architecture.blueprint import Blueprint
from sizer.architecture.census import take_census
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.sources import offered_sources
from sizer.errors import RequestError, TraceError
from sizer.memory.affine import AffineTape, NotAffineError, fit_affine
from sizer.memory.explanation import Explanation
from sizer.memory.family import TapeFamily
from sizer.memory.report import Report, build_report
from sizer.memory.size_queries import SizeOracle
from sizer.memory.tape import Tape
from sizer.request import Request, format_query
from sizer.tracing.cuda import builds
from sizer.tracing.cuda.convolution import CUDNN
from sizer.tracing.cuda.cudnn_convolution import without_cublaslt
from sizer.tracing.cuda.size_oracle import oracle_name, size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.explain import convolutions, explain, formulas
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace

FITTED_AT = (2, 3)  # batch sizes of the two traces that an affine tape is made from; 1 has special cases
CHECKED_AT = (
    5  # batch size that checks the line where 1 is off it; checked for one dtype, since order is the architecture's
)

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Job:
    """One request on its way: what every dtype shares."""

    request: Request
    blueprint: Blueprint
    module: nn.Module
    gpu: Gpu
    device: Device
    progress: Progress
    oracle: SizeOracle | None
    exceptional: bool | None = None  # whether batch 1 is off the line, once known
    one_is_possible: bool = True
    same: dict[str, str] = field(default_factory=dict)  # dtypes that are not traced, and those that stand for them


def estimate(
    request: Request, *, config: dict | None = None, gpu: Gpu | None = None, progress: Progress | None = None
) -> Report:
    """The report (bytes) of a request: every dtype and batch size that it asks for.

    `config` is the parsed config.json for the sources "hub" and "config", `gpu` a device to estimate for in the place of the
    request's. Raises RequestError, ConfigError and BuildError. A step that cannot be traced is not an error here: the report
    then holds the counts and says why in `failures`.
    """
    return _answer(request, config, gpu or find_gpu(request.gpu), progress or (lambda text: None))[0]


def estimate_cell(
    request: Request, *, config: dict | None = None, gpu: Gpu, progress: Progress | None = None
) -> tuple[Report, Tape]:
    """The report (bytes) of a request for one dtype and one batch size, and the tape that it was made from.

    Raises what `estimate` raises, and TraceError where the step cannot be traced.
    """
    report, tapes = _answer(request, config, gpu, progress or (lambda text: None))
    (dtype,), (batch,) = request.dtypes, request.batches
    if not report.estimates:
        raise TraceError("the step cannot be traced", todo=report.failures.get(dtype) or "; ".join(report.notes))
    return report, tapes[dtype].at(batch, size_oracle_of(gpu))


def _answer(
    request: Request, config: dict | None, gpu: Gpu, report_progress: Progress
) -> tuple[Report, dict[str, TapeFamily]]:
    """The report of a request on a device, and its tapes by dtype."""
    if request.expandable_segments and gpu.backend != "cuda":
        raise RequestError(
            "expandable",
            given=f"'1' on {gpu.name}",
            allowed="1 on a CUDA device, whose allocator alone has expandable segments",
            todo="remove it",
        )
    report_progress("building the model on meta")
    blueprint = make_blueprint(request, config)
    module = build_module(blueprint, checkpointing=request.checkpointing)
    census = take_census(module, name=blueprint.name)
    device = Device(gpu.backend, gpu.capability, version=request.torch and pytorch.parse_version(request.torch))
    job = _Job(request, blueprint, module, gpu, device, report_progress, size_oracle_of(gpu))
    tapes: dict[str, TapeFamily] = {}
    failures: dict[str, str] = {}
    notes: list[str] = []
    batches = _possible_batches(job, notes)
    for dtype in _cheapest_first(request.dtypes):
        try:
            tapes[dtype] = _family(job, dtype, batches, notes, tapes)
        except TraceError as error:
            failures[dtype] = str(error)
    report_progress("replaying the allocator")
    report = build_report(
        query=format_query(request, complete=True),
        versions=versions(),
        census=census,
        tapes={dtype: tapes[dtype] for dtype in request.dtypes if dtype in tapes},
        batches=batches,
        gpu=gpu,
        mode=request.mode,
        oracle=job.oracle,
        expandable_segments=request.expandable_segments,
        request={**_echo(request), "sequence_length": blueprint.sequence_length, "image_size": blueprint.image_size},
        failures=failures,
        notes=(*blueprint.notes, *notes),
        cautions=cautions(device, gpu),
        target=target(device),
        assumptions=tuple(device.choices),
        uncounted=(*blueprint.uncounted, *_unanswered(job, tapes)),
        explanation=_explanation(job, tapes),
        formulas=formulas(device, gpu),
    )
    return report, tapes


def _explanation(job: _Job, tapes: dict[str, TapeFamily]) -> Explanation:
    """The kernels and rules behind the tapes of a job; dtypes may share one."""
    request = job.request
    return explain(
        job.device,
        tapes={dtype: tapes[dtype] for dtype in request.dtypes if dtype in tapes},
        optimizer=request.optimizer if MODES[request.mode].trains else None,
        implementation=request.optimizer_impl,
        same=job.same,
        gpu=job.gpu,
        expandable_segments=request.expandable_segments,
    )


def _unanswered(job: _Job, tapes: dict[str, TapeFamily]) -> tuple[str, ...]:
    """What to say of the workspaces of convolutions where nobody is there to be asked for all of them."""
    queries = (query for family in tapes.values() for tape in family.tapes() for query in tape.size_queries)
    resolved = oracle_name(job.gpu) is not None and without_cublaslt() is None
    return (convolutions(job.gpu),) if not resolved and any(query.kind == CUDNN for query in queries) else ()


def build_module(blueprint: Blueprint, *, checkpointing: bool = False) -> nn.Module:
    """The blueprint's module on meta, with gradient checkpointing switched on where asked.

    Raises BuildError where the architecture offers no checkpointing.
    """
    module = build(blueprint)
    if checkpointing:
        blueprint.switch_checkpointing_on(module)
    return module


def versions() -> dict[str, str]:
    """The versions that an answer depends on."""
    packages = ("torch", *(source.package for source in offered_sources()))
    return {"sizer": pytorch.SIZER, **{name: version(name) for name in packages}}


def target(device: Device) -> dict[str, str]:
    """The versions whose rules an answer follows."""
    return {"torch": pytorch.format_version(device.version)}


def cautions(device: Device, gpu: Gpu) -> tuple[str, ...]:
    """What to know before the figures are read: whose rules they follow, whether PyTorch runs on this GPU at all, in what it
    differs from those that the rules are for."""
    unsupported = builds.caution(gpu, device.version)
    said = (*pytorch.cautions(device.version, pytorch.installed_version()), *gpu.cautions)
    return (*said, unsupported) if unsupported else said


def _family(
    job: _Job, dtype: str, batches: tuple[int, ...], notes: list[str], done: dict[str, TapeFamily]
) -> TapeFamily:
    """The tapes of one dtype at every batch size; where the work is not affine in it, at those that were asked for."""
    request = job.request
    if dtype == "float16" and "bfloat16" in done and done["bfloat16"].lines and _halves_alike(job.device):
        job.same["float16"] = "bfloat16"
        return done["bfloat16"].with_dtype("float16", instead_of="bfloat16")

    work = Work(mode=request.mode, dtype=dtype, optimizer=request.optimizer, optimizer_impl=request.optimizer_impl)

    def at(batch: int, *, short: bool = False) -> Tape:
        job.progress(f"tracing {dtype} at batch {batch}")
        return trace(job.blueprint, job.module, work, batch=batch, device=job.device, short=short)

    one = cache(lambda: at(1))
    try:
        line = _affine(at, FITTED_AT)
        if job.exceptional is None:
            checked = one if 1 in batches else lambda: at(1, short=True)
            job.exceptional = _is_exceptional(line, at, checked if job.one_is_possible else None)
        exceptional = job.one_is_possible and (job.exceptional or job.device.differs_at_one)
        lines = [(1, line)]
        if (beyond := job.device.changes_at) is not None:
            lines.append((beyond, _affine(at, (beyond, beyond + 1))))
    except NotAffineError as error:
        notes.append(f"{dtype}: traced at each batch size by itself, because {error}")
        return TapeFamily(exact=tuple(map(at, batches)))
    except TraceError:
        if batches != (1,):
            raise
        return TapeFamily(exact=(one(),))  # of a model that takes one sample at a time
    return TapeFamily(
        lines=tuple(lines), exact=(one(),) if exceptional else (), smallest=1 if job.one_is_possible else FITTED_AT[0]
    )


def _affine(at: Callable[..., Tape], batches: tuple[int, int]) -> AffineTape:
    """The affine tape of two traces, the second cut short where the steps repeat each other.

    Else of two whole ones, both made anew: a module may keep something from the first step that it ever did.
    """
    try:
        return fit_affine(at(batches[0]), at(batches[1], short=True))
    except NotAffineError:
        return fit_affine(*map(at, batches))


def _is_exceptional(line: AffineTape, at: Callable[..., Tape], one: Callable[[], Tape] | None) -> bool:
    """Whether batch 1, where it is possible, differs from the line: a tensor with a dimension of 1 is contiguous in more ways.

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


def _possible_batches(job: _Job, notes: list[str]) -> tuple[int, ...]:
    """The batch sizes asked for, without 1 where the model refuses it (batch norm over a single value, say).

    Raises the model's own RequestError where nothing is left. Where there are no inputs at all, each dtype's trace says why.
    """
    try:
        job.blueprint.example(1, MODES[job.request.mode].trains)
    except TraceError:
        return job.request.batches
    except RequestError as error:
        job.one_is_possible = False
        left = tuple(batch for batch in job.request.batches if batch != 1)
        if not left:
            raise
        if len(left) < len(job.request.batches):
            notes.append(f"batch 1 is left out: {error}")
        return left
    return job.request.batches


def _halves_alike(device: Device) -> bool:
    """Whether float16 took the kernels that bfloat16 just took: tensor cores treat them alike since capability 8.0."""
    modern = device.kind == "cuda" and device.capability is not None and device.capability >= (8, 0)
    return modern and not device.halves_differ


def _cheapest_first(dtypes: tuple[str, ...]) -> Iterator[str]:
    # Weights in float32 first: the module is cast in place and back only once.
    yield from sorted(dtypes, key=lambda d: (not (d == "float32" or d.startswith("amp-")), d == "float16"))


def _echo(request: Request) -> dict[str, object]:
    echo = asdict(request)
    echo.pop("config")
    return echo
