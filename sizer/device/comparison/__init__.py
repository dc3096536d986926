"""Comparison of the estimate with a measurement. No torch."""
