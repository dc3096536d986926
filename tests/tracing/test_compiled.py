"""Code that torch.compile has compiled: each step's figures against PyTorch's own over the null driver, to the byte.

`tests/null_driver/compiled.json` holds what `tests.null_driver.compiled` recorded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sizer.base.errors import TraceError
from sizer.base.versions import installed_version
from sizer.estimating.custom import size_step
from sizer.tracing.compiled import names
from sizer.tracing.compiled.compile_findings import reason_of
from tests.tracing.compiled_steps import figures
from tests.tracing.compiled_works import FEW, WORKS, Step, asks, between, breaks, optimized, two_lengths
from tests.tracing.graph_works import blocks
from tests.tracing.library_works import DIFFUSERS_WORKS

RECORDED = json.loads((Path(__file__).parents[1] / "null_driver/compiled.json").read_text())
OLDER = installed_version() < names.OLDEST_READ
pytestmark = pytest.mark.skipif(OLDER, reason="this PyTorch's compiler is refused by name (test_own_code.py)")


@pytest.fixture(autouse=True)
def _own_settings():
    """The compiler's settings are put back, and its records are not kept: pytest keeps each with the tensors that it names."""
    import torch._functorch.config as config

    logging.disable(logging.CRITICAL)
    with config.patch(activation_memory_budget=config.activation_memory_budget):
        yield
    logging.disable(logging.NOTSET)


def gpu_step(model: nn.Module, **options: Any) -> Callable[[], Step]:
    """A setup that compiles a module of 4 features."""

    def setup() -> Step:
        compiled = torch.compile(model.cuda(), **options)
        return lambda: compiled(torch.zeros(2, 4, device="cuda")).sum().backward()

    return setup


def _tier(name: str) -> list[pytest.MarkDecorator]:
    if name in FEW:
        return []
    return [pytest.mark.full if name in DIFFUSERS_WORKS else pytest.mark.exhaustive]


def test_every_work_is_recorded():
    assert RECORDED["works"].keys() == WORKS.keys()


@pytest.mark.skipif(installed_version() != (2, 15), reason="recorded with PyTorch 2.15")
@pytest.mark.parametrize("name", [pytest.param(name, marks=_tier(name)) for name in WORKS])
def test_each_step_is_what_pytorch_allocates(name: str):
    assert figures(name, gpu=RECORDED["gpu"]) == RECORDED["works"][name]


def test_the_report_lists_regions_breaks_and_recompilations():
    broken = size_step(partial(between, breaks), gpu="h100-80gb")
    (place,) = broken.compiled.graph_breaks
    assert "graph_break()" in place and "compiled_works.py:" in place
    assert len(broken.compiled.regions) == 2
    assert any("graph break" in note for note in broken.notes)
    (reason,) = size_step(two_lengths, gpu="h100-80gb").compiled.recompilations
    assert "size mismatch at index 0. expected 96, actual 128" in reason
    assert type(broken).from_dict(json.loads(broken.to_json())).compiled == broken.compiled


def test_a_compiled_optimizer_has_the_breaks_of_pytorch_alone_and_its_phase():
    report = size_step(partial(optimized, torch.optim.Adam), gpu="h100-80gb", steps=2)
    assert all("torch._dynamo.graph_break()" in place for place in report.compiled.graph_breaks)  # of _use_grad
    assert len(report.compiled.regions) == 1
    backward, update = (one for one in report.estimates[0].phases if one.phase in ("backward", "optimizer"))
    (row,) = report.estimates
    assert update.allocated_bytes >= row.optimizer_bytes > 2 * row.weights_bytes  # two states and a counter
    assert backward.allocated_bytes < update.allocated_bytes


def test_a_disabled_function_finds_its_tensors_on_the_device_and_makes_others_there():
    def setup() -> Step:
        @torch.compiler.disable
        def add(x: torch.Tensor) -> torch.Tensor:
            assert x.is_cuda and x.device.type == "cuda"
            return x + torch.ones(x.shape, device="cuda") + torch.arange(4).cuda()

        twice = torch.compile(lambda x: add(x * 2) * 2)
        return lambda: twice(torch.zeros(1024, 4, device="cuda"))

    report = size_step(setup, gpu="h100-80gb")
    assert report.compiled.graph_breaks and "disable" in report.compiled.graph_breaks[0]
    # recorded over the null driver: input, its double, and two sums [1024, 4] of 4 bytes, and a row of 4 numbers
    assert report.estimates[0].peak_allocated_bytes == 4 * 1024 * 4 * 4 + 512


