"""Scopes of torch.compile, which say how much of a model is compiled as one, and its modes."""

from __future__ import annotations

DEFAULT, REDUCE_OVERHEAD = COMPILE_MODES = ("default", "reduce-overhead")  # the second records CUDA graphs
BLOCKS, MODEL = SCOPES = ("blocks", "model")  # each repeated block is compiled, or the whole model
