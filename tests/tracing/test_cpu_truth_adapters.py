"""Heads and adapters trained alone, and accumulated gradients: the trace by the CPU's rules against torch.profiler."""

from __future__ import annotations

import json

import pytest

from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.catalogue.adapters import ADAPTERS
from sizer.device.trial.trial import one_thread
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.architecture.tiny_configs import TINY
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes
from tests.tracing.models import GPT2, LLAMA, T5, VIT

pytest.importorskip("peft")

HAIR = 0.001  # of the peak, as in test_cpu_truth.py

LLAMA_TEXT, GPT2_TEXT, T5_TEXT, VIT_TEXT = (
    f"arch=config:{encode_config(json.dumps(config))}" for config in (LLAMA, {**GPT2, "n_layer": 2}, T5, VIT)
)
BERT_TEXT = "arch=config:" + encode_config(
    json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_hidden_layers": 2})
)
LLAVA_TEXT = f"arch=config:{encode_config(json.dumps(TINY['llava']))}&seq=32"
CASES = {
    "lora": f"{LLAMA_TEXT}&seq=32&train=adapter",
    "lora-bfloat16": f"{LLAMA_TEXT}&seq=32&train=adapter&dtype=bfloat16&r=8&adapter_dropout=0.1",
    "lora-amp": f"{LLAMA_TEXT}&seq=32&train=adapter&dtype=amp-bfloat16&targets=q_proj,v_proj",
    "lora-attention": f"{LLAMA_TEXT}&seq=32&train=adapter&targets=attention",
    "lora-seq2seq": f"{T5_TEXT}&seq=32&train=adapter&optimizer=sgd",
    "lora-classifier": f"{BERT_TEXT}&seq=32&train=adapter&targets=query,value",
    "lora-image": f"{VIT_TEXT}&image=64&train=adapter",
    "lora-convolutions": "arch=torchvision:resnet18&image=64&train=adapter&targets=conv1,conv2&r=4",
    "dora": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=dora",
    "dora-bfloat16": f"{GPT2_TEXT}&seq=32&train=adapter&adapter=dora&dtype=bfloat16",
    "rslora": f"{GPT2_TEXT}&seq=32&train=adapter&adapter=rslora&optimizer=adafactor",
    "loha": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=loha&r=4",
    "lokr": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=lokr&r=4",
    "vera": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=vera&r=32",
    "ia3": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=ia3",
    "ia3-bfloat16": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=ia3&dtype=bfloat16",
    "prompt": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=prompt&r=8",
    "prompt-bfloat16": f"{GPT2_TEXT}&seq=32&train=adapter&adapter=prompt&dtype=bfloat16",
    "p-tuning": f"{GPT2_TEXT}&seq=32&train=adapter&adapter=p-tuning&r=4",
    "prefix": f"{LLAMA_TEXT}&seq=32&train=adapter&adapter=prefix&r=8",
    "head": f"{BERT_TEXT}&seq=32&train=head",
    "head-tied": f"{GPT2_TEXT}&seq=32&train=head",
    "head-cnn": "arch=torchvision:resnet18&image=64&train=head",
    "head-bfloat16": f"{LLAMA_TEXT}&seq=32&train=head&dtype=bfloat16",
    "without-tower": f"{LLAVA_TEXT}&train=without-tower",
    "without-tower-bfloat16": f"{LLAVA_TEXT}&train=without-tower&dtype=bfloat16",
    "accumulate": f"{LLAMA_TEXT}&seq=32&accumulate=2",
    "accumulate-cnn": "arch=torchvision:resnet18&image=64&accumulate=3&optimizer=sgd-momentum",
    "accumulate-lora": f"{LLAMA_TEXT}&seq=32&train=adapter&accumulate=3&dtype=bfloat16",
}

OTHERS = {
    key: f"{LLAMA_TEXT}&seq=32&train=adapter&adapter={key}"
    for key in ADAPTERS
    if key not in CASES and key not in ("pissa", "olora")  # whose matrices are LoRA's
}


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(query, id=name, marks=pytest.mark.exhaustive if number % 2 or name in OTHERS else ())
        for number, (name, query) in enumerate({**CASES, **OTHERS}.items())
    ],
)
def test_trace_equals_profiler(query: str) -> None:
    dtype = "" if "dtype=" in query else "&dtype=float32"
    request = parse_query(f"{query}{dtype}&gpu=cpu&batch=2")
    blueprint, work = make_blueprint(request), work_of(request, *request.dtypes)
    with one_thread():
        truth = measure_on_cpu(blueprint, work, batch=2, checkpointing=request.checkpointing)
        module = build(blueprint, checkpointing=request.checkpointing)
        tape = trace(blueprint, module, work, batch=2, device=Device("cpu"))
    alive, peaks = tape_bytes(tape)
    # PEFT copies the numbers of virtual tokens to the device (int64, for each sample); on the CPU they are there.
    copied = 2 * request.adapter_rank * 8 if request.adapter in ("prompt", "p-tuning", "prefix") else 0
    assert alive == {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers + copied}
    for phase, measured in truth.peaks.items():
        assert abs(peaks[phase] - measured) <= HAIR * measured, f"{phase}: {peaks[phase] - measured} beside {measured}"
