"""The catalogue of devices."""

from __future__ import annotations

import pytest

from sizer.catalogue.gpus import GPUS

CONTRACT = (
    "t4", "v100-16gb", "rtx-3060-12gb", "rtx-3090", "rtx-4060-8gb", "rtx-4090", "l40s", "a100-40gb", "a100-80gb",
    "h100-80gb", "h200", "b200", "m2-ultra-64gb", "cpu",
)  # fmt: skip


def test_the_contract_is_kept():
    assert set(CONTRACT) <= GPUS.keys()


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.key)
def test_every_entry_is_plausible(gpu):
    assert GPUS[gpu.key] is gpu
    assert 0 <= gpu.context_low_bytes <= gpu.context_bytes <= gpu.context_high_bytes < gpu.total_bytes / 8
    assert gpu.source.startswith(("seen", "believed", "nominal"))
    assert (gpu.capability is not None) == (gpu.backend == "cuda")
    # no card shows more than is printed on its box, nor less than 90 % of it (a Mac: 65 to 75 %)
    boxed = float(gpu.name.rsplit("(", 1)[1].removeprefix("a host with ").split(" ")[0])
    floor = 0.65 if gpu.backend == "mps" else 0.9
    assert floor * boxed * 10**9 < gpu.total_bytes <= boxed * 2**30


def test_an_h200_has_139_8_gib():
    # printed by torch on such a machine: total_memory=143156MB, 143156 / 1024 = 139.80
    assert GPUS["h200"].total_bytes == 143_156 * 2**20
    assert GPUS["h200"].capability == (9, 0)
