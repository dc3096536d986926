from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from sizer.device.comparison.alignment import Alignment, common_subsequence, longest_common_subsequence, operator_name
from sizer.device.comparison.divergence import first_divergence, join_shares, largest_divergences, scratch_of, shares_at
from sizer.tape.tape import Tape
from tests.device.tapes import tape_of, training

CLONE = [("+", "c", 5_000, "aten::clone", "two.norm"), ("+", "d", 70, "aten::mul", "two.norm"), "-d", "-c"]


def align(device: list, estimate: list | None = None) -> Alignment:
    return Alignment(tape_of(estimate or training()), tape_of(device))


# ----------------------------------------------------------------------------------------------------------- the pairs


def test_the_same_work_never_parts():
    alignment = align(training(sides="device"))
    assert alignment.estimate_partner == list(range(9))
    assert alignment.differences == ()
    assert first_divergence(alignment) is None
    assert largest_divergences(alignment) == ()
    assert scratch_of(alignment) == ()


def test_the_order_of_releases_between_two_allocations_does_not_matter():
    device = training(sides="device")
    end = device.index("-g1")
    device[end : end + 2] = ["-g2", "-g1"]
    assert first_divergence(align(device)) is None


def test_the_order_in_which_a_model_is_loaded_does_not_matter():
    device = training(sides="device")
    device[0], device[1] = device[1], device[0]
    assert first_divergence(align(device)) is None


def test_an_operator_may_allocate_its_workspace_before_or_after_its_result():
    mm = "aten.mm.default"
    before = [("+", "c", 9_000, "aten::clone", "m"), ("+", "r", 9_000, "aten::mm", "m"), "-c", "-r"]
    after = [("+", "r", 9_000, mm, "m"), ("+", "c", 9_000, mm, "m", "workspace"), "-c", "-r"]
    alignment = align(training(forward=before, sides="device"), training(forward=after))
    assert -1 not in alignment.estimate_partner
    assert first_divergence(alignment) is None


def test_a_result_is_not_taken_for_the_scratch_before_it():
    # The device's kernel holds 12,000 bytes inside, as many as its result has, which comes later.
    scratch = [("+", "s", 12_000, "aten::mm", "two"), "-s"]
    alignment = align(training(forward=scratch, sides="device"))
    # blocks: w1 w2 x a1 a2 of the estimate, w1 w2 x a1 s a2 of the device
    assert alignment.estimate_partner[4] == 5
    assert alignment.device_partner[4] == -1


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten.addmm.default", "addmm"),
        ("aten::addmm", "addmm"),
        ("aten._log_softmax.default", "log_softmax"),
        ("aten::_log_softmax", "log_softmax"),
        ("Module.to", "Module"),
    ],
)
def test_operators_of_tracer_and_profiler_have_one_name(op: str, name: str):
    assert operator_name(op) == name


# ------------------------------------------------------------------------------------------------------- where they part


def test_an_allocation_that_the_estimate_lacks():
    alignment = align(training(forward=CLONE, sides="device"))
    found = first_divergence(alignment)
    assert (found.kind, found.phase, found.times) == ("missing", "forward", 1)
    assert (found.device_op, found.device_module, found.measured_bytes) == ("aten::clone", "two.norm", 5_000)
    assert (found.op, found.module, found.estimated_bytes) == ("aten.mm.default", "one", 0)
    # weights 1,000,000, input 4,000, first activation 8,000; the device has its copy besides
    assert (found.estimated_level_bytes, found.measured_level_bytes) == (1_012_000, 1_017_000)
    assert found.level_difference_bytes == -5_000
    assert found.describe() == (
        "forward: the device allocates 4.88 KiB in aten::clone in two.norm, the estimate does not "
        "(after aten.mm.default in one)"
    )


def test_an_allocation_that_the_device_does_not_make():
    estimate = training(forward=[("+", "m", 3_000, "aten.dropout.default", "two.drop", "activation")])
    found = first_divergence(align(training(sides="device"), estimate))
    assert (found.kind, found.op, found.module) == ("extra", "aten.dropout.default", "two.drop")
    assert (found.estimated_bytes, found.measured_bytes) == (3_000, 0)
    assert found.level_difference_bytes == 3_000
    assert "the device does not (after aten::mm in one)" in found.describe()


