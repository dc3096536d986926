"""Comparisons kept, counted, and handed from machine to machine. No torch."""
