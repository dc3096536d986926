"""Replays of a tape through a device's allocator: what each block really takes, and what is reserved around it.

    Tape ──allocator.replay──► Replay ──► Timeline: memory by phase, the peak, a curve
                                     └──► addresses, segments ──► snapshot, as PyTorch's own

A kind of allocator has its rules in one module and its compiled loop in another: `cuda` and `cuda_cache`, `expandable` and
`expandable_cache`, `mps` and `heaps`. `looped` replays tapes with loops. No torch.
"""
