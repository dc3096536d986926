"""`sizer diff`: what grew between two reports, and whether that is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sizer.__main__ import main
from sizer.base.errors import RequestError
from sizer.running.difference import Change, Tolerance, find_changes, grown, read_report


def report(allocated: int, *, step: int, activation: int, line: int) -> dict:
    row = {
        "dtype": "float32",
        "batch": 1,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": 2 * allocated,
        "process_bytes": 3 * allocated,
        "phases": [{"phase": "load", "peak_allocated_bytes": 7}, {"phase": "step1", "peak_allocated_bytes": step}],
        "at_peak": {"parameter": 7, "activation": activation},
    }
    return {
        "estimates": [row],
        "lines_at_peak": [{"line": "/home/one/work/train.py:3", "bytes": line}],
        "modules_at_peak": [{"module": "", "bytes": 7}],
    }


BEFORE, AFTER = report(1000, step=1000, activation=10, line=5), report(1020, step=1020, activation=30, line=25)


def test_changes_are_by_peak_phase_category_module_and_line():
    assert [(row.group, row.name, row.more_bytes) for row in find_changes(BEFORE, AFTER)] == [
        ("peak", "peak allocated", 20),
        ("peak", "peak reserved", 40),
        ("peak", "process", 60),
        ("phase", "step1", 20),
        ("category", "activation", 20),
        ("line", "work/train.py:3", 20),
    ]


@pytest.mark.parametrize(
    ("tolerance", "names"),
    [
        (Tolerance(share=0.01), ["peak allocated", "peak reserved"]),
        (Tolerance(share=0.02), []),  # 2 % of 1000 and of 2000 are 20 and 40
        (Tolerance(bytes=20), ["peak reserved"]),
        (Tolerance(), ["peak allocated", "peak reserved"]),
    ],
)
def test_a_tolerance_is_a_share_or_bytes(tolerance: Tolerance, names: list[str]):
    assert [row.name for row in grown(find_changes(BEFORE, AFTER), tolerance)] == names


def test_less_is_never_over():
    assert grown([Change(group="peak", name="peak allocated", before_bytes=2, after_bytes=1)], Tolerance()) == []


def test_the_command_returns_5_if_a_peak_grew(tmp_path: Path, capsys: pytest.CaptureFixture):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, data in zip(paths, (BEFORE, AFTER), strict=True):
        Path(path).write_text(json.dumps(data))
    assert main(["diff", *paths]) == 0
    assert "work/train.py:3" in capsys.readouterr().out
    assert main(["diff", *paths, "--fail-over", "1%"]) == 5
    assert "peak allocated grew from 1,000 B to 1,020 B" in capsys.readouterr().err
    assert main(["diff", *paths, "--fail-over", "1 apple"]) == 2


def test_a_file_that_is_no_report_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(RequestError, match="allowed a report with figures"):
        read_report(tmp_path / "a.json")
    with pytest.raises(RequestError, match="No such file"):
        read_report(tmp_path / "b.json")
