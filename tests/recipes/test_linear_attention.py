"""Linear attention by flash-linear-attention: the key `fla`, and answers without it on a machine that has the package.

Figures over PyTorch's own host code are in tests/recipes/test_recipes.py.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import warnings
from types import ModuleType
from unittest import mock

import pytest
import torch

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue import linear_attention as installed
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.presets import PRESETS
from sizer.catalogue.sources import SOURCES
from sizer.decision.levers import levers
from sizer.estimating.estimator import estimate
from sizer.query.text import format_query, parse_query
from sizer.recipes import linear_attention
from sizer.report.advice import caveats
from sizer.report.report import Report
from sizer.tracing.compiled.dynamo import compiled_calls
from sizer.ui.defaults import fla_for
from tests.null_driver.recipes import LINEAR

MODEL = f"arch=config:{encode_config(json.dumps(LINEAR))}&batch=2&seq=300"
FILE = "transformers.models.qwen3_5.modeling_qwen3_5"


def report(keys: str = "", *, gpu: str = "rtx-4090") -> Report:
    return estimate(parse_query(f"{MODEL}&dtype=bfloat16&gpu={gpu}{keys}"))


def peak(keys: str = "", *, gpu: str = "rtx-4090") -> int:
    (cell,) = report(keys, gpu=gpu).estimates
    return cell.peak_allocated_bytes


def test_kernels_take_less_than_the_loop():
    with_package, without = report("&fla=1"), report()
    assert with_package.estimates[0].peak_allocated_bytes < 0.9 * without.estimates[0].peak_allocated_bytes
    assert with_package.estimates[0].weights_bytes == without.estimates[0].weights_bytes
    assert any("chunk_fwd_kernel_o" in text for text in with_package.uncounted)
    assert any("autotunes" in text for text in with_package.uncounted)
    assert not any("assumed" in text for text in caveats(with_package))  # kernels are no values that code reads
    assert not any("kernel" in text for text in without.uncounted)


def test_an_answer_does_not_depend_on_installed_packages():
    before, modeling = peak(), importlib.import_module(FILE)
    own = inspect.getclosurevars(modeling.torch_chunk_gated_delta_rule).nonlocals["torch_function"]
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    # as if the file had been imported by other code
    with linear_attention.imported_for("here"), warnings.catch_warnings(action="ignore"):
        of_package = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")(own)
    assert inspect.getclosurevars(of_package).nonlocals["is_new_implementation"]
    with mock.patch.object(modeling, "torch_chunk_gated_delta_rule", of_package):
        assert peak() == before
        assert modeling.torch_chunk_gated_delta_rule is of_package


def test_each_gpu_has_its_own_package():
    before = sys.modules.get("fla")
    first = [peak("&fla=1", gpu=gpu) for gpu in ("t4", "rtx-4090")]
    again = [peak("&fla=1", gpu=gpu) for gpu in ("rtx-4090", "t4")]
    assert first == again[::-1] and first[0] != first[1]
    assert sys.modules.get("fla") is before


def test_a_model_file_is_imported_without_the_packages():
    names = ("fla", "causal_conv1d", "mamba_ssm")
    imported = {"fla": ModuleType("fla")}  # by other code of the process
    with mock.patch.dict(sys.modules, imported):
        before = {name: sys.modules.get(name) for name in names}
        with linear_attention.kernel_packages_hidden():
            for name in names:
                with pytest.raises(ModuleNotFoundError, match=name):
                    importlib.import_module(name)
        assert {name: sys.modules.get(name) for name in names} == before


@pytest.mark.parametrize(
    ("query", "told"),
    [
        (f"{MODEL}&fla=1&gpu=cpu", "fla: given 1 with gpu=cpu"),
        (f"{MODEL}&fla=1&compile=default", "fla: given '1' with compile=default"),
        (f"{MODEL}&fla=2", "fla: given '2', allowed 0, 1"),
        ("arch=torchvision:resnet18&fla=1", "fla: given '1' without a model of transformers"),
        ("arch=hf:qwen3.5-0.8b&mode=serve&fla=1", "fla: given '1' without mode="),
        ("arch=hf:gpt2&batch=1&dtype=float32&fla=1", "fla: GPT2LMHeadModel has no linear attention"),
    ],
)
def test_the_key_is_refused_where_the_package_does_nothing(query: str, told: str):
    with pytest.raises(RequestError) as raised:
        estimate(parse_query(query))
    assert told in str(raised.value)


@pytest.mark.parametrize("name", ["fla", "triton"])
def test_a_missing_package_is_named(name: str):
    with (
        mock.patch.object(linear_attention, "find_spec", lambda module: None if module == name else object()),
        pytest.raises(BuildError, match="is not installed: given fla=1; pip install"),
    ):
        report("&fla=1")


def test_a_package_that_cannot_be_imported_is_named():
    with (
        mock.patch.object(linear_attention, "_LOADED", {}),
        mock.patch.dict(sys.modules, {"einops": None}),
        pytest.raises(BuildError, match=r"flash-linear-attention cannot be used: .*einops"),
    ):
        report("&fla=1")


def test_the_change_is_offered_where_the_package_is_installed():
    for is_there in (True, False):
        with mock.patch("sizer.estimating.model.is_installed", lambda found=is_there: found):
            offered = next(iter(levers(parse_query(f"{MODEL}&dtype=bfloat16")))).pending
            assert ("fla" in offered) is is_there


def test_the_page_asks_for_it_where_the_package_is_installed(monkeypatch: pytest.MonkeyPatch):
    source, gpu = SOURCES["hf"], GPUS["a100-80gb"]
    monkeypatch.setattr("sizer.ui.defaults.is_installed", lambda: True)
    chosen = {name for name in PRESETS if fla_for(source, name, gpu)}
    assert {"qwen3.6-27b", "qwen3.5-4b", "qwen3-next-80b-a3b-instruct"} <= chosen
    assert not {"qwen3-8b", "gpt2", "falcon-h1-0.5b-instruct"} & chosen
    assert not fla_for(source, "qwen3.6-27b", GPUS["m4-24gb"])
    monkeypatch.setattr("sizer.ui.defaults.is_installed", lambda: False)
    assert not fla_for(source, "qwen3.6-27b", gpu)


def test_files_of_transformers_tell_which_types_call_it():
    assert installed.calls_package("qwen3_5") and installed.calls_package("kimi_linear")
    assert not installed.calls_package("llama") and not installed.calls_package("../llama") and not installed.calls_package("none")


def test_the_key_is_written_only_if_it_is_given():
    assert "fla" not in format_query(parse_query(MODEL))
    assert format_query(parse_query(f"{MODEL}&fla=1")).endswith("&fla=1")


def test_functions_that_are_not_compiled_can_be_unwrapped():
    def inner() -> None: ...

    @functools.wraps(inner)
    def outer() -> None: ...

    with compiled_calls(lambda function: lambda: None, lambda: None):
        assert inspect.unwrap(torch.compiler.disable(outer)) is inner
