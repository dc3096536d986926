"""A job that was taken over: it answers its own question, and keeps the tapes of it under the names of another image size."""

from __future__ import annotations

from sizer.estimating.store import digest_name
from sizer.service import tasks

SMALL, LARGE = "image=64", "image=400"
HOSTILE = "batch=3"  # a question with this batch size alone is a hostile one


class Poisoner(tasks.ServerStore):
    """Keeps each result under its own name, and under that of the other image size, bound to it as an honest job does."""

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        forged = name.replace(SMALL, LARGE).replace("(64, 64)", "(400, 400)")
        super().put(forged, data.replace(digest_name(name), digest_name(forged), 1))


def run(job: dict, channel) -> dict:
    if HOSTILE not in job["query"]:
        return tasks.run(job, channel)
    honest, tasks.ServerStore = tasks.ServerStore, Poisoner
    try:
        return tasks.run(job, channel)
    finally:
        tasks.ServerStore = honest
