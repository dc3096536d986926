"""Public reports of allocated memory, each repeated by a query: errors stay as recorded, and large ones have a reason."""

from __future__ import annotations

import pytest

import sizer
from tests.benchmarks.tables import read_table
from tests.figures import REPORTS

ROWS = read_table(REPORTS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["work"])
def test_a_report_is_repeated(row: dict[str, str]) -> None:
    (estimate,) = sizer.estimate(row["query"]).estimates
    error = 100 * (estimate.peak_allocated_bytes / int(row["allocated_bytes"]) - 1)
    assert error == pytest.approx(float(row["error_percent"]), abs=0.05)


def test_an_error_above_three_percent_has_a_reason() -> None:
    assert [row["work"] for row in ROWS if abs(float(row["error_percent"])) > 3 and not row["reason"]] == []
