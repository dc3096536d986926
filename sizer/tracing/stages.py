"""The ranks of a pipeline: each kind of stage traced by itself, and which of them needs most. Imports torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from torch import nn

from sizer.tape.block_notes import BlockNotes
from sizer.tape.tape import Tape
from sizer.tracing.rank import neediest, ranks_of_stages
from sizer.tracing.steps import Work


class Traces(Protocol):
    """Traces a piece of work, which is one rank's, with notes of its blocks where they are asked for."""

    def __call__(self, work: Work, *, block_notes: BlockNotes | None = None) -> Tape: ...


class StageTraces:
    """The ranks of a pipeline that need most, by dtype and batch size, once they are traced."""

    def __init__(self) -> None:
        self._neediest: dict[tuple[str, int], int] = {}

    def trace(
        self, trace: Traces, work: Work, module: nn.Module, batch: int, block_notes: BlockNotes | None = None
    ) -> Tape:
        """The tape of the rank that needs most, which is known once those of all kinds of stages are traced.

        Raises TraceError where one of them cannot be traced.
        """

        plan = work.plan
        assert plan is not None, "ranks have a plan"

        def at(rank: int, block_notes: BlockNotes | None = None) -> Tape:
            return trace(replace(work, plan=replace(plan, rank=rank)), block_notes=block_notes)

        cell = work.dtype, batch
        if cell not in self._neediest or block_notes is None:
            tapes = {rank: at(rank) for rank in ranks_of_stages(module, plan)}
            self._neediest[cell] = neediest(tapes)
            if block_notes is None:
                return tapes[self._neediest[cell]]
        return at(self._neediest[cell], block_notes=block_notes)

    def whose(self, dtype: str, batches: Collection[int]) -> str:
        """Which rank needs most, by batch size, as the end of a sentence; empty where none was traced."""
        found = {batch: self._neediest[dtype, batch] for batch in batches if (dtype, batch) in self._neediest}
        texts = [
            f"rank {rank} at batch {', '.join(str(batch) for batch in found if found[batch] == rank)}"
            for rank in dict.fromkeys(found.values())
        ]
        return f"; the figures are those of the rank that needs most: {'; '.join(texts)}" if texts else ""
