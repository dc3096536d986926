"""The commands of `python -m sizer`, one module each: `run(options, make_client)` does it and returns the exit status. No torch."""
