"""Advice: plain lines, with numbers from the report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import GPUS
from sizer.memory.advice import advise, smallest_gpu
from sizer.memory.fit import MaxBatch
from sizer.memory.report import Report
from sizer.memory.timeline import OutOfMemory
from tests.memory.reports import make_report

GIB = 2**30
REQUEST = {
    "mode": "training", "optimizer": "adamw", "optimizer_impl": None, "attention": "eager", "checkpointing": False,
    "sequence_length": 2048, "image_size": None,
}  # fmt: skip


def asked(
    *, fits=False, batch: int = 64, largest: int | None = 12, request=(), **numbers
) -> tuple[Report, tuple[str, ...]]:
    """A report of float32 on a T4 (14.56 GiB) with one estimate of these numbers, and its advice."""
    report = make_report()
    values = {
        "process_low_bytes": 19 * GIB, "process_bytes": 20 * GIB, "process_high_bytes": 21 * GIB,
        "peak_allocated_bytes": 19 * GIB, "peak_reserved_bytes": 19 * GIB, "activations_bytes": 12 * GIB,
        "optimizer_bytes": 4 * GIB, "at_peak": {"temporary": 5 * GIB}, "peak_op": "aten._foreach_sqrt.default",
    }  # fmt: skip
    estimate = replace(report.estimates[0], batch=batch, fits=fits, **(values | numbers))
    row = MaxBatch(dtype="float32", batch=largest, possible_batch=largest, reason="" if largest else "not even 1 fits")
    report = replace(report, estimates=(estimate,), max_batch=(row,), request=REQUEST | dict(request))
    return report, advise(report, estimate)


def test_what_does_not_fit_gets_every_remedy_in_order():
    _, lines = asked()
    assert lines == (
        "It does not fit: the process needs 19.00 GiB to 21.00 GiB, the Tesla T4 (16 GB) has 14.56 GiB.",
        "Use a batch of at most 12. To train as with 64, accumulate gradients over 6 such steps.",
        "Use attention=sdpa: eager attention keeps its score matrices for the backward pass.",
        "Use gradient checkpointing: most of the 12.00 GiB kept for the backward pass is then computed again.",
        "Use sequences shorter than 2048 tokens: half of them keep about half of the 12.00 GiB.",
        "Use the optimizer with fused=True: its step needs none of the 5.00 GiB of temporaries.",
        "Use an 8-bit version of adamw: its state of 4.00 GiB shrinks by about 3.00 GiB.",
        "Use an optimizer without state (sgd): it saves 4.00 GiB, and usually trains worse.",
        "Use a larger device: the A10 (24 GB) has 21.98 GiB.",
    )


def has(lines: tuple[str, ...], start: str) -> bool:
    return any(line.startswith(start) for line in lines)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"largest": None}, "Use a batch"),
        ({"batch": 1, "largest": None}, "A smaller batch"),
        ({"activations_bytes": GIB}, "Use gradient checkpointing"),
        ({"activations_bytes": GIB}, "Use attention=sdpa"),
        ({"request": {"checkpointing": True}}, "Use gradient checkpointing"),
        ({"request": {"mode": "inference"}}, "Use gradient checkpointing"),
        ({"request": {"attention": "sdpa"}}, "Use attention=sdpa"),
        ({"request": {"sequence_length": None}}, "Use sequences"),
        ({"request": {"optimizer_impl": "fused"}}, "Use the optimizer with fused=True"),
        ({"peak_op": "aten.mm.default"}, "Use the optimizer with fused=True"),
        ({"request": {"optimizer": "adafactor"}}, "Use an 8-bit"),
        ({"optimizer_bytes": GIB}, "Use an optimizer without state"),
        ({}, "Set PYTORCH_ALLOC_CONF"),
    ],
)
def test_advice_that_would_not_help_is_not_given(changes, line):
    assert not has(asked(**changes)[1], line)


def test_images_may_be_made_smaller():
    lines = asked(request={"sequence_length": None, "image_size": (224, 320)})[1]
    assert has(lines, "Use images smaller than 224x320: half the sides keep about a quarter of the 12.00 GiB.")


def test_batch_norm_is_told_where_there_is_one():
    report, _ = asked()
    norm = replace(report.model.modules[0], path="bn1", class_name="BatchNorm2d")
    report = replace(report, model=replace(report.model, modules=(norm,)))
    assert advise(report, report.estimates[0])[1].endswith(
        "over 6 such steps (batch norm still sees the small batches)."
    )


def test_where_not_even_one_fits_a_smaller_batch_is_no_remedy():
    assert has(asked(largest=None)[1], "A smaller batch is not enough: not even 1 fits.")


def test_what_would_fail_is_named():
    failed = OutOfMemory(
        op="aten.mm.default", module="", phase="forward", requested_bytes=1, allocated_bytes=1, reserved_bytes=1
    )
    assert asked(out_of_memory=failed)[1][0].endswith("; it stops in forward at aten.mm.default (root).")


def test_an_uncertain_fit_says_so():
    assert asked(fits="uncertain")[1][0].startswith("It may or may not fit: the process needs 19.00 GiB to 21.00 GiB")


def test_fragmentation_is_told_with_its_size():
    lines = asked(peak_allocated_bytes=15 * GIB)[1]
    assert has(lines, "Set PYTORCH_ALLOC_CONF=expandable_segments:True (expandable=1 here): up to 4.00 GiB")


def test_another_dtype_that_fits_is_preferred_over_one_that_may():
    report, _ = asked()
    short = report.estimates[0]
    may = replace(short, dtype="bfloat16", process_bytes=9 * GIB, process_high_bytes=10 * GIB, fits="uncertain")
    does = replace(short, dtype="amp-bfloat16", process_bytes=12 * GIB, process_high_bytes=13 * GIB, fits=True)
    lines = advise(replace(report, estimates=(short, may, does)), short)
    assert has(lines, "Use amp-bfloat16: the process then needs 12.00 GiB and fits.")


def test_what_fits_is_told_its_room():
    report, lines = asked(
        fits=True, batch=4, process_low_bytes=4 * GIB, process_bytes=5 * GIB, process_high_bytes=6 * GIB,
        peak_allocated_bytes=4 * GIB, peak_reserved_bytes=4 * GIB, retries=3,
    )  # fmt: skip
    assert lines == (
        "It fits: 9.56 GiB of 14.56 GiB stay free on the Tesla T4 (16 GB).",
        "It fits only because the allocator gives cached memory back and tries again (3 times), which is slow: "
        "a smaller batch runs faster.",
        "The largest batch that fits is 12.",
        "A smaller device would do: the GeForce RTX 5060 Ti (8 GB) has 7.51 GiB.",
    )
    assert report.gpu is GPUS["t4"]


def test_the_smallest_device_is_of_the_same_kind():
    estimate = replace(make_report().estimates[0], process_high_bytes=30 * GIB)
    assert smallest_gpu(estimate, GPUS["t4"]).key == "rtx-5090"
    assert smallest_gpu(estimate, GPUS["m2-16gb"]).key == "m3-max-48gb"
    assert smallest_gpu(estimate, GPUS["jetson-orin-nano-8gb"]).key == "jetson-agx-orin-64gb"
    assert smallest_gpu(estimate, GPUS["rx-7900-xtx"]).key == "radeon-pro-w7900"
    assert smallest_gpu(estimate, find_gpu("custom:24GiB@7.5")).key == "rtx-5090"
    assert smallest_gpu(replace(estimate, process_high_bytes=10**15), GPUS["t4"]) is None


def test_beyond_every_device_it_says_to_split():
    lines = asked(process_high_bytes=300 * GIB)[1]
    assert lines[-1].startswith("No single device of its kind in the catalogue holds 300.00 GiB: split the model")
