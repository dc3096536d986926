"""The dtype × batch table and the numbers beside it."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from streamlit import dataframe_util
from streamlit.elements.lib.pandas_styler_utils import marshall_styler
from streamlit.proto.ArrowData_pb2 import ArrowData

from sizer.query.request import Request
from sizer.report.fit import VERDICTS
from sizer.ui.focus import PEAK_KINDS, parts
from sizer.ui.page_cache import done_once, worked_out
from sizer.ui.report_tables import LARGEST, fits_frame, style_fits
from sizer.ui.styling import MARKS, TINTS, VERDICT_COLOURS, scale_for
from tests.ui.reports import report_for

REQUEST = Request(
    source="torchvision", name="resnet50", dtypes=("float32", "bfloat16"), batches=(1, 64, 256), gpu="rtx-3060-12gb"
)


@pytest.mark.parametrize("key", PEAK_KINDS)
def test_table_holds_the_measure(key):
    report, kind = report_for(REQUEST), PEAK_KINDS[key]
    frame = fits_frame(REQUEST, report, kind)
    assert list(frame.index) == ["float32", "bfloat16"]
    assert list(frame.columns) == ["1", "64", "256", LARGEST]
    for estimate in report.estimates:
        size = kind.of(estimate) / 2**30  # to three digits or more
        words = f"{MARKS[estimate.verdict]}\N{NO-BREAK SPACE}{size:.{2 if size >= 1 else 3}f}"
        assert frame.loc[estimate.dtype, str(estimate.batch)] == words
    for row in report.max_batch:
        assert frame.loc[row.dtype, LARGEST].startswith(f"{row.batch:,}")


def test_cells_are_tinted_and_the_focus_is_bold():
    report = report_for(REQUEST)
    estimate = report.find("float32", 256)
    assert estimate.fits is False  # 256 samples at 88 MiB are 22 GiB, the device has 12
    html = style_fits(fits_frame(REQUEST, report, PEAK_KINDS["allocated"]), report, estimate).to_html()
    # rounded by hand: peak_allocated_bytes / 2**30 with two decimals
    assert f"✕\N{NO-BREAK SPACE}{estimate.peak_allocated_bytes / 2**30:.2f}" in html
    assert TINTS["does not fit"] in html and TINTS["fits"] in html
    assert html.count("font-weight: 700") == 1


def test_batch_that_was_not_traced_is_said():
    report = report_for(REQUEST)
    report = replace(report, estimates=tuple(e for e in report.estimates if (e.dtype, e.batch) != ("float32", 64)))
    assert fits_frame(REQUEST, report, PEAK_KINDS["allocated"]).loc["float32", "64"] == "not traced"


def test_what_is_still_to_come_has_its_row():
    report = report_for(REQUEST)
    report = replace(report, estimates=report.estimates[:1], max_batch=(), pending=("float32", "bfloat16"))
    frame = fits_frame(REQUEST, report, PEAK_KINDS["allocated"])
    assert frame.loc["float32", "1"].startswith("✓")
    assert list(frame.loc["float32", ["64", "256", LARGEST]]) == ["…"] * 3
    assert list(frame.loc["bfloat16"]) == ["…"] * 4
    assert style_fits(frame, report, None).to_html().count("font-weight") == 0


def test_largest_batch_as_a_range():
    report = report_for(REQUEST)
    rows = (
        replace(report.max_batch[0], batch=120, possible_batch=130),
        replace(report.max_batch[1], batch=None, possible_batch=1300),
    )
    frame = fits_frame(REQUEST, replace(report, max_batch=rows), PEAK_KINDS["allocated"])
    assert list(frame[LARGEST]) == ["120 to 130", "64 to 255"], "a cell of 64 fits, one of 256 does not"


def test_every_verdict_has_a_mark_and_a_tint():
    assert set(MARKS) == set(TINTS) == set(VERDICT_COLOURS) == set(VERDICTS)
    assert len(set(MARKS.values())) == len(set(TINTS.values())) == 4


@pytest.mark.parametrize("key", PEAK_KINDS)
def test_parts_sum_to_the_measure(key):
    for estimate in report_for(REQUEST).estimates:
        assert sum(parts(estimate, PEAK_KINDS[key]).values()) == PEAK_KINDS[key].of(estimate)
        assert min(parts(estimate, PEAK_KINDS[key]).values()) >= 0


def test_scale_is_the_largest_that_shows_digits():
    assert scale_for([1, 2**30]).name == "GiB"
    assert scale_for([2**30 - 1]).name == "MiB"
    assert scale_for([1]).name == scale_for([]).name == "KiB"
    assert scale_for([3 * 2**30]).of(3 * 2**29) == 1.5


def test_what_is_worked_out_once_is_shown_as_pandas_has_it():
    report = report_for(REQUEST)
    estimate = report.find("float32", 64)

    def shown(work_out) -> ArrowData:
        styler = style_fits(fits_frame(REQUEST, report, PEAK_KINDS["process"]), report, estimate).set_uuid("texts")
        proto = ArrowData()
        marshall_styler(proto, work_out(styler), "unused")
        return proto

    def rules(proto: ArrowData) -> list[str]:
        """The CSS of each cell; pandas puts the cells with one style together, in no order."""
        groups = (rule.partition("{") for rule in proto.styler.styles.split("}") if "{" in rule)
        return sorted(f"{cell.strip()} {style}" for cells, _, style in groups for cell in cells.split(","))

    ours, pandas = shown(worked_out), shown(lambda styler: styler)
    assert ours.styler.display_values == pandas.styler.display_values
    assert rules(ours) == rules(pandas)
    assert len(rules(ours)) >= len(report.estimates)


def test_a_table_of_texts_is_converted_once_and_other_tables_each_time(monkeypatch):
    plain, converted = dataframe_util.convert_pandas_df_to_arrow_bytes, []
    monkeypatch.setattr(
        dataframe_util, "convert_pandas_df_to_arrow_bytes", lambda frame: (converted.append(frame), plain(frame))[1]
    )
    report = report_for(REQUEST)
    frame = fits_frame(REQUEST, report, PEAK_KINDS["process"])
    styler = worked_out(style_fits(frame, report, None))
    with done_once():
        for _ in range(2):
            proto = ArrowData()
            marshall_styler(proto, styler, "unused")
            assert proto.styler.display_values == plain(frame.astype(str))
            assert dataframe_util.convert_pandas_df_to_arrow_bytes(styler.data) == plain(frame)
        assert len(converted) == 1
        for size in (1, 2):
            numbers = pd.DataFrame({"bytes": [size]})
            assert dataframe_util.convert_pandas_df_to_arrow_bytes(numbers) == plain(numbers)
    assert len(converted) == 3
