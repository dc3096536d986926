"""The explanation of a trace: kernels by dtype and module, and a source for every rule."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import sizer
from sizer.report.bounds import CLOSED_KERNELS
from sizer.report.report import Report
from sizer.tape.archive import Traced
from sizer.tape.family import TapeFamily
from sizer.tracing import device_rules
from sizer.tracing.cuda import convolution
from sizer.tracing.device import KINDS, Device
from sizer.tracing.device_rules import rules_for
from sizer.tracing.explain import explain, formulas, rules_of
from sizer.tracing.rule_texts import DECIDED_BY_CUDNN
from tests.tape.tapes import make_tape
from tests.tracing.test_mechanisms import Attend, run

NONE = Traced()
SOURCE = re.compile(r"\b[\w/{},]+\.(cuh?|cpp|h|py)\b")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_names_its_source(kind: str) -> None:
    for name, function in rules_for(Device(kind, (8, 0) if kind == "cuda" else None)).kernels.items():
        told = f"{function.__doc__} {inspect.getmodule(function).__doc__}"
        assert SOURCE.search(told), name


def test_every_workspace_of_cuda_names_its_source_first() -> None:
    for name, formula in formulas(Device("cuda", (8, 0))).items():
        assert SOURCE.search(formula.text), name
        assert len(formula.text) < 600, name


def test_every_workspace_of_the_cpu_has_a_text() -> None:
    assert all(formula.text for formula in formulas(Device("cpu")).values())


def test_what_cudnn_decides_is_modelled() -> None:
    told = formulas(Device("cuda", (8, 0)))
    modelled = {name for name, formula in told.items() if formula.modelled}
    assert modelled == set(map(str, DECIDED_BY_CUDNN))
    # and so does the range of the process: these whatever happens, convolutions where nobody answers
    assert {name for name in modelled if not name.startswith(CLOSED_KERNELS)} == set(map(str, convolution.ALLOCATIONS))
    assert not told["aten._scaled_dot_product_flash_attention_backward.default"].modelled


def test_formula_of_cublas_follows_the_version() -> None:
    kept, called = (formulas(Device("cuda", (9, 0), version=v))["aten.mm.default"].text for v in ((2, 13), (2, 15)))
    assert "33,554,432 B, one per thread, kept" in kept and "cuBLASLt" not in kept
    assert "33,554,432 B, for the time of each call, 1,048,576 B where cuBLASLt adds a bias" in called
    old = formulas(Device("cuda", (8, 0), version=(2, 6)))["aten.addmm.default"].text
    assert (
        "8,519,680 B, one per thread, kept from its first use, 1,048,576 B for the time of the call where cuBLASLt"
        in old
    )


def test_kernels_are_counted_by_module_and_dtype() -> None:
    on = Device("cuda", (8, 0), version=(2, 15))

    def pair() -> nn.Module:
        return nn.Sequential(Attend(), nn.Flatten(1), nn.Unflatten(1, (4, 16)), Attend())

    traced = {}
    for dtype in ("float32", "bfloat16"):
        on = Device("cuda", (8, 0), version=(2, 15))
        run(pair, torch.zeros(2, 4, 16), on=on, dtype=dtype)
        traced[dtype] = Traced(kernels=on.kernels())
    told = explain(on, traced=traced | {"float16": traced["bfloat16"]}, optimizer="adamw")
    assert told.rules == rules_of(on) == "CUDA capability 8.0 in PyTorch 2.15"
    assert [(use.operator, use.kernel, use.dtypes, use.modules) for use in told.kernels] == [
        ("attention", "efficient", ("float32",), 2),
        ("attention", "flash", ("bfloat16", "float16"), 2),
        ("optimizer", "foreach", ("float32", "bfloat16", "float16"), 0),
    ]
    assert told.kernels[0].why.endswith("not flash: it needs float16 or bfloat16")


@pytest.mark.parametrize(
    ("kind", "optimizer", "implementation", "kernel"),
    [
        ("cuda", "adamw", None, "foreach"),
        ("cuda", "adamw", "fused", "fused"),
        ("cuda", "adafactor", None, "loop"),
        ("cpu", "adamw", None, "loop"),
        ("mps", "sgd", "loop", "loop"),
    ],
)
def test_optimizer_as_pytorch_runs_it(kind: str, optimizer: str, implementation: str | None, kernel: str) -> None:
    on = Device(kind, (8, 0) if kind == "cuda" else None)
    told = explain(on, traced={"float32": NONE}, optimizer=optimizer, implementation=implementation)
    assert [(use.operator, use.kernel) for use in told.kernels] == [("optimizer", kernel)]


@pytest.mark.parametrize("optimizer", [None, "none"])
def test_no_optimizer_no_line(optimizer: str | None) -> None:
    assert explain(Device("cpu"), traced={"float32": NONE}, optimizer=optimizer).kernels == ()


def test_a_report_explains_itself_and_survives_the_way_to_the_page() -> None:
    report = sizer.estimate("arch=hf:gpt2&seq=64&batch=2&dtype=bfloat16,float16&gpu=a100-80gb")
    told = report.explanation
    *attention, optimizer = told.kernels
    assert [(use.kernel, use.why, use.modules, use.dtypes) for use in attention] == [
        ("flash", f"{dtype}, no mask, head dim 64", 12, (dtype,)) for dtype in ("bfloat16", "float16")
    ]
    assert optimizer.kernel == "foreach"
    backward = next(use for use in told.workspaces if "flash_attention_backward" in use.op)
    # 12 layers, two steps; softmax_d [2, 12, 64 to 128] and dq_accum [.., 64] in float32
    assert (backward.calls, backward.bytes) == (24, 2 * 12 * 128 * 4 * (1 + 64))
    assert backward.dtypes == ("bfloat16", "float16")
    assert report.assumptions == tuple(f"attention: flash ({use.why})" for use in attention)
    assert Report.from_dict(report.to_dict()) == report


def test_stand_ins_are_part_of_it() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if float(super().forward(x).detach().sum()) > 0 else 1.0)

    told = sizer.size_module(lambda: Reads(4, 4), (torch.zeros(2, 4),)).explanation
    assert told.stand_ins == ("the value of a tensor was taken as 1.0",)


def without(monkeypatch: pytest.MonkeyPatch, kind: str, *families: str) -> Device:
    """A device whose rules lack some families of operators."""
    left = tuple(family for family in device_rules.FAMILIES[kind] if family.__name__.rpartition(".")[2] not in families)
    assert len(left) < len(device_rules.FAMILIES[kind])
    monkeypatch.setitem(device_rules.FAMILIES, kind, left)
    device_rules._rules.cache_clear()
    return Device(kind, (8, 0) if kind == "cuda" else None)


@pytest.fixture
def rules_made_anew() -> Iterator[None]:
    yield
    device_rules._rules.cache_clear()


def test_what_is_counted_follows_from_the_rules(monkeypatch: pytest.MonkeyPatch, rules_made_anew: None) -> None:
    def told(device: Device) -> str:
        return "\n".join(explain(device, traced={"float32": NONE}).modelled)

    whole = told(Device("cuda", (8, 0)))
    count = len(rules_for(Device("cuda", (8, 0))).allocations)
    assert f"formulas for {count} operators" in whole
    assert "recurrent: how large cuDNN's reserve and workspace are" in whole and "aten._cudnn_rnn," in whole
    assert "attention workspaces: flash attention's split keys" in whole and "staging" not in whole
    less = told(without(monkeypatch, "cuda", "recurrent", "attention_workspaces", "reductions"))
    fewer = len(rules_for(Device("cuda", (8, 0))).allocations)
    assert f"formulas for {fewer} operators" in less and fewer < count
    assert "recurrent" not in less and "flash attention" not in less
    assert "what kernels hold beside their results is not counted" in told(Device("mps"))


def test_what_the_work_does_not_do_is_not_said_to_be_modelled() -> None:
    def told(operator: str) -> str:
        tape = replace(make_tape([("a", 1)]), op_names=(operator,))
        return "\n".join(
            explain(Device("cuda", (8, 0)), traced={"float32": Traced(family=TapeFamily(exact=(tape,)))}).modelled
        )

    product, convolved, recurrent = map(
        told, ("aten.mm.default", "aten.convolution.default", "aten._cudnn_rnn.default")
    )
    assert not any(word in product for word in ("convolution", "cudnn_rnn", "recurrent", "flash"))
    assert "workspaces of convolutions" in convolved and "convolution: " in convolved and "recurrent" not in convolved
    assert "(aten._cudnn_rnn)" in recurrent and "recurrent: " in recurrent and "convolution" not in recurrent


def test_how_batch_sizes_were_traced_is_told() -> None:
    one = sizer.estimate("arch=torchvision:resnet18&image=32&batch=4&dtype=float32&gpu=t4").explanation
    assert any("traces at batch 2 and 3 give each block's bytes" in line for line in one.exact)
    single = sizer.size_module(lambda: nn.Linear(4, 4), (torch.zeros(2, 4),)).explanation
    assert single.exact[-1] == "traced by itself: batch 2"
    assert not any("a + b * batch" in line for line in single.exact)


def test_the_allocator_asked_for_is_described() -> None:
    query = "arch=torchvision:resnet18&image=32&batch=4&dtype=float32&mode=inference&gpu=t4&expandable=1"
    assert "with expandable segments" in sizer.estimate(query).explanation.allocator[0]
