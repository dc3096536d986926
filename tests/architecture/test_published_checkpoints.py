"""Published quantised checkpoints: the bytes of their tensors, as others read them, against the layouts of their methods.

published_checkpoints.json has one row a checkpoint: the preset of its architecture, its `quantization_config` without what names no
tensor, what was read (`bytes` of all tensors; or elements, those of the quantised weights and of the `rest` or their `scales`), by
whom, and in `besides` what the files hold otherwise than transformers loads it, in bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sizer.architecture import make_blueprint
from sizer.architecture.packed import checkpoint_bytes
from sizer.architecture.quantization_settings import Quantization
from sizer.architecture.quantized_layers import quantized_layers
from sizer.request import parse_query
from sizer.tracing.trace import build

ROWS = json.loads(Path(__file__).with_name("published_checkpoints.json").read_text())
ALWAYS = ("Qwen/Qwen2.5-7B-Instruct-AWQ", "unsloth/Llama-3.2-1B-Instruct-bnb-4bit")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row["checkpoint"], marks=() if row["checkpoint"] in ALWAYS else pytest.mark.exhaustive)
        for row in ROWS
    ],
)
def test_its_tensors_have_the_bytes_that_were_read(row):
    module = build(make_blueprint(parse_query(f"arch=hf:{row['preset']}&mode=inference")))
    quantization = Quantization(method=row["method"], settings=row["settings"], dtype=row["dtype"])
    if "bytes" in row:
        found = checkpoint_bytes(module, quantization, getattr(torch, row["dtype"]))
        assert found + sum(row.get("besides", {}).values()) == row["bytes"]
        return
    weights = sum(layer.weight.numel() for _, layer in quantized_layers(module, quantization))
    rest = sum(one.numel() for one in module.parameters()) - weights
    assert weights == row["weights"]
    if "rest" in row:
        assert rest == row["rest"]
        return
    dtype = getattr(torch, row["dtype"])
    held = checkpoint_bytes(module, quantization, dtype) - rest * dtype.itemsize - weights
    assert held == row["scales"] * torch.float32.itemsize  # as transformers holds them


def test_every_row_says_who_read_it():
    assert len({row["checkpoint"] for row in ROWS}) == len(ROWS)
    assert all(row["source"] and ("bytes" in row) != ("weights" in row) for row in ROWS)
