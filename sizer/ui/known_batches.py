"""Interval of the largest batch, as a session knows it from limits and levers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import streamlit as st

from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.report.decision import Cell, LeverReport, LimitReport
from sizer.report.interval import Interval
from sizer.report.report import Report

LEARNED = "learned_batches"  # session state: interval of the largest batch, by question
MOST_LEARNED = 64


def learn(found: object) -> None:
    """Keep the largest batches that an answer states."""
    known: dict[str, Interval] = dict(st.session_state.get(LEARNED, {}))
    for question, interval in _facts(found):
        known[question] = interval.meet(known.pop(question, Interval()))
    st.session_state[LEARNED] = dict([*known.items()][-MOST_LEARNED:])


def largest_batch(request: Request, report: Report, dtype: str) -> Interval:
    """Return the interval of a dtype's largest batch, from the report and from later answers on the same question."""
    learned = st.session_state.get(LEARNED, {}).get(_question(request, dtype), Interval())
    return report.largest_batch(dtype).meet(learned)


def _facts(found: object) -> Iterator[tuple[str, Interval]]:
    if isinstance(found, LimitReport):
        request = parse_query(found.query)
        for limit in found.limits:
            if limit.key == "batch":
                yield _question(request, request.dtypes[0]), limit.interval
    if isinstance(found, LeverReport):
        for query, cell in _cells(found):
            request = parse_query(query)
            yield _question(request, cell.dtype), Interval().with_verdict(cell.batch, cell.fits)


def _cells(found: LeverReport) -> Iterator[tuple[str, Cell]]:
    if found.base is not None:
        yield found.query, found.base
    yield from ((row.query, row.cell) for row in found.rows if row.cell is not None)
    if found.smallest is not None:
        yield found.smallest.query, found.smallest.cell


def _question(request: Request, dtype: str) -> str:
    """Return the text of a question without its batch sizes."""
    return format_query(replace(request, dtypes=(dtype,), batches=(1,), focus=None))
