"""How much of a model torch.compile compiles as one."""

from __future__ import annotations

BLOCKS, MODEL = SCOPES = ("blocks", "model")  # each repeated block is compiled, or the whole model
