"""Losses and other operators on CUDA that hold a tensor of their input's size before they reduce it.

PyTorch 2.15: native/BinaryOps.cpp and PointwiseOps (mse_loss, smooth_l1_loss), native/Loss.cpp, native/cuda/Loss.cu.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.base.units import round_up
from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.cuda.reductions import largest_staged, staged, summing
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import elements_of, in_format, is_reduced
from sizer.tracing.operator_tables import Results, listed


def _reduced(shape: torch.Size, like: Tensor) -> list[int]:
    whole = torch.empty(shape, dtype=like.dtype, device="meta")
    return summing(whole, tuple(range(whole.dim())))


def iterated(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the elements of mse_loss or smooth_l1_loss, which are reduced into the result (native/Loss.cpp).

    Arguments: input, target, reduction.
    """
    if not is_reduced(args, kwargs, 2):
        return []
    shape = elements_of(args)
    return [[prod(shape) * out.itemsize, *_reduced(shape, out)]]


def reduced_aside(at: int) -> AllocationRule:
    """Return a rule for losses that are computed into their result, reduced to a scalar, and copied back."""

    def rule(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
        if not is_reduced(args, kwargs, at):
            return []
        return [[out.itemsize, *_reduced(elements_of(args[:at]), out)]]

    rule.__doc__ = (
        "A scalar, copied back into the result, whose storage holds all elements (native/Loss.cpp, cuda/Loss.cu)."
    )
    return after_results(rule)


def huber(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the elements of the loss before the result (native/BinaryOps.cpp, huber_loss)."""
    if not is_reduced(args, kwargs, 2):
        yield out
        return
    shape = elements_of(args)
    yield (prod(shape) * out.itemsize,)
    yield out
    yield _reduced(shape, out)


def multi_margin(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a loss for each sample and the memory of their sum, for multi_margin_loss (cuda/MultiMarginLoss.cu).

    Arguments: input, target, p, margin, weight, reduction. A strided input is copied.
    """
    input = args[0]
    if input.dim() < 2 or not is_reduced(args, kwargs, 5):
        return [copies(input)]
    return [(*copies(input), input.shape[0] * out.itemsize), _reduced(input.shape[:1], out)]


def nll(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add contiguous copies of nll_loss_forward's input, target and weight (cuda/NLLLoss.cu; input, target, weight, ...)."""
    return [copies(*args[:2], args[2] if len(args) > 2 else None)]


def number_as_tensor(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the number of pow on the device, unless it is 1 (native/Pow.cpp, pow_Scalar_out)."""
    return [] if args[0] == 1 else [[8]]


def converted(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the tensor in the dtype of the result, for pow and clamp with numbers (native/Pow.cpp, TensorCompare.cpp)."""
    yield (out.nbytes,) if args[0].dtype != out.dtype else ()
    yield out


def multilabel_margin(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add is_target, a loss for each sample, then their reduction (cuda/MultiLabelMarginCriterion.cu)."""
    loss, is_target = out
    yield is_target
    if args[0].dim() > 1 and is_reduced(args, kwargs, 2):
        yield (args[0].shape[0] * loss.itemsize,)
    yield loss


def logsumexp(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the maxima, a mask of infinite ones and exponentials of the differences (native/ReduceOps.cpp, logsumexp_out_impl).

    Integers are copied to the dtype of the result first. The exponentials are dense.
    """
    input = args[0]
    dims = tuple(args[1])
    yield (input.numel() * out.itemsize,) if input.dtype != out.dtype else ()
    yield (out.nbytes,)
    yield largest_staged(input, dims)
    yield [out.nbytes, out.numel()]
    yield (input.numel() * out.itemsize,)
    yield out
    yield staged(torch.empty_like(input, dtype=out.dtype), dims)


def renorm(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a norm for each slice, in the real accumulation dtype (native/Normalization.cpp, renorm_out).

    If the input has another dtype, add a factor for each slice in that dtype.
    """
    input, dim = args[0], args[2] % args[0].dim()
    slices = input.shape[dim]
    norms = max(4, input.dtype.to_real().itemsize)
    others = tuple(d for d in range(input.dim()) if d != dim)
    yield out
    yield (slices * norms,)
    yield summing(input, others)
    yield [slices * input.itemsize] if norms != input.itemsize else []


def scattered_mean(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add ones, counts and which counts are zero, for scatter_reduce with "mean" (TensorAdvancedIndexing.cpp).

    Arguments: input, dim, index, source, "mean".
    """
    if args[4] != "mean":
        return []
    return [[args[3].nbytes, out.nbytes, out.numel()]]


def indexed_mean(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add counts, ones and which counts are zero, for index_reduce with "mean" (TensorAdvancedIndexing.cpp).

    Arguments: input, dim, index, source, "mean". The ones are added to the counts.
    """
    if args[4] != "mean":
        return []
    return [(out.nbytes,), [args[3].nbytes], [out.numel()]]


def ctc(device: Device, args: tuple, kwargs: dict, out: tuple[Tensor, Tensor]) -> Steps:
    """Add both lengths and the start of each target as int64, then log_alpha, for _ctc_loss (native/cuda/LossCTC.cu).

    Arguments: log_probs [time, batch, classes], ...
    """
    yield (args[0].shape[1] * 8,) * 3
    yield out[1]
    yield out[0]


def ctc_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add both lengths, the start of each target and log_beta, for _ctc_loss_backward (native/cuda/LossCTC.cu).

    Arguments: .., log_alpha, blank.
    """
    yield (*(args[1].shape[1] * 8,) * 3, args[6].nbytes)
    yield out


def count_nonzero(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a mask of elements that are not zero, and its int64 sum (native/TensorAdvancedIndexing.cpp, count_nonzero_cuda).

    Booleans need no mask.
    """
    input = args[0]
    yield (input.numel(),) if input.dtype != torch.bool else ()
    yield out
    mask = torch.empty_like(input, dtype=torch.int64)  # a strided input has a dense mask
    yield [mask.nbytes, *staged(mask, args[1] if len(args) > 1 else None)]


def isin(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the comparison of each element with each of few tests (TensorCompare.cpp, isin_default_kernel_gpu).

    Sorting many tests is not counted.
    """
    elements, tests = args[:2]
    if tests.numel() >= 10 * elements.numel() ** 0.145:
        return []
    return [[elements.numel() * tests.numel(), out.numel()]]


def unfold_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the positions that windows reach along the dimension (native/UnfoldBackward.h).

    Operator: unfold_backward, with arguments gradient, sizes, dim, size and step. Windows that do not overlap are copied
    (native/UnfoldBackward.cpp).
    """
    gradient, sizes, dim, size, step = args
    if not sizes or step >= size:
        return []
    dim %= len(sizes)  # the gradient has one dimension more
    return [[min(sizes[dim], (gradient.shape[dim] - 1) * step + size) * 8]]


def buffer_of_none(args: tuple, out: Any) -> Any:
    """Return log_sigmoid_forward's results with an empty buffer, as on CUDA (native/Activation.cpp).

    On meta the buffer is as large as the result.
    """
    return out[0], torch.empty(0, dtype=out[1].dtype, device="meta")


def isinf(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the absolute values, then their comparison with infinity (native/TensorCompare.cpp, isinf)."""
    yield (args[0].nbytes,) if args[0].dtype.is_floating_point else ()
    yield out


def equality(device: Device, args: tuple, kwargs: dict, out: bool) -> Steps:
    """Add the comparison of each element, and whether all are equal (native/cuda/Equal.cpp)."""
    if args[0].shape == args[1].shape and args[0].numel():
        yield (args[0].numel(),)
        yield [1]


def pdist_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add N - 1 rows for each element of _pdist_backward's input [N, M] (cuda/DistanceKernel.cu).

    Arguments: gradient, input [N, M], p, distances.
    """
    return [[max(0, args[1].shape[0] - 1) * out.nbytes]] if args[3].numel() else []


def cdist(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add both inputs of _cdist_forward, contiguous and with the result's batch dimensions (native/Distance.cpp, cdist_impl).

    Arguments: x1 [.., P, M], x2 [.., R, M], ...
    """
    yield tuple(_spread(args[:2], out))
    yield out


def _spread(points: tuple[Tensor, ...], out: Tensor) -> list[int]:
    return copies(*(one.expand(*out.shape[:-2], *one.shape[-2:]) for one in points))


def cdist_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the forward pass's copies, and a row for each pair, for _cdist_backward (cuda/DistanceKernel.cu).

    Arguments: gradient, x1 [.., P, M], x2 [.., R, M], p, distances. The rows are summed over R (cdist_backward_kernel_impl).
    """
    rows = args[2].shape[-2]
    if not args[4].numel() or not out.numel():
        yield out
        return
    yield tuple(_spread(args[1:3], out))
    yield out
    pairs = torch.empty((out.numel() // prod(out.shape[-2:]), rows, *out.shape[-2:]), dtype=out.dtype, device="meta")
    yield [pairs.nbytes, *staged(pairs, 1)]


def chunk_cat(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add addresses and positions of the tensors (native/cuda/TensorShape.cu), modelled as 64 bytes for each.

    Operator: aten._chunk_cat, with arguments tensors, dim and chunks. For strided tensors, add copies of those that need
    padding (native/TensorShape.cpp).
    """
    tensors, dim, chunks = args
    if all(tensor.is_contiguous() for tensor in tensors):
        return [out, [64 * len(tensors)]]
    padded = [(t, round_up(t.shape[dim], chunks)) for t in tensors]
    return [tuple(t.nbytes // t.shape[dim] * size for t, size in padded if size != t.shape[dim]), out]


def contiguous(args: tuple, out: Tensor) -> Tensor:
    """Return a contiguous result for a strided operand (native/Pow.cpp, TensorCompare.cpp: set_output_raw_strided)."""
    return in_format(out, torch.contiguous_format)


RESULTS: Results = {
    **listed("log_sigmoid_forward", buffer_of_none),
    **listed("pow.Scalar isin.Tensor_Tensor", contiguous),
}


def soft_margin_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the negated target, its product with the input, and the exponential of that (native/Loss.cpp, 2.15).

    Operator: soft_margin_loss_backward, with arguments gradient, input, target, ... The exponential stays.
    """
    size = args[1].nbytes
    yield ([size, size], size)
    yield out


ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed("soft_margin_loss_backward", soft_margin_backward),
    **listed("nll_loss_forward", after_results(nll)),
    **listed("mse_loss smooth_l1_loss", after_results(iterated)),
    **listed("soft_margin_loss", reduced_aside(2)),
    **listed("binary_cross_entropy", reduced_aside(3)),
    **listed("huber_loss", huber),
    **listed("multilabel_margin_loss_forward", multilabel_margin),
    **listed("logsumexp", logsumexp),
    **listed("renorm", renorm),
    **listed("scatter_reduce.two", after_results(scattered_mean)),
    **listed("index_reduce", after_results(indexed_mean)),
    **listed("_ctc_loss _ctc_loss.Tensor", ctc),
    **listed("_ctc_loss_backward _ctc_loss_backward.Tensor", ctc_backward),
    **listed("count_nonzero count_nonzero.dim_IntList", count_nonzero),
    **listed("isin.Tensor_Tensor", after_results(isin)),
    **listed("isinf", isinf),
    **listed("equal", equality),
    **listed("_chunk_cat", chunk_cat),
    **listed("multi_margin_loss", after_results(multi_margin)),
    **listed("pow.Tensor_Scalar clamp clamp_min clamp_max", converted),
    **listed("pow.Scalar", after_results(number_as_tensor)),
    **listed("_cdist_forward", cdist),
    **listed("_cdist_backward", cdist_backward),
    **listed("_pdist_backward", after_results(pdist_backward)),
    **listed("unfold_backward", after_results(unfold_backward)),
}
