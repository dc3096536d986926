"""The null driver: NVIDIA's runtime, driver, NCCL and management library for a device that does not exist.

`build` compiles it with gcc for the installed PyTorch. One library serves all devices: the environment describes the device. The
parent process imports this package, so it imports no torch.
"""
