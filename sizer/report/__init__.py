"""Answers as plain data for pages, the command line and child processes. All sizes are in bytes.

    Timelines ──► Estimate, one dtype and batch ──► Column, one dtype ──► Report
                  fit, bounds, unbounded            largest_batch         peak, explanation, loop_decisions, caveats, served

`decision` holds levers, limits and other devices. `side_by_side` compares several reports. `replays` caches the results of
replays. No torch.
"""
