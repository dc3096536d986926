"""Plain rows with their sources: GPUs and their properties, the memory of a process on them, model presets. No torch."""
