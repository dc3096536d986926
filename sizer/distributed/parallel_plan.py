"""Plan that spreads a model over ranks: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`parallel` is a key of PARALLELS but "none"; `ranks` share one copy of what is sharded, of which there are `replicate`.

    `reshard` is FSDP2's `reshard_after_forward`: 1 and 0 for yes and no, or the size of a smaller group; `offload` its
    CPUOffloadPolicy. `tp` ranks each are in the place of one of these: each has a part of the matrices, and the same samples;
    with `sp` also a part of the sequence between the matrices (sequence parallel), with `lp` of the logits (loss parallel).
    `cp` ranks each share every sequence, and attention to it (context parallel): what `ranks` replicate or shard they do, too.
    `pp` of these are the stages of a pipeline each time, which work by `schedule`, a key of SCHEDULES, on `microbatch` samples at
    a time. `rank` is the one that is looked at, None for the one that needs most. With `by_accelerate` FSDP2 shards as
    Accelerate has it.
    """

    parallel: str
    ranks: int
    replicate: int = 1
    reshard: int = 1
    offload: bool = False
    tp: int = 1
    sp: bool = False
    lp: bool = False
    cp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    microbatch: int = 1
    rank: int | None = None
    by_accelerate: bool = False

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.ranks * self.replicate * self.tp * self.cp * self.pp

    @property
    def stages(self) -> int:
        """Return the number of stages of the pipeline, 1 without a pipeline."""
        return self.pp * SCHEDULES[self.schedule].stages if self.pp > 1 else 1

    @property
    def splits(self) -> bool:
        """Return whether no rank ever holds the whole model."""
        return self.shards or self.tp > 1 or self.pp > 1

    @property
    def replicates(self) -> bool:
        """Return whether DDP reduces the gradients of what each rank has."""
        return self.parallel in ("ddp", "zero1")

    @property
    def shards(self) -> bool:
        """Return whether the weights lie over the ranks."""
        return PARALLELS[self.parallel].shards
