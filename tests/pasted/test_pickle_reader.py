"""Pickles of plain values are read as they are; every opcode that could import or call something is refused."""

from __future__ import annotations

import collections
import contextlib
import decimal
import os
import pickle
import pickletools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizer.base.errors import ConfigError
from sizer.pasted.pickle_reader import read_plain

VALUES = [
    None, True, False, 0, -1, 2**40, -(2**70), 1.5, "", "text", "é" * 300, b"", b"bytes" * 100, (), (1,), (1, 2), (1, 2, 3),
    (1, 2, 3, 4), [], [1, [2, [3]]], {}, {"a": 1, "b": {"c": [1, 2.5, None]}}, [{"x": i} for i in range(2000)], ["same"] * 5,
]  # fmt: skip
REFUSED = {
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"),
    *("BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_plain_values_come_back(value, protocol):
    if isinstance(value, bytes) and protocol < 3:
        return  # a call of codecs.encode there
    assert read_plain(pickle.dumps(value, protocol)) == value


def test_shared_and_circular_values_come_back():
    inner = [1]
    found = read_plain(pickle.dumps([inner, inner]))
    assert found[0] is found[1]
    circle: list = []
    circle.append(circle)
    assert (found := read_plain(pickle.dumps(circle)))[0] is found


class Call:
    def __reduce__(self):
        return os.system, ("touch /tmp/called",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [Call(), decimal.Decimal(1), collections.OrderedDict(), object, len, {1, 2}, 1j])
def test_anything_else_is_refused_and_never_called(value, protocol, monkeypatch):
    pickled = pickle.dumps(value, protocol)
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it was called"))
    with pytest.raises(ConfigError, match=r"opcode (GLOBAL|STACK_GLOBAL|EMPTY_SET) at byte"):
        read_plain(pickled)


def test_every_opcode_is_read_or_refused():
    bare = {opcode.name: opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
    for name in sorted(REFUSED & set(bare)):
        argument = {"GLOBAL": b"os\nsystem\n", "INST": b"os\nsystem\n", "PERSID": b"x\n"}.get(name, b"\x01" * 4)
        with pytest.raises(ConfigError, match=f"opcode {name} at byte"):
            read_plain(b"\x80\x04N" + bare[name] + argument + b".")


DAMAGED = (b"", b"\x80\x04", b".", b"((.", b"\x80\x04]", b"]a.", b"N\x85\x85a.", b"}(K\x01u.", b"h\x05.", b"\xff\xff")


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_pickle_is_refused(data):
    with pytest.raises(ConfigError, match="this pickle is incomplete"):
        read_plain(data)


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_else_than_be_read_or_refused(data):
    with contextlib.suppress(ConfigError):
        read_plain(data)
