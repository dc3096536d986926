"""How long an answer takes whose job server is killed, or stopped, in the middle of it.

    python -m tests.benchmarks.bench_faults [--times 20] [--record]

A client with a spare, as in public mode, and real questions. Each time the server in use is killed (SIGKILL) or stopped (SIGSTOP)
while it works on a question, as soon as its spare is ready; the seconds are those from then until the answer is there by itself,
less those that the same question takes undisturbed, and until whoever waits is told of it. Every answer is checked to be the
undisturbed one, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time

from sizer.report.report import Report
from sizer.service.client import JobClient
from sizer.service.job import SILENT
from sizer.service.settings import Settings
from tests.benchmarks.service_figures import add_record, record

QUERY = "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32&batch=1&image={}"
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Faults:
    """A client, and what its questions come to when nothing happens to them."""

    def __init__(self) -> None:
        self._client = JobClient(Settings(spares=1, tapes="", max_jobs=1), ttl_seconds=0.0)
        self._sizes = 0

    def close(self) -> None:
        self._client.close()

    def recovery(self, number: int) -> tuple[float, float]:
        """The seconds that a fault costs a question, and after how many it is told."""
        self._sizes += 1
        query = QUERY.format(64 + 2 * self._sizes)
        self._wait_for_spare()
        job = self._client.submit(query)
        while job.progress in ("", "waiting", "starting the job server"):
            time.sleep(0.001)
        server = job.shared.connection
        began = time.monotonic()
        os.kill(server.process_id, number)
        while not (job.done or job.progress == SILENT or job.shared.connection is not server):
            time.sleep(0.005)
        told = time.monotonic() - began
        disturbed = job.result()
        took = time.monotonic() - began
        undisturbed, usual = self._undisturbed(query)
        assert disturbed.to_json() == undisturbed.to_json()
        return max(took - usual, 0.0), told

    def _wait_for_spare(self) -> None:
        """Wait until a server is in use and another is ready to take its place."""
        self._client.start()
        supervisor = self._client._pool._supervisor
        while not (supervisor.used and supervisor.used.ready and any(spare.ready for spare in supervisor._spares)):
            time.sleep(0.05)

    def _undisturbed(self, query: str) -> tuple[Report, float]:
        began = time.monotonic()
        return self._client.submit(query).result(), time.monotonic() - began


def main() -> None:
    """Print a line for each kind of fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_faults")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="one of them alone")
    parser.add_argument("--times", type=int, default=20, help="how often the server is killed, and how often stopped")
    add_record(parser)
    arguments = parser.parse_args()
    faults, times = Faults(), arguments.times
    for name in arguments.fault or FAULTS:
        seconds, told = zip(*(faults.recovery(FAULTS[name]) for _ in range(times)), strict=True)
        half, worst, at_last = statistics.median(seconds), max(seconds), max(told)
        print(
            f"{name} {times} times: told within {at_last:.2f} s, half within {half:.1f} s, all within {worst:.1f} s, same bytes",
            flush=True,
        )
        if arguments.record:
            what = f"a job server {name} {times} times in the middle of an answer: told within, and later by, half and worst"
            record("bench_faults", {what: f"{at_last:.1f}, {half:.1f} and {worst:.1f} s"})
    faults.close()


if __name__ == "__main__":
    main()
