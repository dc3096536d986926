"""Whether an estimate fits, in plain lines with numbers from the report."""

from __future__ import annotations

from dataclasses import replace

from sizer.allocator.timeline import OutOfMemory
from sizer.catalogue.gpus import GPUS
from sizer.report.advice import advise
from sizer.report.report import Report
from tests.report.reports import make_report

GIB = 2**30


def asked(*, fits=False, batch: int = 64, **numbers) -> tuple[Report, tuple[str, ...]]:
    """A report of float32 on a T4 (14.56 GiB) with one estimate of these numbers, and its advice."""
    report = make_report()
    values = {
        "process_low_bytes": 19 * GIB, "process_bytes": 20 * GIB, "process_high_bytes": 21 * GIB,
        "peak_allocated_bytes": 19 * GIB, "peak_reserved_bytes": 19 * GIB,
    }  # fmt: skip
    estimate = replace(report.estimates[0], batch=batch, fits=fits, **(values | numbers))
    report = replace(report, estimates=(estimate,))
    return report, advise(report, estimate)


def test_what_does_not_fit_says_what_is_needed():
    _, lines = asked()
    assert lines == ("It does not fit: the process needs 19.00 GiB to 21.00 GiB, the Tesla T4 (16 GB) has 14.56 GiB.",)


def test_what_would_fail_is_named():
    failed = OutOfMemory(
        op="aten.mm.default", module="", phase="forward", requested_bytes=1, allocated_bytes=1, reserved_bytes=1
    )
    assert asked(out_of_memory=failed)[1][0].endswith("; it stops in forward at aten.mm.default (root).")


def test_an_uncertain_fit_says_so():
    # 4 GiB of 19 are cache that has to be returned at least: the T4 has 14.56
    assert asked(fits="uncertain")[1] == (
        "It may not fit: the process would take 19.00 GiB to 21.00 GiB on a larger device, the Tesla T4 (16 GB) has 14.56 GiB, "
        "and the allocator has to return 4.44 GiB of its cache at least.",
    )
    assert asked(fits="uncertain", process_low_bytes=14 * GIB)[1][0].endswith("has 14.56 GiB.")


def test_a_tight_fit_says_how_much_cache_is_returned():
    _, lines = asked(
        fits=True, process_low_bytes=13 * GIB, process_bytes=14 * GIB, process_high_bytes=16 * GIB, retries=3,
        returned_bytes=3 * GIB // 2,
    )  # fmt: skip
    assert lines == (
        "It is tight: it fits only if the allocator returns up to 1.50 GiB of its cache, which is slow; the process would take "
        "13.00 GiB to 16.00 GiB on a larger device, the Tesla T4 (16 GB) has 14.56 GiB.",
        "Already by the middle of the range the allocator returns cache and tries again (3 times).",
    )


def test_what_fits_is_told_its_room():
    report, lines = asked(
        fits=True, batch=4, process_low_bytes=4 * GIB, process_bytes=5 * GIB, process_high_bytes=6 * GIB,
        peak_allocated_bytes=4 * GIB, peak_reserved_bytes=4 * GIB,
    )  # fmt: skip
    assert lines == (
        "It fits: 8.56 GiB to 10.56 GiB of 14.56 GiB stay free on the Tesla T4 (16 GB).",
    )
    assert report.gpu is GPUS["t4"]
