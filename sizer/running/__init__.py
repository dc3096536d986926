"""Dry runs: a PyTorch script, unmodified, on a GPU that this machine does not have.

`command_line` reads what is to run; accelerate's launcher is asked in `accelerate_child`. `driver` is the null driver, which runs
PyTorch's own CUDA code without a GPU. `starting` runs a script over it in a child process; `script_child` has the script run there,
`optimizer_steps` counts its steps, `small_values` follows small values, `other_ranks` answers for the other ranks. PyTorch's memory
history becomes a tape (`history`), and its replay the report (`run_outcome`). Only child processes import torch.
"""
