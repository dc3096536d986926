"""What jobs have traced is kept for the next: bounded, by architecture and version, and a file that fails is none."""

from __future__ import annotations

import os

import pytest

from sizer.service import tapes
from sizer.service.tapes import TapeStore, architecture_of, default_folder
from sizer.units import MIB

A, B = "a" * 64, "b" * 64


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
    again = TapeStore(str(tmp_path / "kept") if on_disk else "")
    assert again.of(A) == ({"one": b"1\n1", "two": b"4"} if on_disk else {})


def test_memory_drops_the_architecture_that_was_used_longest_ago():
    store = TapeStore(memory_bytes=10_000)  # of which each value counts for 4,096 at least
    store.put(A, "x", bytes(40))
    store.put(B, "x", bytes(40))
    store.of(A)
    store.put("c", "x", bytes(40))
    assert [len(store.of(one)) for one in (A, B, "c")] == [1, 0, 1]


def test_the_disk_is_bounded(tmp_path):
    for number in range(20):
        TapeStore(str(tmp_path), disk_bytes=20_000).put(f"{number:064}", "x", bytes(190))
        for path in tmp_path.glob("*/*"):
            os.utime(path, (number, number))
    assert 2 <= len([*tmp_path.glob("*/*")]) <= 20_000 // 4096
    assert TapeStore(str(tmp_path)).of(f"{19:064}") == {"x": bytes(190)}
    assert len(list(tmp_path.iterdir())) <= 6  # emptied folders are gone


@pytest.mark.parametrize(
    ("name", "data"),
    [("x" * 1001, b""), ("a\nb", b""), ("x", bytes(tapes.ITEM_BYTES + 1))],
    ids=["name", "line", "data"],
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
    TapeStore(str(tmp_path / "kept")).put(A, "one", b"1")
    assert (tmp_path / "kept" / A).stat().st_mode & 0o077 == 0


def test_an_architecture_is_its_name_config_and_versions():
    def of(query, config=None, versions="1"):
        return architecture_of(query, config, versions)

    resnet = of("arch=torchvision:resnet50&gpu=t4&batch=1")
    assert resnet == of("arch=torchvision:resnet50&dtype=float32")
    different = {
        of("arch=torchvision:resnet18"),
        of("arch=timm:resnet50"),
        of("arch=torchvision:resnet50", versions="2"),
        of("arch=hub:a/b", "{}"),
        of("arch=hub:a/b@main", "{}"),
        of("arch=hub:a/b", '{"a": 1}'),
    }
    assert len(different | {resnet}) == 7
    assert of("arch=nothing:at-all") is None


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
    if on_disk:
        assert len([*tmp_path.glob("*/*")]) == tapes.ARCHITECTURE_NAMES + 4
