"""Which of PyTorch's compiled kernels a device runs."""

from __future__ import annotations


def kernels_for(capability: tuple[int, int], flags: str) -> int:
    """Return the kernels that a device runs (75 for sm_75): of its generation's, those for the highest capability not above it.

    Args:
        capability: The compute capability of the device.
        flags: What `torch._C._cuda_getArchFlags()` returns, such as "sm_80 sm_90".

    Raises:
        ValueError: This PyTorch has no kernels for the device.
    """
    major, minor = capability
    built = [int(name.removeprefix("sm_")) for name in flags.split() if name.removeprefix("sm_").isdigit()]
    fitting = [arch for arch in built if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        known = ", ".join(f"{arch // 10}.{arch % 10}" for arch in built)
        raise ValueError(
            f"this PyTorch has kernels for capability {known} and none for {major}.{minor}: take another GPU"
        )
    return max(fitting)
