"""Quantized weights: the estimate's peaks against bitsandbytes' and PyTorch's own CUDA code, to the byte."""

from __future__ import annotations

import json

import pytest

from sizer.allocator.allocator import replay
from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.catalogue.adapters import ADAPTERS
from sizer.catalogue.gpus import GPUS
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.trace import build_loaded, trace
from tests.tracing.models import LLAMA

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

GPU = "a100-40gb"


def arch(config: dict, **others: object) -> str:
    return f"arch=config:{encode_config(json.dumps(config | others))}"


LLAMA_TEXT = f"{arch(LLAMA, hidden_size=512, intermediate_size=1536)}&seq=256"
# Checkpoints whose weights are quantized already.
QUANTIZED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
NESTED = QUANTIZED | {"bnb_4bit_use_double_quant": True}
SIZES = {"hidden_size": 512, "intermediate_size": 1536}
NF4_TEXT, NESTED_TEXT, INT8_TEXT = (
    f"{arch(LLAMA, **SIZES, quantization_config=config)}&seq=256"
    for config in (QUANTIZED, NESTED, {"load_in_8bit": True, "quant_method": "bitsandbytes"})
)
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 8}
QWEN |= {"hidden_size": 512, "intermediate_size": 1536, "num_key_value_heads": 2, "vocab_size": 8000}
QWEN_TEXT = f"{arch(QWEN)}&seq=128"
GPT2_TEXT = (
    f"{arch({'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel']}, n_layer=2, n_embd=256, n_head=4)}&seq=128"
)
QUERIES = (
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=nf4&train=adapter",
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=nf4-dq&train=adapter&checkpointing=1",
    f"{LLAMA_TEXT}&dtype=float16&weights=nf4-dq&train=adapter&checkpointing=1&accumulate=2&optimizer=sgd",
    f"{LLAMA_TEXT}&dtype=amp-bfloat16&weights=nf4&train=adapter",
    f"{LLAMA_TEXT}&dtype=float32&weights=nf4&train=adapter",
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=int8&train=adapter",
    f"{LLAMA_TEXT}&dtype=float16&weights=int8&train=adapter&checkpointing=1",
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=nf4&mode=inference",
    f"{LLAMA_TEXT}&dtype=float16&weights=nf4-dq&mode=inference",
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=int8&mode=inference",
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=nf4&train=adapter&adapter=dora",
    f"{LLAMA_TEXT}&dtype=bfloat16&weights=nf4&train=adapter&adapter=ia3",
    f"{QWEN_TEXT}&dtype=bfloat16&weights=nf4-dq&train=adapter&checkpointing=1",
    f"{QWEN_TEXT}&dtype=bfloat16&weights=int8&train=adapter",
    f"{NESTED_TEXT}&dtype=bfloat16&train=adapter&checkpointing=1",
    f"{NF4_TEXT}&dtype=bfloat16&mode=inference",
    f"{NESTED_TEXT}&dtype=float16&mode=inference",
    f"{INT8_TEXT}&dtype=float16&mode=inference",
    f"{GPT2_TEXT}&dtype=bfloat16&weights=nf4&train=adapter",
    f"{GPT2_TEXT}&dtype=float16&weights=int8&mode=inference",
)
# A small model with every other adapter that is traced beside such weights, but OLoRA: they are factored by cuSOLVER, on a device.
OTHERS = tuple(
    f"{arch(LLAMA, num_hidden_layers=2)}&seq=64&dtype=bfloat16&weights={('nf4', 'int8')[number % 2]}&train=adapter&adapter={key}"
    for number, (key, row) in enumerate(ADAPTERS.items())
    if row.on_quantized
    and key not in ("lora", "olora")
    and not any(query.endswith(f"adapter={key}") for query in QUERIES)
)


def estimated(query: str) -> list[int]:
    request = parse_query(query)
    blueprint, work, (batch,) = make_blueprint(request), work_of(request, *request.dtypes), request.batches
    device = Device("cuda", GPUS[GPU].capability)
    module, loading = build_loaded(
        blueprint,
        checkpointing=request.checkpointing,
        dtype=work.dtype,
        device=device,
        tell_frozen=work.tell_frozen,
    )
    tape = trace(blueprint, module, work, batch=batch, device=device, loading=loading)
    timeline = replay(tape.resolve(size_oracle_of(GPUS[GPU])), backend="cuda")
    return [timeline.peak_allocated_bytes, timeline.peak_reserved_bytes]


@pytest.mark.parametrize(
    ("batch", "asked"),
    [
        (4, QUERIES[1::5]),
        pytest.param(1, QUERIES[::3], marks=pytest.mark.exhaustive),
        pytest.param(4, QUERIES, marks=pytest.mark.exhaustive),
        pytest.param(2, OTHERS, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "at 1", "at 4", "every adapter"],
)
def test_they_take_what_bitsandbytes_own_do(run_on_null, batch, asked):
    queries = [f"{query}&batch={batch}&gpu={GPU}" for query in asked]
    truth = run_on_null("tests.null_driver.quantized", json.dumps(queries), gpu=GPU)
    found = {query: (estimated(query), measured) for query, measured in zip(queries, truth, strict=True)}
    wrong = {query.partition("&")[2]: both for query, both in found.items() if both[0] != both[1]}
    assert wrong == {}
