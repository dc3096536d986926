"""torchao's optimizers: every byte of their states, and what is said of their compiled step."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from sizer.config_json import encode_config
from sizer.errors import RequestError
from sizer.estimator import estimate
from sizer.request import parse_query
from tests.tracing.models import LLAMA

CONFIG = LLAMA | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
QUERY = f"arch=config:{encode_config(json.dumps(CONFIG))}&dtype=bfloat16&batch=1&seq=16"
# Embeddings and head of 1000 × 256, three matrices of 512 × 256, q and o of 256 × 256, k and v of 64 × 256: nine tensors of
# at least 4,096 elements; three norms of 256, whose states are in bfloat16.
LARGE, TENSORS, SMALL = 2 * 1000 * 256 + 3 * 512 * 256 + 2 * 256 * 256 + 2 * 64 * 256, 9, 3 * 256
# Two states: a code of a byte for an element (half a byte), a scale for 256 of them (128), and a map of 256 values (16).
STATES = {
    "adamw-ao-8bit": 2 * (LARGE + LARGE // 256 * 4 + TENSORS * 256 * 4 + SMALL * 2),
    "adamw-ao-4bit": 2 * (LARGE // 2 + LARGE // 128 * 4 + TENSORS * 16 * 4 + SMALL * 2),
    "adamw-ao-fp8": 2 * (LARGE + LARGE // 256 * 4 + SMALL * 2),
}


@pytest.mark.parametrize("optimizer", list(STATES))
def test_every_byte_of_the_states_is_counted(optimizer: str) -> None:
    pytest.importorskip("torchao")
    found = estimate(parse_query(f"{QUERY}&optimizer={optimizer}"))
    assert not found.failures
    assert found.estimates[0].optimizer_bytes == STATES[optimizer]
    assert any("compiled step of torchao's AdamW" in line for line in found.uncounted)


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_a_package_that_is_not_there_is_named() -> None:
    found = estimate(parse_query(f"{QUERY}&optimizer=adamw-ao-8bit"))
    assert "torchao is not installed: given optimizer=adamw-ao-8bit; pip install torchao" in found.failures["bfloat16"]


@pytest.mark.parametrize("optimizer", list(STATES))
def test_they_are_for_one_cuda_device(optimizer: str) -> None:
    with pytest.raises(
        RequestError, match=f"optimizer: given '{optimizer}' with gpu=cpu, allowed PyTorch's own; those of t"
    ):
        parse_query(f"{QUERY}&optimizer={optimizer}&gpu=cpu")
    with pytest.raises(RequestError, match="allowed PyTorch's own: how those of torchao take shards was not compared"):
        parse_query(f"{QUERY}&optimizer={optimizer}&parallel=ddp")
