"""Tapes, allocator replay, report, GPU catalogue, fit and advice: plain data and arithmetic, no torch."""
