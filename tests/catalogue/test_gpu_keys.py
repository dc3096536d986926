"""The device that a key names: of the catalogue, of one's own, or refused with what may have been meant."""

from __future__ import annotations

import random
from collections import Counter
from unittest import mock

import pytest

import sizer
from sizer.base.errors import RefusedValueError, RequestError, letters
from sizer.catalogue import gpu_keys
from sizer.catalogue.gpu_keys import (
    CAPABILITIES,
    EXAMPLE,
    find_gpu,
    format_capability,
    is_custom,
    keys_of_memory,
    split_custom,
)
from sizer.catalogue.gpus import GPUS, read_rows
from sizer.query.text import format_query, parse_query
from sizer.tracing.cuda.size_oracle import oracle_name, size_oracle_of

MIB = 2**20
RESNET = "arch=torchvision:resnet18"


def test_the_catalogues_own_keys():
    assert [find_gpu(key) for key in GPUS] == list(GPUS.values())
    assert not any(map(is_custom, GPUS))


@pytest.mark.parametrize(
    ("given", "key", "total_bytes"),
    [
        ("custom:24GiB@8.9", "custom:24GiB@8.9", 24 * 2**30),
        ("custom:24084MiB@8.9", "custom:24084MiB@8.9", 24_084 * MIB),
        ("custom:24GB@8.9", "custom:24GB@8.9", 24 * 10**9),
        ("CUSTOM:24 gib@8.9", "custom:24GiB@8.9", 24 * 2**30),
        ("custom:22.50GiB@10.3", "custom:22.5GiB@10.3", 45 * 2**29),
        ("custom:100GiB@9.0", "custom:100GiB@9.0", 100 * 2**30),  # no exponent: 1E+2
        ("custom:2048MiB@7.5", "custom:2048MiB@7.5", 2 * 2**30),
        ("custom:4096GiB@12.0", "custom:4096GiB@12.0", 2**42),
    ],
)
def test_a_device_of_ones_own(given: str, key: str, total_bytes: int):
    gpu = find_gpu(given)
    assert (gpu.key, gpu.total_bytes, gpu.backend, gpu.maker) == (key, total_bytes, "cuda", "NVIDIA")
    assert find_gpu(gpu.key) == gpu
    assert split_custom(key) == tuple(key.removeprefix("custom:").split("@"))


@pytest.mark.parametrize("seed", range(200))
def test_every_device_of_ones_own_survives_its_link(seed: int):
    rng = random.Random(seed)
    number = rng.choice((rng.randint(3, 4000), round(rng.uniform(3, 4000), rng.randint(1, 3))))
    key = f"custom:{number}{rng.choice(('GiB', 'GB'))}@{format_capability(rng.choice(CAPABILITIES))}"
    request = parse_query(f"{RESNET}&gpu={key}")
    assert parse_query(format_query(request)) == request
    assert request.gpu == find_gpu(key).key
    assert parse_query(format_query(request, complete=True)).gpu == request.gpu


@pytest.mark.parametrize(
    "given",
    [
        "custom", "custom:", "custom:24GiB", "custom:24@8.9", "custom:@8.9", "custom:24GiB@", "custom:24GiB@8", "custom:-24GiB@8.9",
        "custom:24GiB@3.5", "custom:24GiB@8.9.1", "custom:24TiB@8.9", "custom:1GiB@8.9", "custom:4097GiB@8.9", "custom:1e3GiB@8.9",
        "custom:24GiB@gfx942", "custom:٢٤GiB@8.9", "custom:24.0000GiB@8.9", "custom:0GiB@8.9",
    ],
)  # fmt: skip
def test_what_is_no_device_of_ones_own_is_refused_with_an_example(given: str):
    with pytest.raises(
        RefusedValueError, match=r"^custom:<memory>@<capability>, memory from 2 GiB to 4,096 GiB"
    ) as refused:
        find_gpu(given)
    assert "one of 6.0, 6.1, 7.0, 7.5, 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 12.0, 12.1" in refused.value.allowed
    assert refused.value.todo == f"write for example gpu={EXAMPLE}"
    assert find_gpu(EXAMPLE).key == EXAMPLE


def test_its_context_is_that_of_any_device_of_its_capability():
    # capability 9.0: an H20 with 78 multiprocessors of 2,048 threads, 2 KiB each, holds 312 MiB, most others with 132 hold 528;
    # libraries 149 MiB, 153 below and 589 above
    gpu = find_gpu("custom:80GiB@9.0")
    assert (gpu.context_low_bytes, gpu.context_bytes, gpu.context_high_bytes) == (308 * MIB, 677 * MIB, 1266 * MIB)
    assert gpu.source.startswith("as given; outside PyTorch: any of the catalogue's ")
    assert gpu.source.endswith(" of capability 9.0")


