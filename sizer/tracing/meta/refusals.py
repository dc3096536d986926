"""Errors of operators as on a device: shapes that meta kernels do not check, and PyTorch's own messages.

Meta kernels in Python have other messages for a mismatch (torch/_meta_registrations.py, torch/_refs, 2.15). The operator's CPU
kernel shares its checks with the CUDA kernel (TORCH_META_FUNC, TensorIterator.cpp): it is called with zeros.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_MOST_ELEMENTS = 2**26  # of the tensors of a call that is repeated on the host
_KINDS = re.compile(r"\btorch\.(\w+Tensor)\b|\bCPU(\w+Type)\b")

Check = Callable[[str, tuple], None]


def in_own_words(func: Any, args: tuple, kwargs: dict, error: Exception) -> Exception:
    """Return the error of an operator on a device, given the error of its meta kernel; the latter if there is none."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if sum(prod(tensor.shape) for tensor in tensors) > _MOST_ELEMENTS:
        return error
    with _disable_current_modes():
        given, named = tree_map(_zeros, (args, kwargs))
        named = {name: torch.device("cpu") if isinstance(value, torch.device) else value for name, value in named.items()}
        try:
            func(*given, **named)
        except NotImplementedError:  # a dtype without a kernel on the CPU only
            return error
        except (RuntimeError, IndexError, ValueError, TypeError) as found:
            words = _KINDS.sub(lambda match: f"torch.cuda.{match[1]}" if match[1] else f"CUDA{match[2]}", str(found))
            return type(found)(words)
    return error


def _zeros(leaf: Any) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


# ------------------------------------------------------------------------------------------------------ shapes unchecked


def layer_norm(kind: str, args: tuple) -> None:
    """Raise as _check_layer_norm_inputs does (native/layer_norm.h).

    Arguments of native_layer_norm: input, normalized_shape, weight, bias, eps.
    """
    _normalized(args, separator=", ", names=("weight", "bias"))


def rms_norm(kind: str, args: tuple) -> None:
    """Raise as _check_rms_norm_inputs_symint does (native/layer_norm.h).

    Arguments of _fused_rms_norm: input, normalized_shape, weight, eps.
    """
    _normalized(args, separator="", names=("weight",))


def _normalized(args: tuple, *, separator: str, names: tuple[str, ...]) -> None:
    input, shape = args[0], list(args[1])
    for name, tensor in zip(names, args[2:], strict=False):
        if isinstance(tensor, Tensor) and list(tensor.shape) != shape:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape {list(tensor.shape)} "
                f"and normalized_shape = {shape}"
            )
    if list(input.shape[-len(shape) :]) != shape:
        wanted = "".join(f"{separator}{size}" for size in shape)
        raise RuntimeError(
            f"Given normalized_shape={shape}, expected input with shape [*{wanted}], but got input of size{list(input.shape)}"
        )


def batch_norm(kind: str, args: tuple) -> None:
    """Raise RuntimeError as check_dims_match_num_input_features does (native/Normalization.cpp).

    Arguments: input, weight, bias, running_mean, running_var, …
    """
    features = args[0].shape[1]
    for name, place in (("running_mean", 3), ("running_var", 4), ("weight", 1), ("bias", 2)):
        tensor = args[place]
        if isinstance(tensor, Tensor) and tensor.numel() != features:
            raise RuntimeError(f"{name} should contain {features} elements not {tensor.numel()}")


def transposed_convolution(kind: str, args: tuple) -> None:
    """Raise RuntimeError as check_shape_forward does (native/Convolution.cpp).

    Arguments of convolution: input, weight, bias, stride, padding, dilation, transposed, …
    """
    input, weight = args[:2]
    if args[6] and input.dim() == weight.dim() and input.shape[1] != weight.shape[0]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input{list(input.shape)} "
            f"to have {weight.shape[0]} channels, but got {input.shape[1]} channels instead"
        )


def draws(kind: str, args: tuple) -> None:
    """Raise RuntimeError as multinomial does without enough categories (native/Distributions.cpp).

    Arguments: input, num_samples, replacement.
    """
    if args[1] > args[0].shape[-1] and not (len(args) > 2 and args[2]):
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
