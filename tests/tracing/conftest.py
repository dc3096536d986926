"""A recorder for tests that look at the values it knows."""

from __future__ import annotations

import pytest

from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder


@pytest.fixture
def recorder() -> Recorder:
    """A recorder by the rules of CUDA."""
    return Recorder(Device("cuda", (8, 0)))
