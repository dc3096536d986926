"""Checkpoints that code of one's own loads: transformers reads them by threads, which no mode of the trace's thread sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def checkpoints_read_at_once() -> Iterator[None]:
    """Within the context transformers loads weight by weight, by the variable that it has for that
    (transformers/core_model_loading.py, read in 5.17 and 5.23)."""
    with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "true"}):
        yield
