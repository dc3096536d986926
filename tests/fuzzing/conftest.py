"""How many inputs are tried: a few hundred by default, always the same ones; with `--hypothesis-profile=long` fifty thousand new
ones for each test (`pytest tests/fuzzing --hypothesis-profile=long --timeout=0`)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("short", max_examples=200, derandomize=True, database=None, **UNTIMED)
settings.register_profile("long", max_examples=50_000, database=None, **UNTIMED)
settings.load_profile("short")
