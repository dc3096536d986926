"""Heads, adapters and accumulated gradients: the estimate's peaks against PyTorch's own CUDA code, to the byte."""

from __future__ import annotations

import json

import pytest

from sizer.allocator.allocator import replay
from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.base.versions import installed_version
from sizer.catalogue.adapters import ADAPTERS
from sizer.catalogue.gpus import GPUS
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.tracing.models import BERT, LLAMA, T5, VIT

pytest.importorskip("peft")

GPU = "a100-40gb"


def arch(config: dict, **others: object) -> str:
    return f"arch=config:{encode_config(json.dumps(config | others))}"


LLAMA_TEXT = f"{arch(LLAMA, hidden_size=512, intermediate_size=1536)}&seq=256"
GPT2_TEXT = (
    f"{arch({'model_type': 'gpt2', 'architectures': ['GPT2LMHeadModel']}, n_layer=2, n_embd=256, n_head=4)}&seq=128"
)
BERT_TEXT = f"{arch(BERT | {'architectures': ['BertForSequenceClassification']}, num_hidden_layers=2)}&seq=128"
QUERIES = (
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&checkpointing=1&optimizer=adafactor",
    f"{LLAMA_TEXT}&dtype=amp-bfloat16&train=adapter&targets=attention&adapter_dropout=0.1&optimizer_impl=fused",
    f"{LLAMA_TEXT}&dtype=float16&train=adapter&adapter=rslora&r=64&optimizer=sgd-momentum&accumulate=4",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=dora&checkpointing=1",
    f"{LLAMA_TEXT}&dtype=float32&train=adapter&adapter=dora&targets=q_proj,v_proj&optimizer_impl=loop",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=ia3",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=vera&r=128",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=loha&r=8&checkpointing=1",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=lokr&r=8",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=prompt&r=8&optimizer=sgd",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&adapter=prefix&r=20",
    f"{GPT2_TEXT}&dtype=bfloat16&train=adapter&optimizer=muon",
    f"{GPT2_TEXT}&dtype=amp-float16&train=adapter&adapter=p-tuning&r=8",
    f"{GPT2_TEXT}&dtype=float32&train=head",
    f"{BERT_TEXT}&dtype=float32&train=adapter&targets=query,value",
    f"{BERT_TEXT}&dtype=bfloat16&train=head&accumulate=2",
    f"{arch(T5)}&seq=64&dtype=bfloat16&train=adapter&optimizer=sgd",
    f"{arch(VIT)}&image=224&dtype=bfloat16&train=adapter&optimizer=rmsprop",
    f"{LLAMA_TEXT}&dtype=bfloat16&accumulate=8",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&modules_to_save=embed_tokens,lm_head&accumulate=2",
    f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&modules_to_save=lm_head&checkpointing=1&autocast=1",
)

# A small model for every adapter that is not asked for above.
SMALL_TEXT = f"{arch(LLAMA, num_hidden_layers=2)}&seq=64"
OTHERS = tuple(
    f"{SMALL_TEXT}&dtype=bfloat16&train=adapter&adapter={key}"
    for key in ADAPTERS
    if key != "lora" and not any(f"adapter={key}" in query.split("&") for query in QUERIES)
)

# With PyTorch 2.11 a segment of 2 MiB more is estimated beside Muon than there is; the reason was not found.
UNLIKE_IN_2_11 = {query for query in QUERIES if "optimizer=muon" in query}
MOST_UNLIKE_BYTES = 2**21


def estimated(query: str) -> list[int]:
    request = parse_query(query)
    blueprint, work, (batch,) = make_blueprint(request), work_of(request, *request.dtypes), request.batches
    module = build(blueprint, checkpointing=request.checkpointing)
    tape = trace(blueprint, module, work, batch=batch, device=Device("cuda", GPUS[GPU].capability))
    timeline = replay(tape.resolve(size_oracle_of(GPUS[GPU])), backend="cuda")
    return [timeline.peak_allocated_bytes, timeline.peak_reserved_bytes]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(QUERIES[::7], id="some"),
        pytest.param(QUERIES[1::2], marks=pytest.mark.exhaustive, id="half"),
        pytest.param(QUERIES, marks=pytest.mark.full, id="all"),
        pytest.param(OTHERS, marks=pytest.mark.exhaustive, id="every adapter"),
    ],
)
def test_they_take_what_pytorchs_own_do(run_on_null, asked: tuple[str, ...]):
    queries = [f"{query}&batch=4&gpu={GPU}" for query in asked]
    truth = run_on_null("tests.null_driver.adapters", json.dumps(queries), gpu=GPU)
    found = {query: (estimated(query), measured) for query, measured in zip(queries, truth, strict=True)}
    wrong = {query: both for query, both in zip(asked, found.values(), strict=True) if both[0] != both[1]}
    assert set(wrong) == (UNLIKE_IN_2_11 & {*asked} if installed_version() == (2, 11) else set()), wrong
    assert all(
        mine[0] == theirs[0] and abs(mine[1] - theirs[1]) <= MOST_UNLIKE_BYTES for mine, theirs in wrong.values()
    )


@pytest.mark.exhaustive
def test_convolutions_with_adapters_do_too(run_on_null):
    query = f"arch=torchvision:resnet18&image=64&dtype=float32&train=adapter&targets=conv1,conv2&batch=8&gpu={GPU}"
    assert [estimated(query)] == run_on_null("tests.null_driver.adapters", json.dumps([query]), gpu=GPU)
