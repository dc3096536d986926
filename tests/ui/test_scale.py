"""One unit for all rows of a list, and enough digits in each."""

from __future__ import annotations

import pytest

from sizer.base.units import GIB, KIB, MIB
from sizer.ui.charts import legend
from sizer.ui.styling import GIBIBYTES, round_figure, scale_for


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1024 * GIB, "1,024.00 GiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (GIB - 1, "1.00 GiB"),
        (53 * MIB, "0.052 GiB"),
        (-53 * MIB, "−0.052 GiB"),
        (KIB, "<0.001 GiB"),
        (0, "0.00 GiB"),
    ],
)
def test_a_size_has_three_digits_or_more(size: int, text: str):
    assert GIBIBYTES.text(size) == text


def test_the_largest_decides_the_unit():
    assert scale_for([GIB, KIB]).text(MIB) == "<0.001 GiB"
    assert scale_for([50 * MIB, KIB]).text(MIB) == "1.00 MiB"


def test_a_legend_is_text():
    assert "gradient &lt;0.001 GiB</span>" in legend(["gradient"], {"gradient": "<0.001 GiB"})


def test_no_table_shows_a_negative_zero():
    assert str(round_figure(-0.004)) == "0.0"
    assert [round_figure(value, 1) for value in (None, -0.06, 0.04, -1.0)] == [None, -0.06, 0.04, -1.0]