def test_an_allocation_of_another_size():
    device = training(sides="device")
    device[4] = ("+", "a1", 8_192, "aten::mm", "one", "activation")
    found = first_divergence(align(device))
    assert (found.kind, found.estimated_bytes, found.measured_bytes, found.most_bytes) == ("size", 8_000, 8_192, 192)
    assert found.level_difference_bytes == -192
    assert "takes 7.81 KiB in the estimate and 8.00 KiB on the device (aten::mm)" in found.describe()


def test_a_release_that_comes_later_or_earlier_than_on_the_device():
    device = training(sides="device")
    device.remove("-a2")
    device.insert(device.index("=backward"), "-a2")  # after g1 was allocated, on the device alone
    found = first_divergence(align(device))
    assert (found.kind, found.phase, found.op, found.module) == ("earlier", "backward", "aten.mm.default", "two")
    assert found.level_difference_bytes == -12_000
    assert "releases 11.72 KiB of aten.mm.default in two earlier than the device" in found.describe()
    swapped = first_divergence(Alignment(tape_of(device), tape_of(training())))
    assert (swapped.kind, swapped.level_difference_bytes) == ("later", 12_000)


def test_the_largest_divergences_come_first_and_alike_ones_are_one():
    twice = [
        *[("+", f"t{i}", 100 + i, "aten::mul", "two") for i in range(7)],
        *[("+", f"u{i}", 2_000, "aten::sin", "two") for i in range(2)],
    ]
    found = largest_divergences(align(training(forward=twice, sides="device")))
    # two blocks of 2,000 bytes at once; 100 + 101 + ... + 106 = 721
    assert [(one.device_op, one.times, one.most_bytes) for one in found] == [
        ("aten::sin", 2, 4_000),
        ("aten::mul", 7, 721),
    ]
    assert found[0].describe().endswith(", 2 times")


def test_what_comes_one_after_the_other_is_not_held_at_once():
    turns = []
    for i in range(3):
        turns += [("+", f"t{i}", 900, "aten::clone", "two"), ("+", f"k{i}", 50, "aten::mm", "k"), f"-t{i}"]
    estimate = [("+", f"k{i}", 50, "aten.mm.default", "k") for i in range(3)]
    (found,) = largest_divergences(align(training(forward=turns, sides="device"), training(forward=estimate)))
    assert (found.times, found.most_bytes) == (3, 900)


def test_numbers_that_autograd_wraps_are_passed_over():
    alignment = align(training(forward=[("+", "n", 8, "aten::mul", "two")], sides="device"))
    assert first_divergence(alignment) is None
    assert len(alignment.differences) == 1


# -------------------------------------------------------------------------------------------------------------- scratch


def test_what_a_kernel_holds_inside_is_named_by_its_operator():
    inside = [("+", "s", 20_000, "aten::mm", "two"), ("+", "t", 500, "aten::mm", "two"), "-s", "-t"]
    alignment = align(training(forward=inside, sides="device"))
    (found,) = scratch_of(alignment)
    assert (found.op, found.module, found.phase, found.times) == ("aten::mm", "two", "forward", 1)
    # 20,500 bytes beyond what was there before; when the call ends its result of 12,000 stands in their place
    assert (found.most_bytes, found.estimated_bytes) == (8_500, 0)
    assert first_divergence(alignment) is None


def test_scratch_that_is_gone_before_a_larger_result_costs_nothing():
    inside = [("+", "s", 7_000, "aten::mm", "two"), "-s"]
    assert scratch_of(align(training(forward=inside, sides="device"))) == ()


def test_scratch_is_compared_with_what_the_estimate_models():
    def call(op: str, *sizes: int) -> list:
        held = [("+", f"s{i}", size, op, "conv") for i, size in enumerate(sizes)]
        return [*held, *(f"-s{i}" for i in range(len(sizes))), ("+", "out", 100, op, "conv"), "-out"]

    alignment = align(
        training(forward=call("aten::mkldnn_convolution", 6_000, 1_000), sides="device"),
        training(forward=call("aten.convolution.default", 4_000)),
    )
    (found,) = scratch_of(alignment)
    assert (found.op, found.most_bytes, found.estimated_bytes) == ("aten::mkldnn_convolution", 7_000, 4_000)


# --------------------------------------------------------------------------------------------------------------- shares


