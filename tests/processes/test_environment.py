"""What a child process finds in its environment, and what it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sizer.processes.environment import PROJECT, environment


def test_the_project_can_be_imported_and_the_home_is_the_folder_given(tmp_path: Path) -> None:
    made = environment(str(tmp_path))
    assert PROJECT in made["PYTHONPATH"].split(os.pathsep)
    assert made["HF_HUB_OFFLINE"] == "1" and made["HOME"] == made["HF_HOME"] == str(tmp_path)


def test_sets_of_words_have_one_order_in_every_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors that a model makes in the order of such a set are released in it: 2 MiB of Gemma 3 12B's reserved memory."""
    orders = set()
    for seed in ("1", "2", "3"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        words = "print([*{'full_attention', 'sliding_attention', 'chunked_attention', 'linear_attention'}])"
        command = [sys.executable, "-c", words]
        orders.add(subprocess.run(command, env=environment(str(tmp_path)), capture_output=True, text=True, check=True).stdout)
    assert len(orders) == 1


def test_a_child_gets_accelerators_where_it_needs_them_but_no_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")  # without which ranks do not meet on some machines
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("HF_TOKEN", "secret")
    without, made = environment(str(tmp_path)), environment(str(tmp_path), accelerators=True)
    assert (without["CUDA_VISIBLE_DEVICES"], without["OMP_NUM_THREADS"]) == ("", "1")
    assert (made["CUDA_VISIBLE_DEVICES"], made["OMP_NUM_THREADS"]) == ("1", "3")
    assert made["NCCL_P2P_DISABLE"] == "1" and "NCCL_P2P_DISABLE" not in without
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "HF_TOKEN"} & {*without, *made} and "HIP_VISIBLE_DEVICES" not in made
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES" not in environment(str(tmp_path), accelerators=True)
