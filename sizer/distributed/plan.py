"""How a model is spread over ranks: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.parallel import PARALLELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`parallel` is a key of PARALLELS but "none"; `ranks` share one copy of what is sharded, of which there are `replicate`.

    `reshard` is FSDP2's `reshard_after_forward`: 1 and 0 for yes and no, or the size of a smaller group; `offload` its
    CPUOffloadPolicy. `tp` ranks each are in the place of one of these: each has a part of the matrices, and the same samples.
    `rank` is the one that is looked at, None for the one that needs most.
    """

    parallel: str
    ranks: int
    replicate: int = 1
    reshard: int = 1
    offload: bool = False
    tp: int = 1
    rank: int | None = None

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.ranks * self.replicate * self.tp

    @property
    def splits(self) -> bool:
        """Whether no rank ever holds the whole model."""
        return self.shards or self.tp > 1

    @property
    def shards(self) -> bool:
        """Whether the weights lie over the ranks."""
        return PARALLELS[self.parallel].shards
