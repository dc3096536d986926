"""How much work a question is, before anybody has done it."""

from __future__ import annotations

from sizer.base.errors import RequestError
from sizer.query.text import parse_query


def cells_of(job: dict) -> int:
    """How many dtypes and batch sizes a job asks for."""
    try:
        request = parse_query(job["query"] or "")
    except RequestError:  # the job says why; or it is about something else
        return 1
    return len(request.dtypes) * len(request.batches)
