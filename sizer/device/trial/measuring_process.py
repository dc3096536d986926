"""The process that measures: reads its job from stdin, writes progress and one result as JSON lines, and is killed then.

`python -m sizer.device.trial.measuring_process` is started by `sizer.device.trial.launch`; it ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from sizer.base.errors import DeviceError
from sizer.device.readers.reader import Reader
from sizer.processes.child import Progress, redirect_to_null, run_job
from sizer.processes.sandbox import confine
from sizer.processes.wire import from_line

GRACE_SECONDS = 5.0  # added to the limit: the parent kills first; this ends the process if the parent cannot


def run(job: dict, progress: Progress) -> dict:
    """Return the plain data of Measured for a job of `sizer.device.trial.launch.message_for`.

    For several ranks, its "meeting" is {"rank", "world", "file"}: the file at which they meet. Permanently confines this
    process before it reads the architecture. Raises SizerError.
    """
    from sizer.query.text import parse_query

    request = parse_query(job["query"])
    if request.expandable_segments:  # set before torch is imported: its allocator reads it then
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    progress("starting PyTorch")
    reader = _open(job["device"])
    if request.expandable_segments and reader.device.type != "cuda":
        raise DeviceError(
            f"{job['device']} has no expandable segments; only CUDA's allocator has them: remove expandable=1"
        )
    from sizer.device.trial.trial import measure_request

    free_bytes = _free_host_bytes(job["host_bytes"])
    if (meeting := job["meeting"]) is not None:
        progress("waiting for other ranks")
        _join(reader, meeting, job["seconds"])
        free_bytes = free_bytes and free_bytes // meeting["world"]
    confine(job["seconds"] + GRACE_SECONDS, compiles=reader.device.type != "cpu")
    measured = measure_request(
        request,
        reader,
        config=_config(job["config_text"]),
        config_text=job["config_text"],
        timing=job["timing"],
        record=job["record"],
        free_bytes=free_bytes,
        progress=progress,
    )
    return measured.to_dict()


def _open(device: str) -> Reader:
    from sizer.device.readers.open import open_reader

    try:
        return open_reader(device)
    except (RuntimeError, AssertionError) as error:  # PyTorch cannot start the driver
        raise DeviceError(f"{device} cannot be used: {' '.join(str(error).split())[:300]}") from error


def _join(reader: Reader, meeting: dict, seconds: float) -> None:
    from sizer.device.trial.rank import join

    rank, world, file = meeting["rank"], meeting["world"], Path(meeting["file"])
    reader.note_others()  # NCCL's memory for the meeting of the ranks belongs to this process
    try:
        join(reader.device, rank=rank, world=world, meeting=file, seconds=seconds)
    except (RuntimeError, ValueError) as error:  # NCCL, the store, or a PyTorch that was built without NCCL
        said = " ".join(str(error).split())[:300]
        raise DeviceError(f"rank {rank} of {world} could not meet the other ranks on {reader.device}: {said}") from error


def _config(text: str | None) -> dict | None:
    from sizer.base.config_json import read_config

    return None if text is None else read_config(text)


def _free_host_bytes(limit: int | None) -> int | None:
    """Return the free memory of this computer, at most `limit`; None if neither is known."""
    from sizer.device.machine.computer import Host

    known = [value for value in (Host().free_bytes(), limit) if value is not None]
    return min(known, default=None)


def main() -> None:
    """Run the job on stdin; the original stdout only receives its lines."""
    job = from_line(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    pipe = os.dup(1)
    redirect_to_null(1)
    run_job(lambda channel: run(job, channel.progress), pipe)
    os._exit(0)


def _end_with_stdin() -> None:
    """End this process when its parent is gone, on every system, at any point."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


if __name__ == "__main__":
    main()
