"""Dry runs: an unmodified PyTorch script on a GPU that this machine does not have.

`command_line` parses the command to run, with accelerate's own launcher in `accelerate_child`. `driver` is the null driver,
which runs PyTorch's own CUDA code without a GPU. `starting` runs a script with it in a child process. In the child,
`script_child` runs the script, `optimizer_steps` counts its steps, `small_values` follows small values, and `other_ranks`
answers for the other ranks. PyTorch's memory history becomes a tape (`history`). The tape's replay becomes the report
(`run_outcome`). Only child processes import torch.
"""
