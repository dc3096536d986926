"""What a job can do, by the name of its task. Its functions import torch: only the job server's children run them."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]


def run(job: dict, progress: Progress) -> dict:
    """The plain-data result of a job {"task", "query", "config_text"}. Raises SizerError; KeyError: unknown task."""
    return TASKS[job["task"]](job, progress)


def _estimate(job: dict, progress: Progress) -> dict:
    from sizer.architecture.ingest import read_config
    from sizer.estimator import estimate
    from sizer.request import parse_query

    text = job["config_text"]
    config = None if text is None else read_config(text)
    return estimate(parse_query(job["query"]), config=config, progress=progress).to_dict()


def _models(job: dict, progress: Progress) -> dict:
    """Every torchvision model that can be named in a query, with the module of torchvision that defines it."""
    from torchvision.models import get_model_builder, list_models

    return {"torchvision": [{"name": name, "family": _family(get_model_builder(name))} for name in list_models()]}


def _family(builder: Callable) -> str:
    return builder.__module__.removeprefix("torchvision.models.")


TASKS = {"estimate": _estimate, "models": _models}
