"""What jobs have traced is kept for the next: bounded, by architecture and version, and a file that fails is none."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from sizer.base.units import MIB
from sizer.service import tapes
from sizer.service.tapes import TapeStore
from sizer.service.variables import default_folder

A, B = "a" * 64, "b" * 64


def reopened(folder: Path, *architectures: str) -> TapeStore:
    """Another server's store, with what is on disk of some architectures."""
    store = TapeStore(str(folder))

    async def load() -> None:
        await asyncio.gather(*(store.load(architecture) for architecture in architectures))

    asyncio.run(load())
    return store


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_an_architecture_is_given_its_own(tmp_path, on_disk):
    store = TapeStore(str(tmp_path / "kept") if on_disk else "")
    store.put(A, "one", b"1\n1")
    store.put(A, "two", b"2")
    store.put(B, "one", b"3")
    store.put(A, "two", b"4")
    assert store.of(A) == {"one": b"1\n1", "two": b"4"}
    assert store.of(B) == {"one": b"3"}
    assert store.of("c" * 64) == {}
    store.close()
    if on_disk:
        again = reopened(tmp_path / "kept", A, A, "c" * 64)
        assert again.of(A) == {"one": b"1\n1", "two": b"4"}
        assert again.of("c" * 64) == {}
        again.close()


def test_memory_drops_the_architecture_that_was_used_longest_ago():
    store = TapeStore(memory_bytes=10_000)  # of which each value counts for 4,096 at least
    store.put(A, "x", bytes(40))
    store.put(B, "x", bytes(40))
    store.of(A)
    store.put("c", "x", bytes(40))
    assert [len(store.of(one)) for one in (A, B, "c")] == [1, 0, 1]


def test_the_disk_is_bounded(tmp_path):
    for number in range(20):
        store = TapeStore(str(tmp_path), disk_bytes=20_000)
        store.put(f"{number:064}", "x", bytes(190))
        store.close()
        for path in (tmp_path / "tapes").iterdir():
            os.utime(path, (number, number))
    assert 2 <= len([*(tmp_path / "tapes").iterdir()]) <= 20_000 // 4096
    assert reopened(tmp_path, f"{19:064}").of(f"{19:064}") == {"x": bytes(190)}


@pytest.mark.parametrize(
    ("name", "data"),
    [("x" * 1001, b""), ("x", bytes(tapes.ITEM_BYTES + 1))],
    ids=["name", "data"],
)
def test_what_is_too_large_or_has_no_name_is_not_kept(name, data):
    store = TapeStore()
    assert store.put(A, name, data) is False and store.put(A, "one", b"1") is True
    assert store.of(A) == {"one": b"1"}


def test_a_folder_that_cannot_be_written_is_as_if_there_were_none(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = TapeStore(str(tmp_path / "file"))
    store.put(A, "one", b"1")
    assert store.of(A) == {"one": b"1"}


def test_only_this_user_may_read_the_folder(tmp_path):
    store = TapeStore(str(tmp_path / "kept"))
    store.put(A, "one", b"1")
    store.close()
    (file,) = (tmp_path / "kept" / "tapes").iterdir()
    assert (tmp_path / "kept").stat().st_mode & 0o077 == file.stat().st_mode & 0o077 == 0


def test_the_folder_is_the_users_cache_unless_said_otherwise(monkeypatch):
    monkeypatch.setenv("SIZER_TAPES", "/somewhere")
    assert default_folder() == "/somewhere"
    monkeypatch.delenv("SIZER_TAPES")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_folder() == "/cache/sizer"


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_one_architecture_keeps_so_many_names_and_bytes(tmp_path, on_disk):
    store = TapeStore(str(tmp_path) if on_disk else "")
    for number in range(1_000):
        store.put(A, str(number), b"")
    assert list(store.of(A)) == [str(number) for number in range(1_000 - tapes.ARCHITECTURE_NAMES, 1_000)]
    for number in range(5):
        store.put(B, str(number), bytes(2 * MIB))
    assert list(store.of(B)) == ["1", "2", "3", "4"]
    store.close()
    if on_disk:
        assert len([*(tmp_path / "tapes").iterdir()]) == 2
        again = reopened(tmp_path, A, B)
        assert (again.of(A), again.of(B)) == (store.of(A), store.of(B))


def test_a_file_is_written_anew_before_it_grows_too_long(tmp_path):
    store = TapeStore(str(tmp_path))
    for number in range(30):
        store.put(A, "x", bytes([number]) * 2 * MIB)
    store.close()
    (file,) = (tmp_path / "tapes").iterdir()
    assert file.stat().st_size <= tapes.FILE_BYTES
    assert reopened(tmp_path, A).of(A) == {"x": bytes([29]) * 2 * MIB}


@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (lambda text: text[:-1], {"one": b"1"}),
        (lambda text: text + b"half a record", {"one": b"1", "two": b"22"}),
        (lambda text: text.replace(b'"size": 2', b'"size": []'), {"one": b"1"}),
        (lambda text: text.replace(b'"size": 2', b'"size": -2'), {"one": b"1"}),
        (lambda text: text.replace(A.encode(), B.encode()), {}),  # the file of another architecture
    ],
)
def test_of_a_spoiled_file_what_is_whole_is_left(tmp_path, spoil, left):
    store = TapeStore(str(tmp_path))
    store.put(A, "one", b"1")
    store.put(A, "two", b"22")
    store.close()
    (file,) = (tmp_path / "tapes").iterdir()
    file.write_bytes(spoil(file.read_bytes()))
    again = reopened(tmp_path, A)
    assert again.of(A) == left
    again.put(A, "three", b"3")
    again.close()
    assert reopened(tmp_path, A).of(A) == {**left, "three": b"3"}


def test_the_loop_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    reading, go_on = threading.Event(), threading.Event()

    def read(folder: object, architecture: str) -> dict[str, bytes]:
        reading.set()
        assert go_on.wait(30)
        return {"one": b"1"}

    monkeypatch.setattr(tapes.TapeFolder, "read", read)
    store = TapeStore(str(tmp_path))

    async def load() -> None:
        first, second = (asyncio.create_task(store.load(A)) for _ in range(2))
        while not reading.is_set():
            await asyncio.sleep(0.001)
        store.put(A, "two", b"2")  # while the file is read
        go_on.set()
        await asyncio.gather(first, second)

    asyncio.run(load())
    assert store.of(A) == {"one": b"1", "two": b"2"}
