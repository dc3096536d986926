"""Free blocks of memory ordered by (size, address): best fit, and merging of neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort

# A free block is one integer, size << 64 | address: a sorted list of them is ordered by (size, address).
_SHIFT = 64
_ADDRESS = (1 << _SHIFT) - 1


class FreeBlocks:
    """A set of free blocks, none touching another that it may merge with.

    `size_at` maps the start of each block to its size, `start_at` its end to its start. Blocks merge where they
    touch: leave a gap between ranges that must stay apart.
    """

    __slots__ = ("_keys", "size_at", "start_at")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self.size_at: dict[int, int] = {}
        self.start_at: dict[int, int] = {}

    def take(self, size: int) -> tuple[int, int] | None:
        """(address, size) of the smallest block of at least `size` bytes, the lowest of equals; it is taken out."""
        keys = self._keys
        index = bisect_left(keys, size << _SHIFT)
        if index == len(keys):
            return None
        key = keys.pop(index)
        address, have = key & _ADDRESS, key >> _SHIFT
        del self.size_at[address], self.start_at[address + have]
        return address, have

    def largest(self) -> int:
        """Bytes of the largest block, 0 where there is none."""
        return self._keys[-1] >> _SHIFT if self._keys else 0

    def add(self, address: int, size: int) -> None:
        """Put in a block that touches no other."""
        self.size_at[address] = size
        self.start_at[address + size] = address
        insort(self._keys, size << _SHIFT | address)

    def merge(self, address: int, size: int) -> None:
        """Put in a block, joined with the blocks it touches."""
        size_at, start_at, keys = self.size_at, self.start_at, self._keys
        end = address + size
        before = start_at.pop(address, None)
        if before is not None:
            length = size_at[before]
            del keys[bisect_left(keys, length << _SHIFT | before)]
            address = before
        length = size_at.pop(end, None)
        if length is not None:
            del keys[bisect_left(keys, length << _SHIFT | end)]
            end += length
        size_at[address] = end - address
        start_at[end] = address
        insort(keys, (end - address) << _SHIFT | address)
