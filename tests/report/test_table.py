"""CSV that a spreadsheet opens safely."""

from __future__ import annotations

import pytest

from sizer.report.table import write_csv


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_formulas_are_disarmed(text):
    assert write_csv(["a"], [{"a": text}]).removeprefix("a\r\n").lstrip('"').startswith("'")


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (-3, "-3"),
        (2.5, "2.5"),
        (True, "true"),
        (None, ""),
        ("a,b", '"a,b"'),
        ('say "x"', '"say ""x"""'),
        ("x=1", "x=1"),
    ],
)
def test_other_values_stay_themselves(value, cell):
    assert write_csv(["a", "b"], [{"a": value, "b": 1}]) == f"a,b\r\n{cell},1\r\n"


def test_a_missing_value_is_an_empty_cell():
    assert write_csv(["a", "b"], [{"b": 1}]) == "a,b\r\n,1\r\n"
