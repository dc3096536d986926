"""Objects that ranks send each other, such as the shapes of a pipeline's activations, and checkpoints of rank 0. Imports torch.

One process runs one rank. Objects that a rank sends are stored in a folder of the run, where later ranks read them. A rank that
needs an object from a rank that did not run yet ends. `sizer.running.routes` then runs the sender first, and this rank again. A
checkpoint that no rank has written is assumed to be one of rank 0.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist


class Messages:
    """The objects that this rank sends and receives."""

    def __init__(self, folder: Path, rank: int, need: Callable[[int], NoReturn]) -> None:
        """Store objects in a folder; `need` is called with the rank that has to run first, and does not return."""
        self._folder, self._rank, self._need = folder, rank, need
        self._counts: Counter[tuple[int, int | str]] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make torch.distributed send, receive and broadcast lists of objects through this object, within the context."""
        send, receive = dist.send_object_list, dist.recv_object_list
        self._mark(self._rank).touch()

        def send_and_keep(objects: Any, dst: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> None:
            send(objects, dst, group, *args, **kwargs)
            self._file(self._rank, _global_rank(dst, group, kwargs.get("group_dst"))).write_bytes(pickle.dumps(list(objects)))

        def receive_kept(objects: Any, src: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> int:
            if src is None and kwargs.get("group_src") is None:  # from any rank
                return receive(objects, src, group, *args, **kwargs)
            source = _global_rank(src, group, kwargs.get("group_src"))
            file = self._file(source, self._rank)
            if not file.exists():
                self._need(source)
            # The file is that of a process of this run, in a folder that only this user can write.
            objects[:] = pickle.loads(file.read_bytes())
            return source

        broadcast = dist.broadcast_object_list

        def broadcast_kept(objects: Any, src: int | None = None, group: Any = None, *args: Any, **kwargs: Any) -> None:
            group_source = kwargs.get("group_src")
            source = _global_rank(0 if src is None and group_source is None else src, group, group_source)
            file = self._file_of_group(source, "all", group)
            if source == self._rank:
                broadcast(objects, src, group, *args, **kwargs)
                file.write_bytes(pickle.dumps(list(objects)))
                return
            if not file.exists():
                self._need(source)
            objects[:] = pickle.loads(file.read_bytes())  # written by a process of this run, as above

        # by PyTorch's own names of the arguments
        def gather(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
            if object_gather_list is not None:  # every rank contributes the same object as this rank
                object_gather_list[:] = [obj] * len(object_gather_list)

        def scatter(
            scatter_object_output_list: Any, scatter_object_input_list: Any = None, src: int | None = None, group: Any = None,
            *args: Any, **kwargs: Any,
        ) -> None:  # fmt: skip
            group_source = kwargs.get("group_src")
            source = _global_rank(0 if src is None and group_source is None else src, group, group_source)
            file = self._file_of_group(source, "scattered", group)
            if source == self._rank:
                file.write_bytes(pickle.dumps(list(scatter_object_input_list)))
            elif not file.exists():
                self._need(source)
            place = dist.get_process_group_ranks(group or dist.group.WORLD).index(self._rank)
            scatter_object_output_list[0] = pickle.loads(file.read_bytes())[place]  # written by a process of this run, as above

        with ExitStack() as stack:
            answers: dict[str, Any] = {"send_object_list": send_and_keep, "recv_object_list": receive_kept}
            answers |= {"gather_object": gather, "scatter_object_list": scatter}
            stack.enter_context(mock.patch.multiple(dist, broadcast_object_list=broadcast_kept, **answers))
            stack.enter_context(_gradients_like_outputs())
            yield

    def keep_checkpoint(self, name: str | os.PathLike, content: Any) -> None:
        """Store a checkpoint's content for ranks that run later."""
        self._checkpoint(name).write_bytes(pickle.dumps(content))

    def find_checkpoint(self, name: str | os.PathLike) -> Any:
        """Return the content of a checkpoint that another rank saved, None if there is none. Rank 0 has to run first."""
        file = self._checkpoint(name)
        if file.exists():
            return pickle.loads(file.read_bytes())  # written by a process of this run, as above
        if self._rank and not self._mark(0).exists():
            self._need(0)
        return None

    def _mark(self, rank: int) -> Path:
        return self._folder / f"{rank}.began"

    def _checkpoint(self, name: str | os.PathLike) -> Path:
        digest = hashlib.sha256(os.fsencode(os.path.abspath(name))).hexdigest()
        return self._folder / f"{digest[:32]}.checkpoint"

    def _file_of_group(self, source: int, kind: str, group: Any) -> Path:
        members = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        return self._file(source, f"{kind}-{hashlib.sha256(members.encode()).hexdigest()[:16]}")

    def _file(self, source: int, target: int | str) -> Path:
        self._counts[source, target] += 1
        return self._folder / f"{source}-{target}-{self._counts[source, target]}.pickle"


def _global_rank(rank: int | None, group: Any, rank_in_group: int | None) -> int:
    if rank_in_group is None:
        assert rank is not None, "torch.distributed takes one of both"
        return rank
    return dist.get_global_rank(group or dist.group.WORLD, rank_in_group)


@contextmanager
def _gradients_like_outputs() -> Iterator[None]:
    """Answer with gradients shaped like this stage's outputs, which the next pipeline stage sends.

    Source: torch/distributed/pipelining/stage.py; not in 2.11.
    """
    stages: Any = importlib.import_module("torch.distributed.pipelining.stage")
    receive = getattr(stages.PipelineStage, "_recv_meta", None)
    if receive is None:
        yield
        return

    def receive_meta(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return receive(stage, source)
        return stages._StageBackwardMeta(backward_metas=stages._derive_grad_metas(stage._stage_meta.outputs))

    with mock.patch.object(stages.PipelineStage, "_recv_meta", receive_meta):
        yield
