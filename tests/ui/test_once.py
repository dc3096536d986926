"""Compare charts drawn with and without Altair's checks."""

from __future__ import annotations

import altair as alt
import pytest
from altair.utils import schemapi

from sizer.ui import charts
from sizer.ui.capacity import capacity_chart
from sizer.ui.focus import PEAK_KINDS
from sizer.ui.once import done_once
from tests.ui.reports import report_for
from tests.ui.test_tables import REQUEST

REPORT = report_for(REQUEST)
ESTIMATE = REPORT.estimates[0]
CHARTS = {
    "capacity": lambda: capacity_chart(ESTIMATE, REPORT.gpu),
    "peak": lambda: charts.peak_chart(REPORT.estimates[:2], PEAK_KINDS["process"], REPORT.gpu),
    "step": lambda: charts.step_chart(ESTIMATE, REPORT.gpu),
}


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_the_same_without_checks(name: str):
    checked = CHARTS[name]().to_dict()
    with done_once():
        assert not schemapi.DEBUG_MODE
        unchecked = [CHARTS[name]().to_dict() for _ in range(2)]  # the second one from what was listed for the first
    assert schemapi.DEBUG_MODE
    assert unchecked == [checked, checked]


def test_checks_are_left_out_within_the_context_alone():
    wrong = {"mark": "nothing of Vega-Lite's", "data": {"values": []}}
    with done_once():
        alt.Chart.validate(wrong)
    with pytest.raises(schemapi.jsonschema.ValidationError, match="nothing of Vega-Lite's"):
        alt.Chart.validate(wrong)
