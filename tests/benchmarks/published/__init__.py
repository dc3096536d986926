"""What others measured on GPUs, and the same runs on meta tensors.

`rows` reads the figures of `tests/measured/published/runs/`, `cases` names the functions that do a run as its source does it (by
subject: `language`, `vision`, `adapters`, `operators`), `held` puts an estimate beside each figure.
"""
