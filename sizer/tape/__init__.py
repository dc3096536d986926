"""Tapes: every allocation and release of one traced piece of work, as plain rows.

    traces ──affine, size_queries──► TapeFamily, by batch size          ──archive──► bytes
    shallow traces ──stretches, shallower, unfold──► the tape of a deep model
    steps ──windows, loops──► a tape with loops                         ──loop_choices──► the tape of another training loop

`tape` is the value, `streams` assigns events to streams. No torch; replays are in `sizer.allocator`.
"""
