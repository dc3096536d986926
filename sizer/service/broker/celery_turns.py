"""Turns, by Celery over Redis: messages that hold nothing, one for each question that was put in a line."""

from __future__ import annotations

from celery import Celery

from sizer.service.fair_queue import CELL_SECONDS
from sizer.service.messages import cells_of

NEXT = "sizer.next"  # the one task
QUEUES = ("short", "long")
LONG_SECONDS = 15.0  # of work, from which on a question waits in the long line
VISIBILITY_SECONDS = (
    60  # after which a turn that nobody has acknowledged is delivered again: one too many finds nothing
)


def make_celery(url: str) -> Celery:
    """Celery for apps, which send turns, and workers, which take them. JSON alone is sent and accepted, and no result is kept."""
    celery = Celery("sizer", broker=url, set_as_current=False)
    celery.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_create_missing_queues=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "global_keyprefix": "sizer:celery:",
            "visibility_timeout": VISIBILITY_SECONDS,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
        },
    )
    return celery


def line_of(queue: str, edition: str) -> str:
    """The name of a line, and of its queue of turns: workers of other versions have lines of their own."""
    return f"{queue}-{edition}"


def queue_of(cost_seconds: float) -> str:
    """The queue for so much work."""
    return QUEUES[cost_seconds > LONG_SECONDS]


def work_of(task: str, architecture: str) -> str:
    """Return what the seconds for each cell of a question depend on, as the board knows it."""
    return f"{task}:{architecture}"


def cost_of(question: dict, pace: float | None) -> float:
    """The seconds that a question is taken to need, by those that each cell took before."""
    return cells_of(question) * (CELL_SECONDS if pace is None else pace)
