"""Inventory of this machine: the computer, the devices that PyTorch can use, and the behaviour of their allocators."""
