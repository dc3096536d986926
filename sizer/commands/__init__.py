"""The commands of `python -m sizer`, in modules by subject; `sizer.__main__` lists them. No torch.

A module's table COMMANDS has two functions for each of its commands. The first adds the command's arguments to a parser. The second
takes the options and `make_client`, prints, and returns the exit status.
"""
