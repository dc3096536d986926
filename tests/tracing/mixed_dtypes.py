"""Operators over tensors of different dtypes, and over halves: what devices refuse is to be refused in a trace, too.

    python -m tests.tracing.mixed_dtypes DEVICE

prints as JSON which cases the device refuses; over the null driver, that is what PyTorch's CUDA code says.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT = torch.float32


def _ones(device: str, *shape: int, dtype: torch.dtype = FLOAT, trained: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device).requires_grad_(trained)


def _places(device: str) -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=device)


def _cases(half: torch.dtype) -> dict[str, Callable[[str], object]]:
    """Each makes its tensors on a device and runs one operator."""

    def h(device: str, *shape: int, trained: bool = False) -> Tensor:
        return _ones(device, *shape, dtype=half, trained=trained)

    f = _ones

    def lstm(device: str, state: Tensor) -> object:
        return torch.nn.LSTM(4, 4, device=device, dtype=half)(h(device, 3, 2, 4), (state, state))

    return {
        "mm": lambda d: torch.mm(f(d, 4, 4), h(d, 4, 4)),
        "mm of halves": lambda d: torch.mm(h(d, 4, 4), h(d, 4, 4)),
        "mv": lambda d: torch.mv(f(d, 4, 4), h(d, 4)),
        "linear, float input": lambda d: F.linear(f(d, 2, 4, 4), h(d, 4, 4), h(d, 4)),
        "linear without bias": lambda d: F.linear(h(d, 2, 4, 4), f(d, 4, 4)),
        "linear, float bias": lambda d: F.linear(h(d, 4, 4), h(d, 4, 4), f(d, 4)),
        "einsum": lambda d: torch.einsum("ij,jk->ik", h(d, 4, 4), f(d, 4, 4)),
        "convolution": lambda d: F.conv1d(f(d, 2, 4, 8), h(d, 4, 4, 3)),
        "convolution with bias": lambda d: F.conv1d(f(d, 2, 4, 8), h(d, 4, 4, 3), h(d, 4)),
        "transposed convolution": lambda d: F.conv_transpose1d(f(d, 2, 4, 8), h(d, 4, 4, 3)),
        "layer norm, half weights": lambda d: F.layer_norm(f(d, 4, 4), (4,), h(d, 4), h(d, 4)),
        "layer norm, float weights": lambda d: F.layer_norm(h(d, 4, 4), (4,), f(d, 4), f(d, 4)),
        "layer norm of halves": lambda d: F.layer_norm(h(d, 4, 4), (4,), h(d, 4), h(d, 4)),
        "group norm, half weights": lambda d: F.group_norm(f(d, 4, 4, 4), 2, h(d, 4), h(d, 4)),
        "group norm, float weights": lambda d: F.group_norm(h(d, 4, 4, 4), 2, f(d, 4), f(d, 4)),
        "RMS norm, half weights": lambda d: F.rms_norm(f(d, 4, 4), (4,), h(d, 4)),
        "batch norm, half weights": lambda d: F.batch_norm(f(d, 4, 4, 4, 4), *(h(d, 4) for _ in range(4)), True),
        "batch norm, float weights": lambda d: F.batch_norm(h(d, 4, 4, 4, 4), *(f(d, 4) for _ in range(4)), True),
        "evaluated batch norm": lambda d: F.batch_norm(f(d, 4, 4, 4, 4), *(h(d, 4) for _ in range(4)), False),
        "attention, float query": lambda d: F.scaled_dot_product_attention(f(d, 1, 1, 8, 32), *[h(d, 1, 1, 8, 32)] * 2),
        "attention, float mask": lambda d: F.scaled_dot_product_attention(*[h(d, 1, 1, 8, 32)] * 3, f(d, 8, 8)),
        "attention, float mask, odd head": lambda d: F.scaled_dot_product_attention(
            *[h(d, 1, 1, 8, 33)] * 3, f(d, 8, 8)
        ),
        "attention, half mask": lambda d: F.scaled_dot_product_attention(*[f(d, 1, 1, 8, 32)] * 3, h(d, 8, 8)),
        "write rows": lambda d: h(d, 4, 4).index_put_((_places(d),), f(d, 4, 4)),
        "write rows of halves": lambda d: h(d, 4, 4).index_put_((_places(d),), h(d, 4, 4)),
        "write a number to rows": lambda d: h(d, 4, 4).index_put_((_places(d),), f(d, 1)),
        "write under a mask": lambda d: h(d, 4, 4).index_put_((_ones(d, 4, dtype=torch.bool),), f(d)),
        "write a host's number under a mask": lambda d: h(d, 4, 4).index_put_(
            (_ones(d, 4, dtype=torch.bool),), f("cpu")
        ),
        "add to rows": lambda d: h(d, 4, 4).index_put_((_places(d),), f(d, 4, 4), accumulate=True),
        "write a slice": lambda d: h(d, 4, 4)[:2].copy_(f(d, 2, 4)),
        "index_add": lambda d: h(d, 4, 4).index_add(0, _places(d), f(d, 4, 4)),
        "index_copy": lambda d: h(d, 4, 4).index_copy(0, _places(d), f(d, 4, 4)),
        "scatter": lambda d: h(d, 4, 4).scatter(0, _places(d)[None].expand(4, 4), f(d, 4, 4)),
        "masked_scatter": lambda d: h(d, 4, 4).masked_scatter(_ones(d, 4, 4, dtype=torch.bool), f(d, 4, 4)),
        "grid_sample, float grid": lambda d: F.grid_sample(h(d, 1, 1, 4, 4), f(d, 1, 2, 2, 2), align_corners=False),
        "grid_sample, half grid": lambda d: F.grid_sample(f(d, 1, 1, 4, 4), h(d, 1, 2, 2, 2), align_corners=False),
        "cross entropy, float weights": lambda d: F.cross_entropy(h(d, 4, 4), _places(d), f(d, 4)),
        "cross entropy, probabilities": lambda d: F.cross_entropy(h(d, 4, 4), f(d, 4, 4)),
        "binary cross entropy": lambda d: F.binary_cross_entropy(h(d, 4, 4), f(d, 4, 4)),
        "binary cross entropy of logits": lambda d: F.binary_cross_entropy_with_logits(h(d, 4, 4), f(d, 4, 4)),
        "huber loss": lambda d: F.huber_loss(h(d, 4, 4, trained=True), f(d, 4, 4)).backward(),
        "smooth L1 loss": lambda d: F.smooth_l1_loss(h(d, 4, 4, trained=True), f(d, 4, 4)).backward(),
        "squared error": lambda d: F.mse_loss(h(d, 4, 4, trained=True), f(d, 4, 4)).backward(),
        "CTC": lambda d: F.ctc_loss(
            h(d, 8, 2, 5), torch.ones(2, 3, dtype=torch.int64, device=d), torch.tensor([8, 8]), torch.tensor([3, 3])
        ),
        "distances, p=1": lambda d: torch.cdist(h(d, 4, 4), h(d, 4, 4), p=1),
        "distances of floats and halves": lambda d: torch.cdist(f(d, 4, 4), h(d, 4, 4), p=1),
        "many distances, p=2": lambda d: torch.cdist(h(d, 40, 4), h(d, 4, 4)),
        "pairwise distances": lambda d: F.pdist(h(d, 4, 4)),
        "Cholesky": lambda d: torch.linalg.cholesky(torch.eye(4, dtype=half, device=d)),
        "determinant": lambda d: torch.linalg.det(torch.eye(4, dtype=half, device=d)),
        "solve": lambda d: torch.linalg.solve(torch.eye(4, dtype=half, device=d), h(d, 4, 4)),
        "solve a triangle": lambda d: torch.linalg.solve_triangular(
            torch.eye(4, dtype=half, device=d), h(d, 4, 4), upper=True
        ),
        "singular values": lambda d: torch.linalg.svd(h(d, 4, 4)),
        "QR": lambda d: torch.linalg.qr(h(d, 4, 4)),
        "eigenvalues": lambda d: torch.linalg.eigh(h(d, 4, 4)),
        "complex numbers": lambda d: torch.complex(h(d, 4), h(d, 4)),
        "Fourier transform of 60": lambda d: torch.fft.rfft(h(d, 2, 60)),
        "weight norm": lambda d: torch._weight_norm(h(d, 4, 4, 4), f(d, 4, 1, 1), 0),
        "LSTM, float state": lambda d: lstm(d, f(d, 1, 2, 4)),
        "LSTM of halves": lambda d: lstm(d, h(d, 1, 2, 4)),
    }


CASES = {
    f"{name}, {str(half)[6:]}": case for half in (torch.bfloat16, torch.float16) for name, case in _cases(half).items()
}


def refuses(case: Callable[[str], object], device: str) -> bool:
    """Whether PyTorch raises for the case on a device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # RMS norm of mixed dtypes and halves of complex numbers warn
            case(device)
    except (RuntimeError, ValueError):  # NotImplementedError is a RuntimeError
        return True
    return False


if __name__ == "__main__":
    print(json.dumps({name: refuses(case, sys.argv[1]) for name, case in CASES.items()}), flush=True)
    os._exit(0)  # PyTorch's threads wait for a device that never answers
