"""One rank of a world of many, in one process: PyTorch's own distributed code on meta tensors, with a fake process group.

    world ─► devices: torch.cuda answers as on a machine with GPUs
          └► patches: torch.distributed's queries of tensors without data

All patches are undone when the context ends.
"""
