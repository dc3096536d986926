"""Words and signed numbers of a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.device.comparison.row import Row
from sizer.ui.quantities import OTHER, device_title, format_difference, format_error, marked_error, quantity_title
from tests.ui.comparisons import CPU, CUDA


@pytest.mark.parametrize(
    ("quantity", "title"),
    [
        ("peak_allocated_bytes", "peak allocated"),
        ("optimizer_bytes", "optimizer state"),
        ("phases.step2.reserved_bytes", "second step: reserved at its end"),
        ("phases.nap.reserved_bytes", OTHER),
        ("**bold**", OTHER),
    ],
)
def test_quantities_have_words_of_ours(quantity, title):
    assert quantity_title(quantity) == title


def test_devices_that_are_no_word_of_pytorchs_are_not_named():
    assert device_title(CPU) == "cpu"
    assert device_title(CUDA) == "cuda:0"
    assert device_title(replace(CPU, device="[a](http://x.example)")) == "a device"
    assert device_title(replace(CPU, device="cuda:0\n# x")) == "a device"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.0, "0 %"),
        (None, "–"),
        (0.0042, "+0.4 %"),
        (-0.00082, "−0.08 %"),
        (-0.00006, "−0.0060 %"),
        (-6e-8, "−0.0001 %"),
        (-0.125, "−12.5 %"),
        (11.0, "+1,100.0 %"),
    ],
)
def test_errors_are_signed(error, text):
    assert format_error(error) == text.replace(" ", "\N{NO-BREAK SPACE}")


def test_differences_are_signed():
    assert [format_difference(size) for size in (0, 1024, -1024)] == ["0", "+1,024", "−1,024"]


@pytest.mark.parametrize(
    ("tolerance", "measured", "allowance", "text"),
    [
        (None, 50, 0, "+100.0 %"),
        (0.0, 100, 0, "✓ exact"),
        (0.0, 99, 0, "✕ +1.0 %"),
        (0.0, 99, 8, "✓ +1.0 %"),
        (0.05, 96, 0, "✓ +4.2 %"),  # |100 - 96| = 4 <= 0.05 * 96 = 4.8
        (0.05, 95, 0, "✕ +5.3 %"),  # 5 > 4.75
        (0.0, 0, 0, "✕ –"),
    ],
)
def test_errors_are_marked_by_what_was_promised(tolerance, measured, allowance, text):
    row = Row(
        quantity="weights_bytes",
        estimated_bytes=100,
        measured_bytes=measured,
        tolerance=tolerance,
        allowance_bytes=allowance,
        allowance="numbers",
    )
    assert marked_error(row) == text.replace(" ", "\N{NO-BREAK SPACE}")
