"""Functions that a loaded shared library imports, replaced for that library alone.

A library calls what it imports through a table of addresses (the procedure linkage table, ELF gABI chapter 5). Writing another
address there changes the calls of that library and of no other, needs neither a compiler nor a file, and lasts for the process.
Linux on 64 bits with the GNU C library, whose handles of libraries are their `struct link_map` (link.h).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# elf.h: entries of the dynamic section
_END, _TABLE_BYTES, _STRINGS, _SYMBOLS, _TABLE, _RUN_PATH = 0, 2, 5, 6, 23, 29
_SYMBOL_BYTES = 24  # sizeof(Elf64_Sym), which begins with the name's place among the strings


class NoImportError(Exception):
    """The library does not import the function, or this platform has no such table."""


class _LinkMap(ctypes.Structure):
    _fields_ = (("address", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_void_p))


class _Dynamic(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int64), ("value", ctypes.c_uint64))


class _Relocation(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("info", ctypes.c_uint64), ("addend", ctypes.c_int64))


def replace_import(library: ctypes.CDLL, name: str, function: Any) -> None:
    """Make a library call `function` (of a ctypes prototype; the caller keeps it alive for as long as the process lives)
    where it imports `name`. Raises NoImportError."""
    found = list(_slots(library, name.encode()))
    if not found:
        raise NoImportError(f"{library._name} imports no {name}")
    for slot in found:
        slot.value = ctypes.cast(function, ctypes.c_void_p).value


def run_path(library: ctypes.CDLL) -> list[Path]:
    """The folders in which a library looks for those that it loads (DT_RUNPATH). Raises NoImportError."""
    link_map, entries = _read(library)
    if _RUN_PATH not in entries:
        return []
    text = ctypes.string_at(entries[_STRINGS] + entries[_RUN_PATH]).decode()
    origin = str(Path(link_map.name.decode()).parent)
    return [Path(folder.replace("$ORIGIN", origin)) for folder in text.split(":")]


def _slots(library: ctypes.CDLL, name: bytes) -> Iterator[ctypes.c_void_p]:
    """The table's entries for a function."""
    link_map, entries = _read(library)
    count = entries.get(_TABLE_BYTES, 0) // ctypes.sizeof(_Relocation)
    for relocation in (_Relocation * count).from_address(entries[_TABLE]) if count else ():
        symbol = entries[_SYMBOLS] + _SYMBOL_BYTES * (relocation.info >> 32)
        if ctypes.string_at(entries[_STRINGS] + ctypes.c_uint32.from_address(symbol).value) == name:
            yield ctypes.c_void_p.from_address(link_map.address + relocation.offset)


def _read(library: ctypes.CDLL) -> tuple[_LinkMap, dict[int, int]]:
    """A loaded library's place and the entries of its dynamic section, which the GNU C library has made addresses."""
    if sys.platform != "linux" or sys.maxsize < 2**32 or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        raise NoImportError("only Linux on 64 bits with the GNU C library has the tables that are read here")
    link_map = _LinkMap.from_address(library._handle)
    entries: dict[int, int] = {}
    place = link_map.dynamic
    while (entry := _Dynamic.from_address(place)).tag != _END:
        entries[entry.tag] = entry.value
        place += ctypes.sizeof(_Dynamic)
    return link_map, entries
