"""The buckets of DDP: what its reducer allocates in C++, which is no gradient of anybody's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from sizer.tracing.log import BlockLog


@contextmanager
def buckets_seen(log: BlockLog) -> Iterator[None]:
    """Within the context what DDP's reducers hold is workspace: their buckets, made with them and again after the first pass.

    Source: torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets), PyTorch 2.11 and 2.15.
    """
    if not dist.is_available():
        yield
        return

    @contextmanager
    def held() -> Iterator[None]:
        start = len(log.order)
        yield
        for block in log.alive(start):
            log.classify(block, "workspace")

    class Reducer(dist.Reducer):
        """PyTorch's own."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with held():
                super().__init__(*args, **kwargs)

        def _rebuild_buckets(self) -> bool:
            with held():
                log.telling = False  # ranks agree on the order once
                try:
                    return super()._rebuild_buckets()
                finally:
                    log.telling = True

    with mock.patch.object(dist, "Reducer", Reducer):
        yield
