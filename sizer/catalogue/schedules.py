"""The schedules of a pipeline: torch.distributed.pipelining's own, and which microbatches each takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One value of `schedule=`: its title, and the name of its class in torch.distributed.pipelining.

    `stages` is the number of stages of each rank. `fills` says that there are at least as many microbatches as stages.
    """

    key: str
    title: str
    class_name: str
    stages: int = 1
    fills: bool = False

    def takes(self, microbatches: int, ranks: int) -> bool:
        """Return whether the schedule supports these numbers of microbatches and ranks.

        Source: errors of the classes' constructors (torch/distributed/pipelining/schedules.py, 2.11 and 2.15).
        """
        if self.fills:
            return microbatches >= ranks
        return self.stages == 1 or microbatches % max(1, microbatches // ranks) == 0


_ROWS = (
    Schedule(key="1f1b", title="1F1B", class_name="Schedule1F1B", fills=True),
    Schedule(key="gpipe", title="GPipe", class_name="ScheduleGPipe"),
    Schedule(key="interleaved", title="interleaved 1F1B", class_name="ScheduleInterleaved1F1B", stages=2),
)

SCHEDULES: dict[str, Schedule] = {row.key: row for row in _ROWS}
