"""The estimate against what PyTorch's own host code allocated over the null driver: cases of the suite, to the byte."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from sizer.architecture import make_blueprint
from sizer.base.config_json import read_config
from sizer.base.versions import parse_version
from sizer.device.comparison.counterpart import gpu_of, request_of
from sizer.device.record.measurement import Measurement
from sizer.device.record.recording import CaseRecord, read_measured
from sizer.estimating.work import work_of
from sizer.report.estimate import Estimate, estimate_tape
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.benchmarks.bench_accuracy import hold
from tests.device.replayed import disagreements

RECORDED = Path(__file__).parent / "recorded"
FOLDERS = sorted(RECORDED.iterdir())
OTHER_VERSIONS = 0.2  # with other versions than were recorded models' code, PyTorch's rules and cuDNN's engines differ


def _version_of(case: CaseRecord) -> str:
    """PyTorch's version in a recording."""
    return case.measured.measurement.versions["torch"]


def _versions_are_those(case: CaseRecord) -> bool:
    """Whether the model's own code and the rules by PyTorch's version are those of the recording."""
    found, source = case.measured.measurement.versions, request_of(case.measured.measurement).source
    package = "torchvision" if source == "torchvision" else "transformers"
    return all(found[name] == version(name).split("+")[0] for name in ("torch", package))


EVERY = {f"{folder.name}/{case.name}": case for folder in FOLDERS for case in read_measured(folder)}
# What was recorded with the installed PyTorch, else with the newest: in a year the code of a model may change by a multiple.
RECORDED_WITH = {_version_of(case) for case in EVERY.values()}
OWN = version("torch").split("+")[0]
USED = OWN if OWN in RECORDED_WITH else max(RECORDED_WITH, key=parse_version)
CASES = {name: case for name, case in EVERY.items() if _version_of(case) == USED}
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")
# Of each kind on each GPU: the whole way of an estimate, whose figures come from a line through other batch sizes. The way from
# batch to batch is not the kernels' nor the allocator's, so that one trace holds the others (tests/tracing/test_batch_curve.py).
KINDS = (
    "detr-resnet-50-b2-float32", "gpt2-b4-amp-float16", "gpt2-b4-bfloat16", "llama-1b-b4-bfloat16-inference",
    "efficientnet_b0-b32-amp-float16", "resnet18-b32-float32-expandable", "resnet50-b32-float32-checkpointing",
    "resnet50-b64-float32-inference", "vgg16-b32-float32-sgd",
)  # fmt: skip
WHOLE = [name for name in CASES if name.rpartition("/")[2] in KINDS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_allocators_replay_gives_pytorchs_own_figures(folder: Path):
    recorded = read_measured(folder)
    assert len(recorded) >= 8
    assert [text for case in recorded for text in disagreements(case)] == []


def slack(case: CaseRecord) -> float:
    """How far a figure may be off, as a fraction of what was recorded."""
    return 0.0 if _versions_are_those(case) else OTHER_VERSIONS


def estimate_at_its_batch(measurement: Measurement) -> Estimate:
    """Today's estimate of what was recorded, from one trace at its own batch size."""
    request, gpu, text = request_of(measurement), gpu_of(measurement.device), measurement.config_text
    work, (batch,) = work_of(request, *request.dtypes), request.batches
    blueprint = make_blueprint(request, None if text is None else read_config(text))
    module = build(blueprint, checkpointing=request.checkpointing)
    device = Device(gpu.backend, gpu.capability, version=parse_version(request.torch) if request.torch else None)
    tape = trace(blueprint, module, work, batch=batch, device=device).resolve(size_oracle_of(gpu))
    return estimate_tape(
        tape, dtype=work.dtype, gpu=gpu, mode=request.mode, expandable_segments=request.expandable_segments
    )


EXACT = [name for name in CASES if name not in WHOLE]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if number % 2 else ()) for number, name in enumerate(EXACT)],
)
def test_the_trace_at_its_batch_is_what_pytorch_allocates(name: str):
    case = CASES[name]
    measurement = case.measured.measurement
    estimate = estimate_at_its_batch(measurement)
    for quantity in PEAKS:
        estimated, recorded = getattr(estimate, quantity), getattr(measurement, quantity)
        assert abs(estimated - recorded) <= slack(case) * recorded, (quantity, estimated, recorded)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name.startswith("t4") else pytest.mark.exhaustive) for name in WHOLE],
)
def test_the_estimate_is_what_pytorch_allocates(name: str):
    case = CASES[name]
    held = hold(name, case.measured)
    for quantity in PEAKS:
        assert abs(held.errors[quantity]) <= slack(case), (quantity, held.errors[quantity])
