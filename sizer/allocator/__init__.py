"""Replays of a tape through a device's allocator: the bytes that each block takes, and the reserved bytes around it.

    Tape ──allocator.replay──► Replay ──► Timeline: memory by phase, the peak, a curve
                                     └──► addresses ──► snapshot, as PyTorch's own

Each kind of allocator has its rules in one module and its compiled loop in another: `cuda` with `cuda_cache` and
`expandable_cache`, `mps` with `heaps`. `loop_replay` replays tapes with loops. No torch.
"""
