"""One rank of a world of many, in one process: PyTorch's own distributed code on meta tensors, by a fake process group.

    world ─► devices: torch.cuda answers as on a machine with GPUs
          └► patches: what torch.distributed asks of tensors that hold nothing

All of it is undone when the context ends.
"""
