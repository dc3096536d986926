"""How a rank on a GPU meets the others: in which order, what it is told of, and what is said where they do not meet."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from sizer.base.errors import DeviceError
from sizer.device.trial import measuring_process

GPU = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What was called of PyTorch, in its order."""
    made: list[tuple[str, object]] = []
    signature = inspect.signature(dist.init_process_group)

    def init_process_group(*args: object, **options: object) -> None:
        made.append(("init_process_group", signature.bind(*args, **options).arguments))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(("set_device", device)))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    return made


def meet(path: Path, calls: list[tuple[str, object]]) -> None:
    reader = SimpleNamespace(device=GPU, note_others=lambda: calls.append(("note_others", None)))
    measuring_process._join(reader, {"rank": 1, "world": 2, "file": str(path / "meeting")}, 5.0)


def test_others_are_noted_and_the_gpu_is_chosen_before_nccl_is_there(calls: list, tmp_path: Path) -> None:
    meet(tmp_path, calls)
    (noted, _), chosen, (_, options) = calls
    assert (noted, chosen) == ("note_others", ("set_device", GPU))
    assert (options["backend"], options["device_id"]) == ("nccl", GPU)
    assert (options["rank"], options["world_size"], options["timeout"].total_seconds()) == (1, 2, 5.0)


@pytest.mark.parametrize(
    "error", [dist.DistBackendError("NCCL error:\n Duplicate GPU"), ValueError("PyTorch has no NCCL")], ids=str
)
def test_why_ranks_do_not_meet_is_said(
    monkeypatch: pytest.MonkeyPatch, calls: list, tmp_path: Path, error: Exception
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(dist, "init_process_group", fail)
    words = " ".join(str(error).split())
    with pytest.raises(DeviceError, match=f"^rank 1 of 2 could not meet the other ranks on cuda:1: {words}$"):
        meet(tmp_path, calls)
