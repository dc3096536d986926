"""Plan that spreads a model over ranks: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.parallel import PARALLELS, SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of the split of a module over ranks.

    - `parallel`: a key of PARALLELS except "none". `ranks`: ranks that shard one copy. `replicate`: number of such copies.
    - `reshard`: FSDP2's `reshard_after_forward`: 1 and 0 for yes and no, or the size of a smaller group. `offload`: its
      CPUOffloadPolicy.
    - `tp`: tensor-parallel size; tensor-parallel ranks have the same samples. `sp`: also shard the sequence between the
      matrices (sequence parallel). `lp`: also shard the logits (loss parallel).
    - `cp`: ranks that share every sequence and its attention (context parallel). Weights are replicated or sharded over them as
      over `ranks`.
    - `pp`: number of ranks of a pipeline. `schedule`: a key of SCHEDULES. `microbatch`: samples per microbatch.
    - `rank`: the rank to report, None for the rank with the largest memory.
    - `by_accelerate`: FSDP2 shards as in Accelerate.
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
        """Return True if no rank ever holds the whole model."""
        return self.shards or self.tp > 1 or self.pp > 1

    @property
    def replicates(self) -> bool:
        """Return True if DDP reduces the gradients of each rank's parameters."""
        return self.parallel in ("ddp", "zero1")

    @property
    def shards(self) -> bool:
        """Return True if the weights are sharded over the ranks."""
        return PARALLELS[self.parallel].shards
