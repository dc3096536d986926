"""Dropout and random draws from a distribution on CUDA.

The fused dropout kernel allocates its mask before its output. Draws from a distribution hold checks of the probabilities, and a
random number for each probability.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.cuda.by_hardware import PERMUTED, SORT
from sizer.tracing.cuda.reductions import extremes, largest_of_rows, staged, summing
from sizer.tracing.cuda.scans import largest, scanned_elements
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.meta.strides import in_format
from sizer.tracing.operator_tables import Results, listed

_aten = torch.ops.aten


def dropout(device: Device, input: Tensor, p: float, train: bool) -> Tensor:
    """Run aten.dropout as native_dropout, with a mask of 1 byte per element (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout.default(input, p, True)[0]


def mask_first(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add dropout's mask before its output (cuda/Dropout.cu, dropout_cuda)."""
    yield out[1]
    yield out[0]


KERNELS = {_aten.dropout.default: dropout}


# ------------------------------------------------------------------------------------------------------------ sampling


def multinomial(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of aten.multinomial (native/Distributions.cpp, multinomial_out, 2.15).

    The draws [rows, samples] come first. The least and the largest probability, their validity and whether a row sums to 0 stay
    until the kernel ends. Each probability is then divided by its own random number, and the largest are drawn. Draws with
    replacement skip that.
    """
    input, samples = args[0], args[1]
    replaced = (args[2] if len(args) > 2 else kwargs.get("replacement", False)) and samples > 1
    rows = out.numel() // samples
    yield out
    if replaced:  # cuda/MultinomialKernel.cu: one distribution of cumulated probabilities; CUB scans a single row
        yield [input.nbytes, input.nbytes, *([scanned_elements(input.numel(), input.dtype)] if rows == 1 else [])]
        return
    yield (input.itemsize, input.itemsize)
    yield extremes(input, 1)
    yield ([1, 1], 1)
    yield [rows * input.itemsize, *staged(input, (input.dim() - 1,))]
    yield ([rows * input.itemsize, rows] if input.dim() > 1 else [input.itemsize], 1)
    yield [1]
    quotients = torch.empty_like(input)
    if samples == 1:
        yield [input.nbytes, *largest_of_rows(quotients)]
    else:
        yield (input.nbytes, rows * samples * input.itemsize)  # and topk's values
        yield from largest(device, (quotients, samples, -1), {}, out)


def permutation(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the memory of sorting aten.randperm's indices by random keys (cuda/Randperm.cpp, randperm_out_cuda, 2.15).

    Keys have enough bits that few are equal. Keys of more than 32 bits take 8 bytes.
    """
    count = out.numel()
    yield out
    if count < 2:
        return
    bits = min(64, math.ceil(math.log2(count - (6 * count**2 + 1) / (12 * math.log(0.9)))))
    keys = 4 if bits <= 32 else 8
    scratch = DeferredSize((keys + 8) * count, SORT, (PERMUTED,), (count, keys, bits))
    yield [8]
    yield [8 * count, keys * count, keys * count, scratch]


def dirichlet(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a gamma draw per element and the sum of each row (cuda/Distributions.cpp, _s_dirichlet_cuda, 2.15).

    Operator: aten._sample_dirichlet. The draws come first, and are divided by the sums in place.
    """
    yield out
    yield [out.nbytes // out.shape[-1], *summing(out, (-1,))]


def probabilities(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add bernoulli's probabilities in float64 for draws of that dtype, else in float32 (cuda/DistributionBernoulli.cu)."""
    given = args[1] if len(args) > 1 else args[0]
    wanted = 8 if out.dtype == torch.float64 else 4
    return [[given.numel() * wanted] if given.itemsize != wanted else []]


def normal_around(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the least deviation of normal, found twice, and whether it is negative (native/DistributionTemplates.h, normal_impl).

    Arguments: mean, deviation. A single mean becomes a tensor.
    """
    deviation = args[1]
    checked: Steps = [[deviation.itemsize, *extremes(deviation, 1)], [deviation.itemsize, 1]] if deviation.numel() else []
    yield from checked
    yield out
    yield from checked
    yield [] if isinstance(args[0], Tensor) else [out.itemsize]


def normal_of_one_deviation(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add an unused tensor of deviations, for normal with a number for all (native/DistributionTemplates.h, normal_out_impl)."""
    return [[out.nbytes]]


def rrelu(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a contiguous copy of a strided input in training (cuda/RreluWithNoise.cu; input, noise, lower, upper, training)."""
    training = args[4] if len(args) > 4 else kwargs.get("training", False)
    return [out, copies(args[0]) if training else []]


def dense(args: tuple, out: Tensor) -> Tensor:
    """Return a contiguous result for draws like a strided tensor (DistributionTemplates.h, RreluWithNoise.cu)."""
    return in_format(out, torch.contiguous_format)


RESULTS: Results = listed("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor poisson rrelu_with_noise", dense)
ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed("bernoulli bernoulli_.Tensor", after_results(probabilities)),
    **listed("normal.Tensor_float", after_results(normal_of_one_deviation)),
    **listed("normal.float_Tensor normal.Tensor_Tensor", normal_around),
    **listed("rrelu_with_noise", rrelu),
    _aten._sample_dirichlet.default: dirichlet,
    _aten.native_dropout.default: mask_first,
    _aten.multinomial.default: multinomial,
    _aten.randperm.default: permutation,
}
