"""The catalogue of devices."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from sizer.catalogue.contexts import THREADS_PER_MULTIPROCESSOR
from sizer.catalogue.gpus import GPUS, STAND_IN, in_parts, read_rows
from sizer.catalogue.hardware import HARDWARE, SHARED_KIB
from tests.benchmarks.bench_outside import PUBLISHED
from tests.benchmarks.tables import read_table

CONTRACT = (
    "t4", "v100-16gb", "rtx-3060-12gb", "rtx-3090", "rtx-4060-8gb", "rtx-4090", "l40s", "a100-40gb", "a100-80gb",
    "h100-80gb", "h200", "b200", "m2-ultra-64gb", "cpu",
)  # fmt: skip
MIB = 2**20


def test_the_contract_is_kept():
    assert set(CONTRACT) <= GPUS.keys()
    assert next(iter(GPUS)) == "a100-80gb"  # the default stands first


def test_the_catalogue_is_large_and_no_key_or_name_stands_twice():
    keys, names = (Counter(row[column] for row in read_rows()) for column in ("key", "name"))
    assert [one for one, count in (keys + names).items() if count > 1] == []
    assert len(GPUS) == len(keys) >= 60


def test_makers_stand_together():
    makers = [gpu.maker for gpu in GPUS.values()]
    assert [maker for maker, before in zip(makers, [None, *makers], strict=False) if maker != before] == [
        "NVIDIA", "AMD", "Intel", "Apple", "Host",
    ]  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.key)
def test_every_entry_is_plausible(gpu):
    assert GPUS[gpu.key] is gpu
    assert 0 <= gpu.context_low_bytes <= gpu.context_bytes <= gpu.context_high_bytes < gpu.total_bytes / 5
    known, _, words = gpu.source.partition("; outside PyTorch: ")[0].partition(": ")
    assert known in ("seen", "believed", "nominal") and words
    assert (gpu.capability is not None) == (gpu.backend == "cuda") == (gpu.context_high_bytes > 0)
    # no card shows more than is printed on its box, nor less than 90 % of it (a Mac: 65 % and more)
    boxed = float(gpu.name.rsplit("(", 1)[1].removeprefix("a host with ").split(" ")[0])
    floor = 0.65 if gpu.backend == "mps" else 0.9
    assert floor * boxed * 10**9 < gpu.total_bytes <= boxed * 2**30


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: row["key"])
def test_every_row_is_whole(row):
    assert None not in row and None not in row.values()  # neither more nor fewer cells than columns
    assert row["unified"] in ("", "unified")
    assert row["capability"] == "" or row["maker"] in ("NVIDIA", "AMD")
    assert row["capability"].startswith("gfx") == (row["maker"] == "AMD")
    described = [bool(row[column]) for column in ("driver_name", "l2_kib", "clock_mhz", "memory_mhz")]
    assert all(described) or not any(described)
    assert all(described) == (row["key"] in HARDWARE)


def test_what_was_seen_has_the_address_of_a_page_that_prints_it():
    addresses = {row["key"]: row["address"] for row in read_rows() if row["address"]}
    assert addresses.keys() == {row["key"] for row in read_rows() if row["known"] == "seen"}
    for key, address in addresses.items():
        assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+/\S+", address)
        assert GPUS[key].source.partition("; outside PyTorch: ")[0].endswith(f", at {address}")
    # one script, whose comments hold what torch printed of the one and of the other
    (both,) = (address for address, count in Counter(addresses.values()).items() if count > 1)
    assert [key for key, address in addresses.items() if address == both] == ["h200", "b200"]


def test_addresses_that_are_published_messages_too_print_the_same_total():
    # "79.15 GiB": the messages that the contexts are made of
    totals = {row["source"]: float(row["total"].removesuffix(" GiB")) for row in read_table(PUBLISHED / "outside.csv")}
    alike = {row["key"]: totals[row["address"]] for row in read_rows() if row["address"] in totals}
    assert len(alike) >= 9
    assert {key: total for key, total in alike.items() if abs(total * 2**30 / GPUS[key].total_bytes - 1) > 0.005} == {}


def test_every_capability_has_its_threads_and_shared_memory():
    capabilities = {gpu.capability for gpu in GPUS.values() if gpu.maker == "NVIDIA"}
    assert capabilities == THREADS_PER_MULTIPROCESSOR.keys()
    assert {hardware.capability for hardware in HARDWARE.values()} == SHARED_KIB.keys()


def test_a_gpu_with_more_multiprocessors_holds_more_outside_the_allocator():
    nvidias = [row for row in read_rows() if row["maker"] == "NVIDIA"]
    for capability in {row["capability"] for row in nvidias}:
        alike = sorted((int(row["multiprocessors"]), row["key"]) for row in nvidias if row["capability"] == capability)
        sizes = [GPUS[key].context_bytes for _, key in alike]
        assert sizes == sorted(sizes)


def test_an_h200_has_139_8_gib():
    # printed by torch on such a machine: total_memory=143156MB, 143156 / 1024 = 139.80
    assert GPUS["h200"].total_bytes == 143_156 * 2**20
    assert GPUS["h200"].capability == (9, 0)


def test_the_context_on_rocm_is_what_seven_messages_say():
    # total less free, allocated and unallocated, in GiB: a Radeon RX 7900 XTX and an MI300X
    messages = [round((total - free - own) * 1024) for total, free, own in ((23.98, 1.70, 21.922), (191.98, 0, 191.53))]
    gpu = GPUS["mi300x"]
    assert all(gpu.context_low_bytes <= one * MIB <= gpu.context_high_bytes for one in messages)
    # 318, 342, 365, 461, 772, 838, 952 MiB: the middle, half of the least, twice the most
    sizes = (gpu.context_low_bytes, gpu.context_bytes, gpu.context_high_bytes)
    assert sizes == (159 * MIB, 461 * MIB, 1904 * MIB)


def test_devices_that_are_not_nvidias_say_so_and_what_stands_in():
    assert GPUS["mi300x"].capability == GPUS["arc-b580"].capability == STAND_IN == (8, 0)
    (amd,), (intel,) = GPUS["mi300x"].cautions, GPUS["arc-b580"].cautions
    assert amd.startswith("PyTorch's caching allocator on ROCm is that of CUDA, replayed exactly; kernels and")
    assert intel.startswith("PyTorch's caching allocator for Intel's devices has the rules of CUDA's; kernels and")
    assert amd.endswith("are modelled as for CUDA capability 8.0") and intel.endswith("as for CUDA capability 8.0")


def test_memory_that_is_the_hosts_too_is_said_to_be():
    assert {key for key, gpu in GPUS.items() if any("shares its memory" in text for text in gpu.cautions)} == {
        "dgx-spark", "jetson-agx-orin-64gb", "jetson-agx-orin-32gb", "jetson-orin-nx-16gb", "jetson-orin-nano-8gb",
    }  # fmt: skip
    assert all(GPUS[key].cautions == () for key in CONTRACT)
    assert replace(GPUS["t4"], maker="").cautions == ()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_device_is_in_one_part_and_no_part_is_much_more_work(parts: int):
    found = in_parts(parts)
    assert sorted(gpu.key for part in found for gpu in part) == sorted(GPUS)
    assert min(map(len, found)) > len(GPUS) / parts / 2
    of_rules = [{(gpu.backend, gpu.capability) for gpu in part} for part in found]
    assert sum(map(len, of_rules)) == len(set().union(*of_rules))  # the rules of each are traced once
