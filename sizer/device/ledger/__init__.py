"""Comparisons stored, counted, and exchanged between machines. No torch."""
