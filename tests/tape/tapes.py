"""Small tapes for tests, written as one says them: ("a", 512) allocates 512 bytes as block a, "-a" releases it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from sizer.tape.tape import CATEGORIES, EMPTY_CACHE, Tape

Event = tuple[str, int] | tuple[str, int, str] | str


def make_tape(
    events: Sequence[Event], *, batch: int = 1, marks: Sequence[tuple[int, str]] = (), stand_ins: Sequence[str] = ()
) -> Tape:
    """A tape of events (name, bytes[, category]) and "-name"; a block's op is "aten.<name>", its module "m.<name>"."""
    blocks: dict[str, int] = {}
    order, sizes, categories = array("q"), array("q"), bytearray()
    for event in events:
        if isinstance(event, str):
            order.append(~blocks[event[1:]])
            continue
        name, size, category = (*event, "activation")[:3]
        blocks[name] = len(sizes)
        order.append(len(sizes))
        sizes.append(size)
        categories.append(CATEGORIES.index(category))
    return Tape(
        batch=batch,
        order=order,
        sizes=sizes,
        categories=bytes(categories),
        ops=array("l", range(len(sizes))),
        modules=array("l", range(len(sizes))),
        op_names=tuple(f"aten.{name}" for name in blocks),
        module_names=tuple(f"m.{name}" for name in blocks),
        marks=tuple(marks) or ((len(order), "forward"),),
        stand_ins=tuple(stand_ins),
    ).validate()


def random_tape(seed: int, events: int = 400, alive: int = 40, *, empties: bool = False) -> Tape:
    """A random tape of small, medium and large blocks, sizes often repeated as in real networks, some of 0 bytes; with `empties`
    the latter are calls of `torch.cuda.empty_cache()`."""
    rng = random.Random(seed)
    common = [rng.randint(1, 2 ** rng.randint(4, 27)) for _ in range(12)]
    order, live, count = array("q"), [], 0
    sizes = array("q")
    for _ in range(events):
        if live and (len(live) > alive or rng.random() < 0.45):
            order.append(~live.pop(rng.randrange(len(live))))
            continue
        sizes.append(0 if rng.random() < 0.02 else rng.choice(common) if rng.random() < 0.7 else rng.randint(1, 2**23))
        order.append(count)
        live.append(count)
        count += 1
    third = len(order) // 3
    return Tape(
        batch=1,
        order=order,
        sizes=sizes,
        categories=bytes(rng.randrange(len(CATEGORIES)) for _ in sizes),
        ops=array("l", [int(empties and not size) for size in sizes]),
        modules=array("l", [0] * count),
        op_names=("aten.op", EMPTY_CACHE) if empties else ("aten.op",),
        module_names=("",),
        marks=((third, "load"), (2 * third, "forward"), (len(order), "step2")),
    ).validate()
