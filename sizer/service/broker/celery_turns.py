"""Turns, by Celery over Redis: messages that hold nothing, one for each question that was put in a line."""

from __future__ import annotations

from celery import Celery

from sizer.service.fair_queue import CELL_SECONDS
from sizer.service.messages import cells_of

NEXT = "sizer.next"  # the only task
QUEUES = ("short", "long")
LONG_SECONDS = 15.0  # of work: a question with more waits in the long line
VISIBILITY_SECONDS = (
    60  # after which an unacknowledged turn is delivered again; a surplus turn finds no question
)


def make_celery(url: str) -> Celery:
    """Return the Celery app, with which apps send turns and workers receive them.

    Only JSON is sent and accepted, and no result is stored.
    """
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
    """Return the name of a line and of its queue of turns: workers of different versions use different lines."""
    return f"{queue}-{edition}"


def queue_of(cost_seconds: float) -> str:
    """Return the queue for work of this cost."""
    return QUEUES[cost_seconds > LONG_SECONDS]


def work_of(task: str, architecture: str) -> str:
    """Return the board's key for the seconds per cell of a question."""
    return f"{task}:{architecture}"


def cost_of(question: dict, pace: float | None) -> float:
    """Return the expected seconds of a question, from the seconds of earlier cells."""
    return cells_of(question) * (CELL_SECONDS if pace is None else pace)
