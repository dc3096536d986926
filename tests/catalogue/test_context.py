"""What a process holds outside the allocator: the rule is the one that the published messages give."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from sizer.catalogue import contexts
from sizer.catalogue.contexts import BYTES_PER_THREAD, THREADS_PER_MULTIPROCESSOR, context_of, libraries_of
from sizer.catalogue.gpus import GPUS
from tests.benchmarks.bench_outside import ENOUGH, derive, mib, percentile, read_chips, read_messages, used

MIB = 2**20
ARCHITECTURES = (contexts.VOLTA, contexts.TURING, contexts.AMPERE, contexts.ADA, contexts.HOPPER, contexts.BLACKWELL)


@pytest.fixture(scope="module")
def messages():
    return read_messages()


@pytest.fixture(scope="module")
def rule(messages):
    return derive(used(messages))


def test_the_numbers_are_those_of_the_messages(rule):
    ours = {libraries.architecture: (libraries.median_mib, libraries.messages) for libraries in ARCHITECTURES}
    data = {name: (round(found), rule.counts[name]) for name, found in rule.medians.items()}
    assert ours == data
    together = (round(rule.together), sum(rule.counts.values()))
    assert together == (contexts.ANY.median_mib, contexts.ANY.messages)
    spread = (ceil(rule.below), ceil(rule.above))
    assert spread == (contexts.BELOW_MIB, contexts.ABOVE_MIB)
    assert min(rule.counts.values()) >= ENOUGH


def test_two_kibibytes_a_thread(rule):
    # any two messages from different GPUs, all architectures together; libraries differ besides
    assert rule.slope == pytest.approx(BYTES_PER_THREAD, rel=0.1)
    # the context alone on an RTX 6000 Ada, read from nvidia-smi: 142 * 1536 * 2048 B = 426 MiB
    assert 142 * THREADS_PER_MULTIPROCESSOR[8, 9] * BYTES_PER_THREAD == 426 * MIB


def test_the_range_holds_nineteen_of_twenty_messages(messages):
    kept = used(messages)
    assert len(kept) >= 100
    assert 0.945 <= sum(message.held for message in kept) / len(kept) <= 0.97


def test_messages_of_gpus_that_were_left_out_lie_in_the_range(messages):
    kept = used(messages)
    held = []
    for chip in {message.chip for message in kept}:
        rest = derive([message for message in kept if message.chip != chip])
        for message in kept:
            if message.chip == chip:
                middle = rest.medians.get(chip.architecture, rest.together)
                held.append(-rest.below <= message.libraries_mib - middle <= rest.above)
    # 116 of 123 when written
    assert sum(held) / len(held) >= 0.92


def test_the_same_gpus_have_the_same_context_in_the_catalogue():
    names = {
        "t4": "T4", "v100-16gb": "V100", "v100-32gb": "V100", "rtx-2080-ti": "RTX 2080 Ti", "rtx-3080-10gb": "RTX 3080",
        "rtx-3090": "RTX 3090", "rtx-4090": "RTX 4090", "rtx-5090": "RTX 5090", "rtx-a6000": "RTX A6000", "l40s": "L40S",
        "a10g": "A10G", "a100-40gb": "A100", "a100-80gb": "A100", "h100-80gb": "H100", "h100-pcie": "H100 PCIe",
        "h200": "H200", "b200": "B200",
    }  # fmt: skip
    chips = read_chips()
    for key, name in names.items():
        found = context_of(chips[name].threads, chips[name].capability)
        gpu = GPUS[key]
        assert gpu.capability == chips[name].capability
        ours = (gpu.context_low_bytes, gpu.context_bytes, gpu.context_high_bytes)
        assert ours == (found.low_bytes, found.typical_bytes, found.high_bytes)
        assert gpu.source.endswith(f"outside PyTorch: {found.source}")


def test_the_arithmetic():
    # an H200: 132 * 2048 threads of 2 KiB are 528 MiB; libraries 149; 153 below, 589 above
    found = context_of(132 * 2048, (9, 0))
    assert (found.low_bytes, found.typical_bytes, found.high_bytes) == (524 * MIB, 677 * MIB, 1266 * MIB)
    # a very small one: 4 * 1536 threads are 12 MiB, and 81 for Ada; 93 - 153 is nothing
    assert context_of(4 * 1536, (8, 9)).low_bytes == 0


def test_an_architecture_without_messages_is_given_what_all_have_together():
    assert libraries_of((6, 1)) is contexts.ANY
    assert libraries_of(None) is contexts.ANY
    assert libraries_of((8, 7)) is contexts.AMPERE
    assert libraries_of((8, 9)) is contexts.ADA


def test_a_message_is_used_only_where_it_can_be(messages):
    good = used(messages)[0]
    assert used([good]) == [good]
    unusable = {
        "no GPU": replace(good, chip=None),
        "other libraries": replace(good, other_libraries="vLLM"),
        "of torch 2.1": replace(good, torch=(2, 1)),
        "more than the GPU has": replace(good, free_mib=good.total_mib),
        "less than PyTorch alone": replace(good, allocated_mib=good.in_use_mib + 1),
    }
    assert [name for name, message in unusable.items() if used([message])] == []


def test_figures_as_pytorch_prints_them():
    assert [mib(text) for text in ("14.56 GiB", "886.88 MiB", "360.00 KiB", "0 bytes")] == [
        14909.44,
        886.88,
        0.3515625,
        0,
    ]
    # half-way between 1 and 2, the places being 0 to 4: 25 % is place 1, 5 % is place 0.2
    assert (percentile([5, 1, 2, 3, 4], 25), percentile([5, 1, 2, 3, 4], 5)) == (2, 1.2)
