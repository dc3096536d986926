"""Sorted rows of numbers, in arrays with spare room: search, insertion and deletion, compiled.

Blocks of memory are in two rows, bytes and addresses, by (bytes, address).
"""

from __future__ import annotations

import numpy as np

from sizer.allocator.numba_functions import COMPILED, compiled


@compiled("int64(int64[:, ::1], int64, int64, int64)")
def by_size(pool: np.ndarray, count: int, size: int, address: int) -> int:
    """Return the index of the first block that is not below (size, address)."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        have = pool[0, middle]
        if have < size or (have == size and pool[1, middle] < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled("int64(int64[::1], int64, int64)")
def find(row: np.ndarray, count: int, value: int) -> int:
    """Return the index of the first of `count` values that is not below a value."""
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if row[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled("void(int64[::1], int64, int64, int64)")
def insert_at(row: np.ndarray, count: int, at: int, value: int) -> None:
    """Put a value at a place in a row of `count`."""
    if COMPILED:  # slices that overlap would be copied twice
        end, one = np.uint64(count), np.uint64(1)  # unsigned: Numba looks for no negative ones
        for done in range(np.uint64(count - at)):
            row[end - done] = row[end - done - one]
    else:
        row[at + 1 : count + 1] = row[at:count]
    row[at] = value


@compiled("void(int64[::1], int64, int64)")
def delete_at(row: np.ndarray, count: int, at: int) -> None:
    """Delete the value at an index of a row of `count`."""
    if COMPILED:
        begin, one = np.uint64(at), np.uint64(1)
        for done in range(np.uint64(count - 1 - at)):
            row[begin + done] = row[begin + done + one]
    else:
        row[at : count - 1] = row[at + 1 : count]


@compiled("void(int64[:, ::1], int64, int64, int64)")
def insert_by_size(pool: np.ndarray, count: int, size: int, address: int) -> None:
    """Put a block into two rows of `count`."""
    at = by_size(pool, count, size, address)
    insert_at(pool[0], count, at, size)
    insert_at(pool[1], count, at, address)


@compiled("void(int64[:, ::1], int64, int64)")
def delete_by_size(pool: np.ndarray, count: int, at: int) -> None:
    """Take the block at a place out of two rows of `count`."""
    delete_at(pool[0], count, at)
    delete_at(pool[1], count, at)


@compiled("void(int64[:, ::1], int64, int64, int64, int64)")
def change_by_size(pool: np.ndarray, count: int, at: int, size: int, address: int) -> None:
    """Replace the block at a place of two rows of `count` by another one; only blocks between both places move."""
    to = by_size(pool, count, size, address)
    if to > at:
        delete_at(pool[0], to, at)
        delete_at(pool[1], to, at)
        pool[0, to - 1], pool[1, to - 1] = size, address
    else:
        insert_at(pool[0], at, to, size)
        insert_at(pool[1], at, to, address)
