from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = "import gc; from sizer.base.frozen import freeze, is_frozen; print(is_frozen()); {}(); print(is_frozen())"


@pytest.mark.parametrize("freeze", ["freeze", "gc.freeze"])
def test_it_is_known_whether_objects_are_frozen(freeze: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(freeze)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