def test_eager_code_has_no_compiled_part():
    def setup() -> Step:
        model = nn.Linear(4, 4).cuda()
        torch.compile(model)  # never called
        return lambda: model(torch.zeros(2, 4, device="cuda")).sum().backward()

    assert size_step(setup, gpu="h100-80gb").compiled is None


def test_code_compiled_before_the_trace_is_traced_and_works_afterwards():
    twice = torch.compile(lambda x: x * 2, backend="aot_eager")
    compile_, is_available, device = torch.compile, torch.cuda.is_available, vars(torch.Tensor).get("device")
    import torch._dynamo.trace_rules as rules
    import torch._inductor.compile_fx as compile_fx

    skipped, partition = [*rules.SKIP_DIRS], compile_fx.partition_fn
    report = size_step(lambda: lambda: twice(torch.zeros(2, 64, device="cuda")), gpu="h100-80gb")
    assert report.compiled.regions
    assert torch.compile is compile_
    assert torch.cuda.is_available is is_available
    assert vars(torch.Tensor).get("device") is device
    assert (rules.SKIP_DIRS, compile_fx.partition_fn) == (skipped, partition)
    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]


def test_two_gpus_are_compiled_for_one_after_the_other():
    setup = partial(between, nn.Identity())
    first = size_step(setup, gpu="t4").estimates[0].peak_allocated_bytes
    assert size_step(setup, gpu="h100-80gb").estimates[0].peak_allocated_bytes > first  # cuBLAS takes 32 MiB for 8.1
    assert size_step(setup, gpu="t4").estimates[0].peak_allocated_bytes == first


def host_input() -> Step:
    """Return a step that moves its batch to the device within the compiled code."""
    model, batch = nn.Linear(4, 4).cuda(), torch.zeros(2, 4)
    compiled = torch.compile(lambda x: model(x.cuda()).sum())
    return lambda: compiled(batch).backward()


REFUSED = {
    "host input": (host_input, r"tensor of the host.*of shape \(2, 4\)"),
    "fullgraph": (partial(between, asks, fullgraph=True), r"Data-dependent branching \(compiled_works\.py:\d+\)"),
    "shape": (gpu_step(nn.Linear(5, 4)), r"same reduction dim.*\(test_compiled\.py:\d+\)"),
    "backend": (
        gpu_step(nn.Linear(4, 4), backend="cudagraphs"),
        r"backend=cudagraphs.*allowed inductor, eager, aot_eager",
    ),
    "own backend": (
        gpu_step(nn.Linear(4, 4), backend=lambda graph, inputs: graph.forward),
        r"backend=<lambda>.*allowed inductor",
    ),
    "max-autotune": (gpu_step(nn.Linear(4, 4), mode="max-autotune"), "timing"),
    "accumulated graphs": (partial(blocks, passes=2), "gradient tensor output of CUDAGraphs that has been overwritten"),
    "inference of graphs by blocks": (partial(blocks, training=False), "output of CUDAGraphs that has been overwritten"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_traced_is_refused_by_name(case: str):
    setup, text = REFUSED[case]
    with pytest.raises(TraceError, match=text) as caught:
        size_step(setup, gpu="h100-80gb")
    assert "\n" not in str(caught.value)


def test_without_triton_the_error_says_how_to_install_it():
    find = names.importlib.util.find_spec
    with (
        mock.patch.object(names.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)),
        pytest.raises(TraceError, match="pip install triton"),
    ):
        size_step(gpu_step(nn.Linear(4, 4)), gpu="h100-80gb")


@pytest.mark.parametrize(("module", "path"), names.NAMES, ids=".".join)
def test_pytorch_has_each_private_name(module: str, path: str):
    assert names._exists(module, path)


def test_a_version_without_a_name_is_refused_by_name():
    with (
        mock.patch.object(names, "NAMES", (*names.NAMES, ("torch._dynamo", "no_such_name"))),
        pytest.raises(TraceError, match=r"lacks torch\._dynamo\.no_such_name"),
    ):
        names.check_compiler()


def test_an_operators_own_error_is_part_of_the_reason():
    assert reason_of("\nA\nExplanation: got RuntimeError('b must be c')") == "A: b must be c"
    assert reason_of("A\nB") == "A"
