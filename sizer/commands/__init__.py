"""The commands of `python -m sizer`, a module each; `sizer.__main__` lists them. No torch.

A command has `add_arguments(parser)`, and `run(options, make_client)`, which prints and returns the exit status.
"""
