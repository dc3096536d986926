"""Streams where there is no device: a trace runs everything in one order, whatever stream code asks for.

`torch.Stream()` and `torch.cuda.default_stream()` ask the driver, which a machine without a GPU does not have (transformers'
offloaded caches prefetch on a stream of their own). What stands in for them waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

ONE_STREAM = "work on a second stream was taken to run in the order in which it was asked for, from one pool of memory"


@contextmanager
def one_stream(stand_in: Callable[[str], None]) -> Iterator[None]:
    """Within the context streams can be made, entered and waited for; `stand_in` notes that another one was asked for."""

    class Stream:
        """A stream that is the only one, as far as memory is concerned."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            stand_in(ONE_STREAM)

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def wait_stream(self, stream: Any) -> None:
            """Wait for nothing: what the other stream was asked for is done."""

        def synchronize(self) -> None:
            """Wait for nothing."""

    def only(device: Any = None) -> Stream:
        return Stream()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "Stream", Stream))
        for name in ("default_stream", "current_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, only))
        yield
