"""Files that a dry run does not write: the script finds them under their names, and files of the user stay."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sizer.running.checkpoints import Checkpoints, KeptFiles


@pytest.fixture
def files(tmp_path: Path) -> KeptFiles:
    (tmp_path / "kept").mkdir()
    return KeptFiles(lambda: tmp_path / "kept")


def test_a_kept_file_is_there_and_moves(files: KeptFiles, tmp_path: Path):
    (tmp_path / "mine.pt").write_text("mine")
    with files.installed():
        files.add(tmp_path / "best.pt.tmp", 2**40, head=b"head", content="content")
        assert (tmp_path / "best.pt.tmp").exists() and os.path.getsize(tmp_path / "best.pt.tmp") == 2**40
        os.replace(tmp_path / "best.pt.tmp", tmp_path / "mine.pt")
        assert not os.path.exists(tmp_path / "best.pt.tmp") and os.path.getsize(tmp_path / "mine.pt") == 2**40
        shutil.copy2(tmp_path / "mine.pt", tmp_path / "copy.pt")
        os.remove(tmp_path / "mine.pt")
        assert files.find(tmp_path / "copy.pt").content == "content" and files.find(tmp_path / "mine.pt") is None
        assert (tmp_path / "mine.pt").read_text() == "mine"  # the user's own
    assert not (tmp_path / "copy.pt").exists()


def test_a_kept_file_goes_with_its_folder(files: KeptFiles, tmp_path: Path):
    folder = tmp_path / "step-1"
    with files.installed():
        with pytest.raises(RuntimeError, match=r"Parent directory .*step-1 does not exist\."):
            files.add(folder / "model.pt", 8)
        folder.mkdir()
        files.add(folder / "model.pt", 8)
        folder.rename(tmp_path / "step-2")
        assert os.path.isfile(tmp_path / "step-2" / "model.pt") and not os.path.exists(folder / "model.pt")
        shutil.rmtree(tmp_path / "step-2")
        assert files.find(tmp_path / "step-2" / "model.pt") is None
        with pytest.raises(FileNotFoundError, match="step-2"):
            os.remove(tmp_path / "step-2" / "model.pt")


def test_safetensors_reads_the_shapes_again(tmp_path: Path):
    tensors = {"a": torch.empty(3, 5, dtype=torch.bfloat16, device="meta"), "b": torch.empty(0, 2, device="meta")}
    checkpoints = Checkpoints(lambda tensor: tensor.is_meta)
    with checkpoints.installed():
        import safetensors.torch as files

        files.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        files.save_file({"host": torch.ones(2)}, tmp_path / "host.safetensors")
        read = files.load_file(tmp_path / "model.safetensors")
        with files.safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert {name: (one.shape, one.dtype) for name, one in read.items()} == {
            name: (one.shape, one.dtype) for name, one in tensors.items()
        }
    checkpoints.close()
    assert files.save_file is save_file and not (tmp_path / "model.safetensors").exists()
    assert load_file(tmp_path / "host.safetensors")["host"].tolist() == [1.0, 1.0]
    assert checkpoints.not_saved == [str(tmp_path / "model.safetensors")]


def test_a_checkpoint_saved_to_an_open_file_is_loaded_from_another_one(tmp_path: Path):
    name = tmp_path / "model.pt"
    checkpoints = Checkpoints(lambda tensor: tensor.is_meta)
    with checkpoints.installed():
        with open(name, "wb") as file:
            torch.save({"weight": torch.empty(3, 5, device="meta")}, file)
        with open(name, "rb") as file:
            assert torch.load(file, map_location="cpu")["weight"].shape == (3, 5)
        assert torch.load(name, map_location="cpu")["weight"].shape == (3, 5)
        with open(name, "wb") as file:  # of the host alone, in its place
            torch.save(torch.ones(2), file)
        assert torch.load(name).tolist() == [1.0, 1.0]
    checkpoints.close()
    assert checkpoints.not_saved == [str(name)]


def test_a_checkpoint_saved_to_a_buffer_is_kept_under_the_name_that_its_bytes_get(tmp_path: Path):
    """Ultralytics writes the buffer's bytes with pathlib, Lightning to a temporary file that fsspec renames."""
    (tmp_path / "best.pt").write_text("mine")
    checkpoints = Checkpoints(lambda tensor: tensor.is_meta)
    with checkpoints.installed():
        buffer = io.BytesIO()
        torch.save({"weight": torch.empty(3, 5, device="meta")}, buffer)
        buffer.seek(0)
        loaded = [torch.load(buffer, map_location="cpu")]
        (tmp_path / "best.pt").write_bytes(buffer.getvalue())
        with open(tmp_path / "last.tmp", "wb") as file:
            file.write(buffer.getvalue())
        loaded.append(torch.load(tmp_path / "last.tmp", map_location="cpu"))
        shutil.move(tmp_path / "last.tmp", tmp_path / "last.pt")
        loaded += [torch.load(tmp_path / name, map_location="cpu") for name in ("best.pt", "last.pt")]
        with open(tmp_path / "last.pt", "rb") as file:
            loaded.append(torch.load(file, map_location="cpu"))
        assert [one["weight"].shape for one in loaded] == 5 * [(3, 5)]
        os.chmod(tmp_path / "last.pt", 0o600)
        assert os.path.getsize(tmp_path / "last.pt") > 3 * 5 * 4
        (tmp_path / "text").write_bytes(b"other bytes")
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "text"]
    assert (tmp_path / "best.pt").read_text() == "mine"
    assert checkpoints.not_saved == [str(tmp_path / "best.pt"), str(tmp_path / "last.pt")]
