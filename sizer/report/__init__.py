"""Answers as plain data: what pages show, the command line prints and child processes send back. Bytes everywhere.

    Timelines ──► Estimate, one dtype and batch ──► Column, one dtype ──► Report
                  fit, bounds, unbounded            largest_batch         peak, explanation, loop_decisions, caveats, served

`decision` holds levers, limits and other devices, `side_by_side` several reports. Results of replays are kept by `replays`. No
torch.
"""
