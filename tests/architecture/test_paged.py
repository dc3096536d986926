"""Paged optimizers of bitsandbytes: what the device holds of their state, and what the host does."""

from __future__ import annotations

import json

import pytest

from sizer.base.config_json import encode_config
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from tests.tracing.models import LLAMA

pytest.importorskip("bitsandbytes")

CONFIG = LLAMA | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
QUERY = f"arch=config:{encode_config(json.dumps(CONFIG))}&dtype=bfloat16&batch=1&seq=16"
# Of at least 100,000 elements: embeddings and head of 1000 × 256, three matrices of 512 × 256.
LARGE = 2 * 1000 * 256 + 3 * 512 * 256
# q and o of 256 × 256, k and v of 64 × 256; three norms of 256, which stay in float32, being smaller than 4,096.
MIDDLE, SMALL = 2 * 256 * 256 + 2 * 64 * 256, 3 * 256
TABLES = 2 * 256 * 4  # of codes, for both states


@pytest.mark.parametrize(
    ("optimizer", "device_bytes", "host_bytes"),
    [
        # a byte for each element of both states, and a scale for 256 of them
        ("adamw-8bit", 2 * (LARGE + MIDDLE) + 2 * (LARGE + MIDDLE) // 256 * 4 + 8 * SMALL + TABLES, 0),
        ("paged-adamw-8bit", 2 * MIDDLE + 2 * (LARGE + MIDDLE) // 256 * 4 + 8 * SMALL + TABLES, 2 * LARGE),
        ("paged-adamw", 8 * (MIDDLE + SMALL), 8 * LARGE),
        ("lion-8bit", LARGE + MIDDLE + (LARGE + MIDDLE) // 256 * 4 + 4 * SMALL + TABLES // 2, 0),
        ("lion", 4 * (LARGE + MIDDLE + SMALL), 0),
    ],
)
def test_every_byte_of_the_state_is_on_one_of_them(optimizer: str, device_bytes: int, host_bytes: int) -> None:
    found = estimate(parse_query(f"{QUERY}&optimizer={optimizer}"))
    assert found.estimates[0].optimizer_bytes == device_bytes
    notes = [note for note in found.notes if "managed memory" in note]
    assert len(notes) == (host_bytes > 0)
    assert all(note.startswith(f"{host_bytes / 2**20:.2f} MiB of the optimizer's state") for note in notes)
