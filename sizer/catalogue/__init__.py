"""Plain rows with their sources: GPUs, what they tell of themselves, what a process holds on them, presets. No torch."""
