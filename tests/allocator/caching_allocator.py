"""The CUDA caching allocator the slow way: block objects in linked lists, every search a walk over all of them.

A second reading of c10/cuda/CUDACachingAllocator.cpp, for tests of the fast one. It shares no code with it.
"""

from __future__ import annotations

KIB, MIB = 2**10, 2**20


class Block:
    """One block of a segment: free or in use, with its neighbours."""

    def __init__(self, address: int, size: int, *, small: bool, mapped: bool = True):
        self.address, self.size, self.small, self.mapped = address, size, small, mapped
        self.in_use = False
        self.previous: Block | None = None
        self.next: Block | None = None


class SlowCache:
    """Default segments, or expandable ones."""

    def __init__(self, capacity: int | None = None, *, expandable: bool = False, by_address: bool = False):
        self.capacity, self.expandable, self.by_address = capacity, expandable, by_address
        self.reserved = self.retries = 0
        self.blocks: list[Block] = []
        self.top = self.bottom = 0
        if expandable:  # one endless unmapped block per pool, each beginning at a page
            small, large = (
                Block(0, 2**60, small=True, mapped=False),
                Block(20 * 2**60, 2**60, small=False, mapped=False),
            )
            self.blocks = [small, large]

    def malloc(self, requested: int) -> Block | None:
        size = max(512, -(-requested // 512) * 512)
        small = size <= MIB
        block = self.best_fit(size, small) or self.from_device(size, small)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self.from_device(size, small)
        if block is None:
            return None
        block.in_use = True
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > MIB:
            self.cut(block, size)
        return block

    def free(self, block: Block) -> None:
        block.in_use = False
        self.merge(block)

    def best_fit(self, size: int, small: bool) -> Block | None:
        able = [b for b in self.blocks if self.is_free(b) and b.small == small and b.size >= size]
        able.sort(key=lambda b: (b.size, b.address))
        if not able:
            return None
        index = 0
        while self.expandable and index + 1 < len(able) and self.can_grow(able[index + 1]) < self.can_grow(able[index]):
            index += 1
        return able[index]

    def can_grow(self, block: Block) -> int:
        return block.size + (block.next.size if block.next and not block.next.mapped else 0)

    def from_device(self, size: int, small: bool) -> Block | None:
        if self.expandable:
            return self.expand(size, small)
        if small:
            segment = 2 * MIB
        elif size < 10 * MIB:
            segment = 20 * MIB
        else:
            segment = -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved + segment > self.capacity:
            return None
        if self.by_address and segment > 20 * MIB:
            self.bottom -= segment
            block = Block(self.bottom, segment, small=small)
        else:
            block = Block(self.top, segment, small=small)
            self.top += segment
        self.reserved += segment
        self.blocks.append(block)
        return block

    def expand(self, size: int, small: bool) -> Block | None:
        for unmapped in sorted((b for b in self.blocks if not b.mapped and b.small == small), key=lambda b: b.address):
            first = unmapped.previous if unmapped.previous and not unmapped.previous.in_use else unmapped
            room, last = 0, first
            while last is not None and not last.in_use and room < size:
                room, last = room + last.size, last.next
            if room >= size:
                break
        else:
            raise AssertionError("the endless block always has room")
        if not first.mapped:
            first = self.map(first, min(size, first.size))
        while first is not None and first.size < size:
            first = self.map(first.next, min(size - first.size, first.next.size))
        return first

    def map(self, block: Block, size: int) -> Block | None:
        page = 2 * MIB if block.small else 20 * MIB
        size = -(-size // page) * page
        if self.capacity is not None and self.reserved + size > self.capacity:
            return None
        if size < block.size:
            self.cut(block, size)
        block.mapped = True
        self.reserved += size
        return self.merge(block)

    def release_cached(self) -> None:
        for block in [b for b in self.blocks if self.is_free(b)]:
            if self.expandable:
                self.unmap(block)
            elif block.previous is None and block.next is None:
                self.blocks.remove(block)
                self.reserved -= block.size

    def unmap(self, block: Block) -> None:
        page = 2 * MIB if block.small else 20 * MIB
        begin, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if begin >= end:
            return
        if begin > block.address:
            block = self.cut(block, begin - block.address)
        if block.size > end - begin:
            self.cut(block, end - begin)
        block.mapped = False
        self.reserved -= block.size
        self.merge(block)

    def cut(self, block: Block, size: int) -> Block:
        """Shorten a block to `size`; the rest, a new free block after it."""
        rest = Block(block.address + size, block.size - size, small=block.small, mapped=block.mapped)
        rest.previous, rest.next = block, block.next
        if block.next:
            block.next.previous = rest
        block.next, block.size = rest, size
        self.blocks.append(rest)
        return rest

    def merge(self, block: Block) -> Block:
        for other in (block.previous, block.next):
            if other is None or other.in_use or other.mapped != block.mapped:
                continue
            first, second = (other, block) if other.address < block.address else (block, other)
            first.size += second.size
            first.next = second.next
            if second.next:
                second.next.previous = first
            self.blocks.remove(second)
            block = first
        return block

    @staticmethod
    def is_free(block: Block) -> bool:
        return block.mapped and not block.in_use
