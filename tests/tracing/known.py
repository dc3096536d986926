"""Code run as a trace runs it, and what the trace then knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording


def under(recorder: Recorder, code: Callable[[], Any]) -> Any:
    """What the code returns, run as a trace runs it, constructors going to meta."""
    with recording(recorder), torch.device("meta"):
        return code()


def known(recorder: Recorder, tensor: Tensor) -> Any:
    """The values as a list or number, None where they are unknown."""
    assert tensor.device.type == "meta"
    real = recorder.values.get(tensor)
    return None if real is None else real.tolist()
