"""Many visitors of the real app at once, by its websocket: everybody gets the answer to what they asked."""

from __future__ import annotations

import asyncio

from tests.benchmarks.visitor import Visitor, ask_until

SMALL = "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32&image=64&batch={}"
QUERIES = [SMALL.format(batch) for batch in (1, 2, 3)]
PEOPLE = 9


async def crossed(address: str) -> tuple[int, int]:
    """How many answers there were to visitors who asked all at once, twice, and how many were another's."""
    titles = {}
    for query in QUERIES:
        async with Visitor(address) as visitor:
            titles[query] = (await ask_until(visitor, query, "Memory over one step", seconds=240)).title
    assert len(set(titles.values())) == len(QUERIES)

    async def visit(number: int) -> list[bool]:
        async with Visitor(address) as visitor:
            asked = [QUERIES[(number + turn) % len(QUERIES)] for turn in range(2)]
            return [(await visitor.run(query)).title != titles[query] for query in asked]

    found = [one for each in await asyncio.gather(*map(visit, range(PEOPLE))) for one in each]
    return len(found), sum(found)


def test_nobody_gets_anothers_answer(app_url: str):
    assert asyncio.run(crossed(app_url)) == (2 * PEOPLE, 0)
