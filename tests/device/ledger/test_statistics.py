from __future__ import annotations

import pytest

from sizer.device.ledger.rows import ErrorStatistics, SignedError, error_statistics

PEAK = "peak_allocated_bytes"


def errors(*values: float, quantity: str = PEAK, device: str = "H200", family: str = "CNN") -> list[SignedError]:
    return [SignedError(quantity=quantity, device=device, family=family, error=value) for value in values]


def test_median_worst_and_bias_keep_their_signs():
    (row,) = error_statistics(errors(0.01, -0.04, 0.03, -0.02))
    # sorted: -0.04 -0.02 0.01 0.03; without signs 0.01 0.02 0.03 0.04; the sum is -0.02
    assert row == ErrorStatistics(
        quantity=PEAK,
        device="H200",
        family="CNN",
        count=4,
        median=pytest.approx(-0.005),
        worst=-0.04,
        bias=pytest.approx(-0.005),
        median_size=pytest.approx(0.025),
    )


def test_errors_to_both_sides_have_no_bias_and_still_a_size():
    (row,) = error_statistics(errors(0.05, -0.05))
    assert (row.median, row.bias, row.median_size, abs(row.worst)) == (0, 0, 0.05, 0.05)


def test_one_row_per_quantity_device_and_family_in_their_order():
    found = error_statistics(
        [
            *errors(0.1),
            *errors(0.2, family="transformer"),
            *errors(0.3, device="T4"),
            *errors(0.4, quantity="process_bytes"),
            *errors(0.5),
        ]
    )
    assert [(row.quantity, row.device, row.family, row.count) for row in found] == [
        (PEAK, "H200", "CNN", 2),
        (PEAK, "H200", "transformer", 1),
        (PEAK, "T4", "CNN", 1),
        ("process_bytes", "H200", "CNN", 1),
    ]


def test_families_together():
    (row,) = error_statistics([*errors(0.1), *errors(0.3, family="transformer")], by_family=False)
    assert (row.family, row.count, row.median) == ("all", 2, pytest.approx(0.2))


def test_no_errors_no_statistics():
    assert error_statistics([]) == ()
