"""The worker of the command `estimate`: make the report for one query, and write it as text in the requested form.

    stdin    {"query": ..., "config_text": null, "form": "json", "width": null}
    stdout   {"progress": ...}, {"answer": {"text": ..., "report": encoded or null, "failures": {...}, "fits": true, "ended": null}}
             or {"error": ...}

`ended` is the error that ended the job early; the text is then the partial result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sizer.base.errors import JobError
from sizer.processes.wire import error_to_wire
from sizer.service.local.answering import answer
from sizer.service.local.worker import Say, serve
from sizer.service.settings import Settings


def _answer(message: dict, settings: Settings, say: Say) -> dict:
    """Return the answer to a message; if a job ended early, its partial result."""

    def show(text: str) -> None:
        say({"progress": text})

    form, width = message["form"], message["width"]
    parts: list[dict] = []
    try:
        data = answer("estimate", message["query"], message["config_text"], settings, show, show_part=parts.append)
    except JobError as error:
        if not any(part["estimates"] for part in parts):
            raise
        return {"answer": _present(parts, form, width) | {"ended": error_to_wire(error)}}
    return {"answer": _present([data], form, width)}


def _present(parts: Sequence[dict], form: str, width: int | None) -> dict:
    """Return the text of a report that came in parts, its encoded data if it is whole, its failures, and whether all fits.

    The failures are only returned if no step was traced.
    """
    from sizer.base.codec import DecodeError
    from sizer.commands.report_text import format_as
    from sizer.report.report import Report
    from sizer.service.stored_reports import is_whole

    try:
        report, *later = map(Report.from_dict, parts)
    except DecodeError as error:
        raise JobError(f"the job's answer is invalid ({str(error)[:200]})") from None
    for part in later:
        report = part.after(report)
    return {
        "text": format_as(report, form, width),
        "report": json.dumps(parts[-1]) if is_whole(report) else None,
        "failures": report.failures if not report.estimates else {},
        "fits": report.all_fit,
        "ended": None,
    }


if __name__ == "__main__":
    serve(_answer)
