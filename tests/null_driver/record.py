"""Records what PyTorch's host code allocates for a request, in a process that runs over the null driver.

    python -m tests.null_driver.record QUERY FOLDER NAME

writes the files of a case as the suite does; a case that fails is not written. The source says what it is: no measurement.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from sizer.device.readers.open import open_reader
from sizer.device.record.recording import Measured, write_measured
from sizer.device.trial.trial import measure_request
from sizer.query.text import parse_query
from tests.null_driver.values import KnownValues

SOURCE = "PyTorch's and cuDNN's host code on a null driver: no device was measured"


def record(query: str, *, values: AbstractContextManager[object] | None = None) -> Measured:
    """Return what was allocated for a query's one cell, in bytes; `values` follows small values, if not `KnownValues` does."""
    request = parse_query(query)
    # torchvision's modules close their fast paths to a function mode, and ask for no values but in detection
    with values or (nullcontext() if request.source == "torchvision" else KnownValues()):
        measured = measure_request(request, open_reader("cuda:0"), timing=False, record=True)
    found = measured.measurement
    device = replace(found.device, name=f"{found.device.name} (null driver)")
    return replace(measured, measurement=replace(found, device=device, source=SOURCE))


if __name__ == "__main__":
    recorded = record(sys.argv[1])
    failure = recorded.measurement.failure
    if failure is None:
        write_measured(Path(sys.argv[2]), sys.argv[3], recorded)
    print(json.dumps({"failure": failure}), flush=True)
    os._exit(0 if failure is None else 1)  # PyTorch's threads wait for a device that never answers