def test_shares_add_up_to_the_difference_of_the_levels():
    estimate = training(forward=[("+", "m", 3_000, "aten.dropout.default", "two.drop", "activation")])
    alignment = align(training(forward=CLONE[:1], sides="device"), estimate)
    end = alignment.device.marks[1][0]
    shares = shares_at(alignment, "device", end)
    assert [(share.kind, share.difference_bytes) for share in shares] == [("missing", -5_000), ("extra", 3_000)]
    here, there = alignment.corresponding("device", end)
    assert alignment.sides["estimate"].levels[here] - alignment.sides["device"].levels[there] == 3_000 - 5_000
    assert join_shares(shares) == (
        "the device holds 4.88 KiB by aten::clone in two.norm (temporary) that the estimate has not; "
        "the estimate holds 2.93 KiB by aten.dropout.default in two.drop (activation) that the device has not"
    )


@pytest.mark.parametrize("seed", range(8))
def test_shares_add_up_at_every_place_of_random_work(seed: int):
    one, other = random_work(seed, 300), random_work(seed, 300, change=0.1)
    alignment = Alignment(one, other)
    for side, tape in (("estimate", one), ("device", other)):
        for position in range(0, len(tape.order) + 1, 17):
            here, there = alignment.corresponding(side, position)
            difference = alignment.sides["estimate"].levels[here] - alignment.sides["device"].levels[there]
            assert sum(share.difference_bytes for share in shares_at(alignment, side, position)) == difference


# -------------------------------------------------------------------------------------------------- common subsequences


@pytest.mark.parametrize("seed", range(30))
def test_the_common_subsequence_is_a_longest_one(seed: int):
    rng = random.Random(seed)
    one, two = ([rng.randrange(4) for _ in range(rng.randrange(1, 40))] for _ in range(2))
    for find in (longest_common_subsequence, common_subsequence):
        pairs = find(one, two)
        assert all(one[i] == two[j] for i, j in pairs)
        assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
        assert len(pairs) == length_of_longest(one, two)


def test_nothing_in_common():
    assert longest_common_subsequence([], [1]) == []
    assert common_subsequence([1, 2], [3]) == []


def length_of_longest(one: list, two: list) -> int:
    """The textbook's dynamic programme."""
    row = [0] * (len(two) + 1)
    for item in one:
        before = row
        row = [0]
        for index, other in enumerate(two):
            row.append(before[index] + 1 if item == other else max(before[index + 1], row[index]))
    return row[-1]


# ---------------------------------------------------------------------------------------------------------------- speed


def random_work(seed: int, events: int, *, change: float = 0.0) -> Tape:
    """Work of few distinct sizes, as networks have; `change` is how many of its blocks are left out or come twice."""
    rng, changes = random.Random(seed), random.Random(seed + 1)
    sizes = [rng.randrange(1, 10**6) for _ in range(20)]
    steps: list = []
    alive: list[str] = []
    for number in range(events):
        if alive and rng.random() < 0.5:
            name = alive.pop(rng.randrange(len(alive)))
            steps.append(f"-{name}")
        else:
            name, size = f"b{number}", rng.choice(sizes)
            alive.append(name)
            steps.append(("+", name, size, f"aten::op{size % 7}", f"layer{number % 50}"))
        if number + 1 in (events // 3, 2 * events // 3, events):
            steps.append(f"={('load', 'forward', 'step2')[3 * number // events]}")
    gone = {step[1] for step in steps if isinstance(step, tuple) and changes.random() < change / 2}
    kept = []
    for step in steps:
        name = step[1] if isinstance(step, tuple) else step[1:]
        if name in gone:
            continue
        kept.append(step)
        if isinstance(step, tuple) and changes.random() < change / 2:
            kept += [("+", f"{name}x", changes.choice(sizes), "aten::copy", step[4]), f"-{name}x"]
    return tape_of(kept)


def test_twenty_thousand_events_are_aligned_in_less_than_two_seconds():
    one, other = random_work(1, 20_000), random_work(1, 20_000, change=0.2)
    start = time.process_time()
    alignment = Alignment(one, other)
    assert first_divergence(alignment) is not None
    assert len(largest_divergences(alignment)) == 5
    assert scratch_of(alignment)
    assert time.process_time() - start < 2
