"""The estimate held against a measurement. No torch."""