def test_no_library_is_asked_in_its_place():
    gpu = find_gpu("custom:81038MiB@8.0")
    assert (gpu.total_bytes, gpu.capability) == (GPUS["a100-80gb"].total_bytes, GPUS["a100-80gb"].capability)
    assert oracle_name(gpu) is None and size_oracle_of(gpu) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("h100", "did you mean h100-80gb, h100-pcie, h100-nvl?"),
        ("4090", "did you mean rtx-4090, rtx-4090-d, rtx-4090-laptop?"),
        ("NVIDIA RTX 3060", "did you mean rtx-3060"),
        ("a100-80", "did you mean a100-80gb?"),
        ("MI300", "did you mean mi300x?"),
        ("7900xtx", "did you mean rx-7900-xtx?"),
        ("gb10", "did you mean dgx-spark?"),
        ("m4-max", "did you mean m4-max-64gb, m4-max-128gb, m4-max-36gb?"),
        ("rtx-4009", "did you mean rtx-4090, "),
        ("x", "write for example gpu=rtx-4090"),
        ("nothing of the kind", "write for example gpu=rtx-4090"),
        ("RTX 4090 48GB", "did you mean "),
        ("RTX 4090 SUPER", "did you mean "),
        ("NVIDIA GeForce RTX 5060 Ti", "did you mean rtx-5060-ti-16gb, rtx-5060-ti-8gb?"),
        ("8xH100", "write gpu=h100-80gb&ranks=8 with parallel="),
        ("A100-40GB x 4", "write gpu=a100-40gb&ranks=4 with parallel="),
        ("8xnothing", "write for example gpu=rtx-4090"),
        ("cuda:0", "write the device's model, for example gpu=rtx-4090"),
        ("mps", "write the device's model, for example gpu=rtx-4090"),
    ],
)
def test_what_may_have_been_meant_is_suggested_and_never_taken(given: str, said: str):
    with pytest.raises(
        RequestError, match=r"^gpu: given .*, allowed a key that `python -m sizer gpus` lists, or a device"
    ) as refused:
        parse_query(f"{RESNET}&gpu={given}")
    (refusal,) = refused.value.refusals
    assert refusal.todo.startswith(said)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("RTX 4090", "rtx-4090"), ("rtx4090", "rtx-4090"), ("NVIDIA GeForce RTX 3060 Ti", "rtx-3060-ti"),
        ("A100 80GB", "a100-80gb"), ("AMD Instinct MI325X", "mi325x"), ("Apple M4 Max 64GB", "m4-max-64gb"),
    ],
)  # fmt: skip
def test_case_separators_and_the_makers_name_do_not_count(given: str, key: str):
    assert parse_query(f"{RESNET}&gpu={given}").gpu == key


def test_the_name_that_a_driver_prints_is_as_good_as_the_key():
    names = Counter(letters(row["driver_name"]) for row in read_rows())
    alone = [row for row in read_rows() if row["driver_name"] and names[letters(row["driver_name"])] == 1]
    assert len(alone) > 60
    assert [find_gpu(row["driver_name"]).key for row in alone] == [row["key"] for row in alone]
    assert [find_gpu(gpu.name).key for gpu in GPUS.values()] == list(GPUS)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("Tesla V100-SXM2-16GB", "v100-16gb"), ("NVIDIA A100 80GB PCIe", "a100-80gb"), ("H100 SXM5 80GB", "h100-80gb"),
        ("RTX 4090 24 GB", "rtx-4090"), ("NVIDIA H100 80GB PCIe", "h100-pcie"), ("h100 pcie", "h100-pcie"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ],
)  # fmt: skip
def test_how_a_device_is_built_does_not_count(given: str, key: str):
    assert find_gpu(given).key == key


@pytest.mark.parametrize("given", ["1x" * 490 + "a", "8x" * 20 + "h100", "a1" * 400 + "y", "x" * 999])
def test_a_long_or_nested_name_is_refused_at_once(given: str):
    """The page reads it in its event loop: the device is looked for under the whole name, and under one part of it."""
    looked = mock.patch.object(gpu_keys, "_key_of_name", wraps=gpu_keys._key_of_name)
    with looked as looked, pytest.raises(RefusedValueError, match="a key that"):
        find_gpu(given)
    assert looked.call_count <= 2


def test_suggestions_are_keys():
    with pytest.raises(RequestError, match="did you mean") as refused:
        parse_query(f"{RESNET}&gpu=rtx")
    (refusal,) = refused.value.refusals
    assert set(refusal.todo.removeprefix("did you mean ").rstrip("?").split(", ")) <= GPUS.keys()


def test_conflicts_are_judged_by_its_rules():
    assert parse_query(f"{RESNET}&gpu={EXAMPLE}&expandable=1&optimizer_impl=fused").expandable_segments
    with pytest.raises(RequestError, match=r"^gpu: given 'custom:24GiB', allowed custom:<memory>@<capability>"):
        parse_query(f"{RESNET}&gpu=custom:24GiB&expandable=1")


def test_python_takes_the_same_keys():
    import torch

    def estimate(gpu: str):
        return sizer.size_module(lambda: torch.nn.Linear(64, 64), (torch.zeros(8, 64),), gpu=gpu)

    own, known = estimate("custom:24084MiB@8.9"), estimate("rtx-4090")
    assert own.gpu.key == "custom:24084MiB@8.9"
    assert own.estimates[0].peak_allocated_bytes == known.estimates[0].peak_allocated_bytes
    assert own.estimates[0].peak_reserved_bytes == known.estimates[0].peak_reserved_bytes


def test_all_memory_of_a_card_as_wsl_shows_it_is_of_several_cards():
    assert {"rtx-4090", "rtx-3090", "rx-7900-xtx"} <= set(keys_of_memory(round(23.99 * 2**30)))
    assert "l4" not in keys_of_memory(round(23.99 * 2**30))
    assert keys_of_memory(round(139.8 * 2**30)) == ["h200"]
