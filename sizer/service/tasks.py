"""What a job can do, by the name of its task. Its functions import torch: only the job server's children run them."""

from __future__ import annotations

import json
from collections.abc import Callable

from sizer.errors import RequestError, quote

Progress = Callable[[str], None]


def run(job: dict, progress: Progress) -> dict:
    """The plain-data result of a job {"task", "query", "config_text", ...}. Raises SizerError; KeyError: unknown task."""
    return TASKS[job["task"]](job, progress)


def _estimate(job: dict, progress: Progress) -> dict:
    from sizer.config_json import read_config
    from sizer.estimator import estimate
    from sizer.request import parse_query

    text = job["config_text"]
    config = None if text is None else read_config(text)
    return estimate(parse_query(job["query"]), config=config, progress=progress).to_dict()


def _compare(job: dict, progress: Progress) -> dict:
    """The comparison of what was measured ("measured", JSON as a text) with the estimate of the same work on the same device."""
    from sizer.config_json import read_config
    from sizer.device.comparison.comparison import compare
    from sizer.device.comparison.counterpart import gpu_of, request_of
    from sizer.device.record.recording import Measured
    from sizer.estimator import estimate_cell
    from sizer.memory.codec import DecodeError

    try:
        measured = Measured.from_dict(json.loads(job["measured"]))
    except (DecodeError, ValueError, RecursionError) as error:
        raise RequestError("this is not a measurement", given=quote(str(error), 200)) from None
    measurement = measured.measurement
    text = measurement.config_text
    report, tape = estimate_cell(
        request_of(measurement),
        config=None if text is None else read_config(text),
        gpu=gpu_of(measurement.device),
        progress=progress,
    )
    progress("comparing")
    return compare(report, measured, tape).to_dict()


def _placement(job: dict, progress: Progress) -> dict:
    """Where the tensors of a query's model and batch are, and what is wrong with that."""
    from sizer.config_json import read_config
    from sizer.placement.check import check_request
    from sizer.request import parse_query

    text = job["config_text"]
    config = None if text is None else read_config(text)
    return check_request(parse_query(job["query"]), config=config, report_progress=progress).to_dict()


def _models(job: dict, progress: Progress) -> dict:
    """What the sources' packages build by name, by source: each name with its family, the module that defines it."""
    from sizer.catalogue.sources import import_function, offered_sources

    return {source.key: import_function(source.names)() for source in offered_sources() if source.names}


TASKS = {"estimate": _estimate, "compare": _compare, "placement": _placement, "models": _models}
