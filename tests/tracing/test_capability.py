"""A trace is that of every capability of which its rules asked nothing that the other answers otherwise."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest

from sizer.base.config_json import encode_config
from sizer.catalogue.gpu_keys import CAPABILITIES, find_gpu
from sizer.estimating.store import EmptyStore
from sizer.estimating.tracer import Tracer
from sizer.query.text import parse_query
from sizer.tape.archive import pack, unpack
from sizer.tracing.cuda.by_capability import as_environment_says, blas_of
from sizer.tracing.device import COMPARISONS, Capability, decide_alike
from tests.decision.questions import TWO_LAYERS
from tests.estimating.test_tracer import Shelf

# Two layers of which each head is of 128 elements: memory-efficient attention has blocks of its own for them on some devices
WIDE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 4,
}
WIDE_HEADS = f"arch=config:{encode_config(json.dumps(WIDE | {'vocab_size': 1000}))}"

# Work, and on how many of all capabilities it is traced
WORK = {
    "arch=torchvision:resnet18&image=64&dtype=float32": 1,
    "arch=torchvision:mobilenet_v3_small&image=64&dtype=amp-float16": 2,
    f"{TWO_LAYERS}&seq=64&dtype=bfloat16": 3,
    f"{WIDE_HEADS}&seq=64&dtype=float32": 1,
    f"{WIDE_HEADS}&seq=64&dtype=amp-float16": 3,
    "arch=hf:t5-small&seq=64&dtype=float16": 2,
    f"{TWO_LAYERS}&seq=64&dtype=amp-float16&attention=eager": 1,
}
if find_spec("bitsandbytes") and find_spec("peft"):
    WORK[f"{TWO_LAYERS}&seq=64&dtype=bfloat16&train=adapter&weights=nf4-dq"] = 2


@pytest.mark.parametrize(
    ("query", "traces"),
    [
        pytest.param(query, traces, marks=pytest.mark.exhaustive if number % 2 else ())
        for number, (query, traces) in enumerate(WORK.items())
    ],
)
def test_what_another_capability_has_traced_is_what_this_one_would(query: str, traces: int):
    shelf = Shelf()
    for major, minor in CAPABILITIES:
        request = parse_query(f"{query}&batch=2&gpu=custom:24GiB@{major}.{minor}")
        (dtype,), gpu = request.dtypes, find_gpu(request.gpu)
        shared = Tracer(request, gpu, store=shelf).trace_cell(dtype, 2)
        alone, _ = Tracer(request, gpu).trace_noted(dtype, 2)
        assert shared == alone, (major, minor)
    assert sum("\ntraced" in name for name in shelf) == traces


def test_so_are_the_lines_over_the_batch_size_and_the_kernels():
    shelf = Shelf()
    for gpu in ("a100-80gb", "h200", "rtx-3090", "b200"):
        request = parse_query(f"{TWO_LAYERS}&seq=64&dtype=bfloat16&batch=2&gpu={gpu}")
        shared, anew = (
            Tracer(request, find_gpu(gpu), store=kept).trace("bfloat16", (2,)) for kept in (shelf, EmptyStore())
        )
        assert pack(shared) == pack(anew)
    assert sum("\ntraced" in name for name in shelf) == 2


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_comparison_comes_to_what_it_would_and_is_noted(name: str, turned: bool):
    compare: Callable = getattr(operator, name)
    for other in ((8, 0), (8, 9), (9, 0)):
        watched = Capability((8, 9))
        pair, plain = (watched, other), ((8, 9), other)
        outcome = compare(*(pair[::-1] if turned else pair))
        assert outcome is compare(*(plain[::-1] if turned else plain))
        assert len(watched.decisions) == 1
        assert decide_alike((8, 9), watched.decisions)
        alike = [one for one in CAPABILITIES if decide_alike(one, watched.decisions)]
        assert alike == [one for one in CAPABILITIES if compare(*((other, one) if turned else (one, other))) is outcome]


def test_its_numbers_are_watched_too():
    watched = Capability((9, 0))
    assert watched[0] in (9, 10)
    assert 9 <= watched[0] <= 12
    assert watched[1] == 0
    assert [one for one in CAPABILITIES if decide_alike(one, watched.decisions)] == [(9, 0)]
    assert [one for one in CAPABILITIES if decide_alike(one, {d for d in watched.decisions if d[0] == "major"})] == [
        (9, 0)
    ]


def test_several_ranges_are_one_comparison():
    ranges = ((8, 6), (8, 9)), ((12, 0), (12, 1))
    watched = Capability((8, 9))
    assert watched.among(*ranges)
    assert [one for one in CAPABILITIES if decide_alike(one, watched.decisions)] == [
        one for one in CAPABILITIES if one in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
    ]
    other = Capability((9, 0))
    assert not other.among(*ranges)
    assert decide_alike((8, 0), other.decisions)
    assert not decide_alike((12, 0), other.decisions)


def test_what_is_no_comparison_is_refused():
    watched = Capability((8, 0))
    with pytest.raises(TypeError, match=r"where its numbers themselves are wanted, ask for \.plain"):
        tuple(watched)
    with pytest.raises(TypeError, match=r"where it is a key, ask for \.plain"):
        hash(watched)
    assert watched.plain == (8, 0)
    assert not watched.decisions


def test_decisions_are_kept_with_the_tapes():
    request = parse_query(f"{TWO_LAYERS}&seq=64&dtype=bfloat16&batch=2&gpu=t4")
    traced = Tracer(request, find_gpu("t4")).trace("bfloat16", (2,))
    assert traced.decisions
    assert unpack(pack(traced)).decisions == traced.decisions


@pytest.mark.parametrize(
    ("environment", "size", "lt_size"),
    [
        ({}, 8_519_680, 2**20),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, 32 * 2**20, 2**20),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8", "CUBLASLT_WORKSPACE_SIZE": "4096"}, 8_519_680, 2**22),
        ({"CUBLAS_WORKSPACE_CONFIG": "4096", "CUBLASLT_WORKSPACE_SIZE": "many"}, 8_519_680, 2**20),
    ],
)
def test_cublas_takes_what_the_environment_says(environment, size, lt_size):
    usual = blas_of((8, 6), (2, 15))
    found = as_environment_says(usual, environment, (2, 15))
    assert (found.size, found.lt_size) == (size, lt_size)
    assert replace(found, size=usual.size, lt_size=usual.lt_size) == usual
