"""A pickle of plain values, read without unpickling: no opcode that imports or calls anything is followed.

`pickletools.genops` only decodes opcodes. The reader builds dicts, lists, tuples, texts, bytes and numbers of them, and refuses
GLOBAL, STACK_GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, NEWOBJ_EX, EXT1 to EXT4, PERSID and BINPERSID by name.
"""

from __future__ import annotations

import pickletools
from typing import Any

from sizer.base.errors import ConfigError

MAX_OPCODES = 40_000_000
MAX_BYTES = 512 * 2**20
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_SILENT = {"PROTO", "FRAME"}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain(data: bytes) -> Any:
    """Return the plain value of a pickle. Raises ConfigError for a pickle of other objects, or a damaged one."""
    if len(data) > MAX_BYTES:
        raise ConfigError("this pickle is too large", given=f"{len(data):,} bytes", allowed=f"at most {MAX_BYTES:,}")
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if count > MAX_OPCODES:
                raise ConfigError("this pickle has too many opcodes", allowed=f"at most {MAX_OPCODES:,}")
            if opcode.name == "STOP":
                return _only(stack)
            _follow(opcode.name, argument, position, stack, memo)
    except ConfigError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError("this pickle is incomplete", given=type(error).__name__, todo="dump the snapshot again") from None
    raise ConfigError("this pickle is incomplete", given="no end", todo="dump the snapshot again")


def _only(stack: list[Any]) -> Any:
    if len(stack) != 1 or stack[0] is _MARK:
        raise ValueError("the stack does not have exactly one value")
    return stack[0]


def _follow(name: str, argument: Any, position: int | None, stack: list[Any], memo: dict[int, Any]) -> None:
    """Execute one opcode. Raises ConfigError for an opcode that could import or call something."""
    if name in _VALUES:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name == "MARK":
        stack.append(_MARK)
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _TUPLES:
        size = _TUPLES[name]
        values = tuple(stack[-size:])
        if len(values) < size or any(value is _MARK for value in values):
            raise ValueError("the stack is too short")
        stack[-size:] = [values]
    elif name in ("APPEND", "SETITEM"):
        _add_one(name, stack)
    elif name in ("APPENDS", "SETITEMS", "TUPLE", "LIST", "DICT"):
        _add_many(name, stack)
    elif name == "POP":
        stack.pop()
    elif name not in _SILENT:
        raise ConfigError(
            "this pickle has more than plain values",
            given=f"opcode {name} at byte {position}",
            allowed="dicts, lists, tuples, texts and numbers, as torch.cuda.memory._dump_snapshot writes",
            todo="dump the snapshot with PyTorch, and share no other pickle",
        )


def _add_one(name: str, stack: list[Any]) -> None:
    value = stack.pop()
    if name == "APPEND":
        _list_of(stack[-1]).append(value)
        return
    key = stack.pop()
    _dict_of(stack[-1])[key] = value


def _add_many(name: str, stack: list[Any]) -> None:
    values: list[Any] = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    values.reverse()
    if name == "APPENDS":
        _list_of(stack[-1]).extend(values)
    elif name == "TUPLE":
        stack.append(tuple(values))
    elif name == "LIST":
        stack.append(values)
    else:
        target = {} if name == "DICT" else _dict_of(stack[-1])
        if len(values) % 2:
            raise ValueError("a key has no value")
        target.update(zip(values[::2], values[1::2], strict=True))
        if name == "DICT":
            stack.append(target)


def _list_of(value: Any) -> list:
    if type(value) is not list:
        raise TypeError("no list")
    return value


def _dict_of(value: Any) -> dict:
    if type(value) is not dict:
        raise TypeError("no dict")
    return value
