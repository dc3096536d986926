"""The allocator as a process starts with it, for one peak after the other."""

from __future__ import annotations

import gc

import torch


def empty_the_allocator() -> None:
    """Have nothing allocated nor reserved, and peaks counted from here on. Raises AssertionError where something is held."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
