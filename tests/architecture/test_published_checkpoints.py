"""Published quantized checkpoints: the bytes of their tensors, as others read them, against the layouts of their methods.

published_checkpoints.json has one row a checkpoint: the preset or the config of its architecture, its `quantization_config` without
what names no tensor (none where it is the preset's own), what was read (`bytes` of all tensors; or elements, those of the quantized
weights and of the `rest` or their `scales`; or `file_bytes` of a safetensors file and the `metadata` in its header), by whom, and
in `besides` what the files hold otherwise than transformers loads it: in bytes, or of a file by the last name of such tensors.
"""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path

import pytest
import torch
from torch import nn

from sizer.architecture import make_blueprint
from sizer.architecture.packed_layers import checkpoint_bytes, pack
from sizer.architecture.quantization_settings import Quantization, quantization_of
from sizer.architecture.quantized_layers import quantized_layers
from sizer.base.config_json import encode_config
from sizer.catalogue.presets import PRESETS
from sizer.query.text import parse_query
from sizer.tracing.trace import build

ROWS = json.loads(Path(__file__).with_name("published_checkpoints.json").read_text())
# Presets of quantized checkpoints, of whose bytes no sum was found that others have read.
UNREAD = {
    *("deepseek-r1", "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "kimi-k2-instruct", "kimi-k2.5", "minimax-m2.5"),
    *("ministral-3-3b-instruct-2512", "ministral-3-8b-instruct-2512", "ministral-3-14b-instruct-2512"),
}
ALWAYS = (
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit",
    "TheBloke/MythoMax-L2-13B-GPTQ, 8 bits, a scale for each output",
)
DTYPES = {"F32": torch.float32, "I32": torch.int32, "F16": torch.float16}  # in the order of a safetensors file


def params(*read: str) -> list:
    return [
        pytest.param(row, id=row["checkpoint"], marks=() if row["checkpoint"] in ALWAYS else pytest.mark.exhaustive)
        for row in ROWS
        if any(key in row for key in read)
    ]


def built(row: dict) -> tuple[nn.Module, Quantization]:
    arch = f"hf:{row['preset']}" if "preset" in row else f"config:{encode_config(json.dumps(row['config']))}"
    request = parse_query(f"arch={arch}&mode=inference&weights=full")
    if "settings" in row:
        quantization = Quantization(method=row["method"], settings=row["settings"], dtype=row["dtype"])
    else:
        quantization = quantization_of(request, None)
    return build(make_blueprint(request)), quantization


@pytest.mark.parametrize("row", params("bytes", "weights"))
def test_its_tensors_have_the_bytes_that_were_read(row):
    module, quantization = built(row)
    if "bytes" in row:
        found = checkpoint_bytes(module, quantization, getattr(torch, quantization.dtype))
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


@pytest.mark.parametrize("row", params("file_bytes"))
def test_its_file_has_the_size_that_was_read(row):
    module, quantization = built(row)
    total = checkpoint_bytes(module, quantization, getattr(torch, row["dtype"]))
    tensors = {
        name: (one.dtype, list(one.shape))
        for name, one in pack(module, row["dtype"], quantization).state_dict().items()
    }
    assert sum(nbytes(*tensor) for tensor in tensors.values()) == total
    assert file_bytes(tensors | besides(row, module, tensors), row["metadata"]) == row["file_bytes"]


def besides(row: dict, module: nn.Module, tensors: dict) -> dict:
    """What a file holds otherwise than transformers loads it."""
    found = {}
    if "bias" in row["besides"]:
        scales = {name: shape for name, (_, shape) in tensors.items() if name.endswith(".scales")}
        found |= {name.removesuffix("scales") + "bias": (torch.float16, shape[1:]) for name, shape in scales.items()}
    if "inv_freq" in row["besides"]:
        half = module.config.head_dim // 2
        for layer in range(module.config.num_hidden_layers):
            found[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.float32, [half]
    return found


def nbytes(dtype: torch.dtype, shape: list[int]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()


def file_bytes(tensors: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str]) -> int:
    """The size of a safetensors file: 8 bytes, a header of JSON to the next multiple of 8, and the tensors, by dtype and name
    (safetensors/src/tensor.rs, prepare, 0.3)."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end, kinds = 0, {dtype: (place, name) for place, (name, dtype) in enumerate(DTYPES.items())}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (kinds[item[1][0]], item[0])):
        begin, end = end, end + nbytes(dtype, shape)
        header[name] = {"dtype": kinds[dtype][1], "shape": shape, "data_offsets": [begin, end]}
    return 8 + 8 * ceil(len(json.dumps(header, separators=(",", ":"))) / 8) + end


def test_presets_are_loaded_as_their_checkpoints_are():
    own = {row["preset"] for row in ROWS if "settings" not in row}
    assert own | UNREAD == {key for key, preset in PRESETS.items() if "quantization_config" in preset.config}
    assert not own & UNREAD
    held = build(make_blueprint(parse_query("arch=hf:gpt-oss-20b&mode=inference&gpu=rtx-4090")), dtype="bfloat16")
    # the biases of 24 layers' 32 experts are float32 as transformers holds them: 2 × 2,880 and 2,880
    biases = 24 * 32 * 3 * 2880
    (read,) = (row["bytes"] for row in ROWS if row.get("preset") == "gpt-oss-20b")
    assert sum(one.nbytes for one in held.parameters()) == read + 2 * biases


def test_every_row_says_who_read_it():
    assert len({row["checkpoint"] for row in ROWS}) == len(ROWS) >= 25
    assert all(row["source"] and sum(key in row for key in ("bytes", "weights", "file_bytes")) == 1 for row in ROWS)
