"""The tasks of the form, in its order: each is a mode, and in training also the trained part.

A mode of `sizer.catalogue.modes` without a row here is offered under its own title, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.modes import MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: its mode, and the values of `train` that it offers (empty if the mode trains nothing)."""

    key: str
    title: str
    mode: str
    trains: tuple[str, ...] = ()


_ROWS = (
    Task(key="training", title="Training", mode="training", trains=("all",)),
    Task(key="fine-tuning", title="Fine-tuning", mode="training", trains=("adapter", "without-tower", "head")),
    Task(key="generate", title="Generation", mode="generate"),
    Task(key="serve", title="Serving", mode="serve"),
    Task(key="inference", title="Inference", mode="inference"),
)
_NAMED = {row.mode for row in _ROWS}
TASKS: dict[str, Task] = {
    row.key: row
    for row in (
        *(row for row in _ROWS if row.mode in MODES),
        *(Task(key=mode.key, title=mode.title, mode=mode.key) for mode in MODES.values() if mode.key not in _NAMED),
    )
}


def task_of(mode: str, train: str) -> str:
    """Return the key of the task of a mode and of the trained part."""
    rows = [row for row in TASKS.values() if row.mode == mode]
    return next((row.key for row in rows if train in row.trains), rows[0].key)
