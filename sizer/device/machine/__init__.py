"""What is here: the computer, the devices that PyTorch can use, and what their allocators do."""
