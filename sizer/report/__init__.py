"""Answers as plain data for pages, the command line and child processes. All sizes are in bytes.

    Timelines ──► Estimate, one dtype and batch ──► Column, one dtype ──► Report
                  fit, bounds, replays              largest_batch         peak, explanation, loop_decisions, advice, served

`decision` holds levers, limits and other devices. `side_by_side` compares several reports. No torch.
"""
