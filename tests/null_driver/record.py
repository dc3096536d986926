"""Records what PyTorch's host code allocates for a request, in a process that runs over the null driver.

    python -m tests.null_driver.record QUERY FOLDER NAME

writes the files of a case as the suite does. The source says what it is: not a measurement of a device.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from sizer.device.reader import open_reader
from sizer.device.records import write_measured
from sizer.device.trial import measure_request
from sizer.request import parse_query
from tests.null_driver.values import KnownValues

SOURCE = "PyTorch's and cuDNN's host code on a null driver: no device was measured"


def record(query: str, folder: Path, name: str) -> None:
    """Writes the recording of a query's one cell."""
    with KnownValues():
        measured = measure_request(parse_query(query), open_reader("cuda:0"), timing=False, record=True)
    write_measured(folder, name, replace(measured, measurement=replace(measured.measurement, source=SOURCE)))


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    os._exit(0)  # PyTorch's threads wait for a device that never answers
