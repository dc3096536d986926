"""Kernels whose scratch follows from dtypes, dimensions or sizes over the null driver: bytes at the peak and strides.

    python -m tests.null_driver.kernels MODE DTYPE

DTYPE is float32. The last line printed is JSON, as that of tests/null_driver/operators.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import _nt_view_dummy
from torchvision.ops import deform_conv2d

from tests.null_driver.operators import Case, print_measured


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="cuda")


def weighted(x: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, x.detach().clone().requires_grad_(x.requires_grad))


def attended(x: Tensor, layer: type[nn.Module], **options: Tensor) -> Tensor:
    """Return what a layer of attention makes of images' rows in evaluation."""
    made = layer(64, 4, batch_first=True).to(x.device).eval()
    return made(x, **options) if layer is nn.TransformerEncoderLayer else made(x, x[:, :5], x[:, :5], need_weights=False)[0]


def convolved(x: Tensor, layer: type[nn.Module], *, format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return the sum of a convolution, whose gradient is one expanded number."""
    return layer(8, 8, 3).to(x.device, memory_format=format)(x).sum()


def deformed(x: Tensor, groups: int, *, masked: bool = False) -> Tensor:
    """Return a deformed convolution of images; its weight, bias, places and mask have gradients if the images have."""
    images, channels, rows, columns = x.shape
    made = [(32, channels // groups, 3, 3), (images, 18, rows, columns), (32,), (images, 9, rows, columns)]
    weight, offset, bias, mask = (x.new_ones(shape).requires_grad_(x.requires_grad) for shape in made)
    return deform_conv2d(x, offset, weight, bias, padding=1, mask=mask if masked else None)


def places(x: Tensor) -> Tensor:
    return torch.zeros(20, 5, dtype=torch.int64, device=x.device)


def looked_up(x: Tensor, count: int) -> Tensor:
    """Return the first row of an embedding `count` times."""
    return F.embedding(torch.zeros(count, dtype=torch.int64, device=x.device), x)


@torch.inference_mode(False)  # in which PyTorch makes no nested tensors
def attended_nested(x: Tensor, **options: bool) -> Tensor:
    """Return what attention makes of sequences of 30, 40 and 50 rows."""
    starts = torch.tensor([0, 30, 70, 120], device=x.device)
    rows = torch.nested.nested_tensor_from_jagged(x.reshape(120, 64), starts, min_seqlen=30, max_seqlen=50)
    heads = rows.unflatten(-1, [2, 32]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).flatten(-2).values()


def padded(x: Tensor) -> Tensor:
    """Return the largest of the rows of each sequence."""
    starts = torch.tensor([0, 30, 70, 120], device=x.device)
    return torch.nested.nested_tensor_from_jagged(x.reshape(120, 64) * 2, starts, min_seqlen=30, max_seqlen=50).amax(1)


def turned(x: Tensor) -> Tensor:
    return nn.Linear(64, 32).to(x.device)(x.transpose(0, 1))


def positive(x: Tensor) -> Tensor:
    return x @ x.mT + torch.eye(x.shape[-1], device=x.device)


def cast_twice(x: Tensor) -> Tensor:
    """Return a layer's result under autocast, whose weight a pass without gradients has cast."""
    layer = nn.Linear(x.shape[-1], 32).to(x.device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return layer(x)


def numbers(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=x.device)


def normed(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def recurrent(x: Tensor, layer: type[nn.RNNBase], **options: int) -> Tensor:
    return layer(64, 96, **options).to(x.device, x.dtype)(x)[0]


def by_conjugates(x: Tensor) -> Tensor:
    return x.conj() @ x[:9].conj().T + x[:, ::2].conj() @ x[::2, :9] + x @ x[:9].mH


def overwritten(x: Tensor) -> Tensor:
    """Return a copy of a matrix, into whose first row others were written."""
    made = x * 1
    made[numbers(x, 9)] = x[:9]
    return made


def differentiated_twice(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a function of the gradient of a sum if there are gradients, else the sum."""
    with torch.inference_mode(False):
        given = x if x.requires_grad else x.clone().requires_grad_()
        return torch.autograd.grad(run(given).sum(), given, create_graph=True)[0].square().sum()


# Over matrices that are turned, or of which every second column is taken.
STRIDED: dict[str, Callable[[Tensor], object]] = {
    "largest": lambda x: x.max(),
    "extremes": lambda x: torch.aminmax(x),
    "extremes of columns": lambda x: torch.aminmax(x, dim=0),
    "place of the largest": lambda x: x.argmax(),
    "histogram": lambda x: x.detach().histc(100),
    "elements that are not zero": lambda x: x.count_nonzero(0),
    "logsumexp of columns": lambda x: x.logsumexp(0),
    "sorted rows": lambda x: x.sort(1),
    "sorted columns": lambda x: x.sort(0),
    "distance": lambda x: torch.dist(x, x * 2),
    "distances of rows": lambda x: F.pairwise_distance(x, x.new_ones(x.shape)),
    "normal draws": lambda x: torch.normal(x.detach(), x.detach()),
    "normal draws around a number": lambda x: torch.normal(0.5, x.detach()),
    "Poisson draws": lambda x: torch.poisson(x.detach()),
    "draws by probability": lambda x: x.detach().half().bernoulli(),
    "draws without replacement": lambda x: x.detach().multinomial(3),
    "power of a number": lambda x: 2.0**x,
    "likelihood": lambda x: F.nll_loss(x, numbers(x, x.shape[0])),
    "margins": lambda x: F.multi_margin_loss(x, numbers(x, x.shape[0])),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "places in a row": lambda x: torch.bucketize(x.detach(), x.detach()[0].clone()),
    "places in rows": lambda x: torch.searchsorted(x.detach(), x.detach()),
    "places in rows by an order": lambda x: torch.searchsorted(x.detach(), x.detach(), sorter=numbers(x, *x.shape)),
    "elements of a set": lambda x: torch.isin(x.detach(), x.detach()[0, :3]),
    "product with a vector": lambda x: x @ x.new_ones(x.shape[1]),
    "added at places": lambda x: x.index_put((numbers(x, 300),), x.new_ones(x.shape[1]), accumulate=True),
    "batch norm": normed,
    "batch norm of float16": lambda x: normed(x.half()),
    "batch norm of bfloat16": lambda x: normed(x.bfloat16()),
}
# Into a tensor that is given as `out=`.
WRITTEN: dict[str, Callable[[Tensor], object]] = {
    "sort": lambda x: torch.sort(x, 0, out=(torch.empty_like(x), numbers(x, *x.shape))),
    "largest": lambda x: torch.topk(x, 5, out=(x.new_empty(0), numbers(x, 0))),
    "scan": lambda x: torch.cumsum(x.flatten(), 0, out=x.new_empty(0)),
    "norm": lambda x: torch.linalg.vector_norm(x, out=x.new_empty(0)),
    "logsumexp": lambda x: torch.logsumexp(x, 1, out=x.new_empty(0)),
    "draws": lambda x: torch.bernoulli(x.half(), out=torch.empty_like(x)),
}
SOLVED: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": lambda x: torch.linalg.inv(positive(x)),
    "solution": lambda x: torch.linalg.solve(positive(x), x[..., :5]),
    "determinant": lambda x: torch.linalg.slogdet(positive(x))[1],
    "solution by Cholesky": lambda x: torch.cholesky_solve(x[..., :5], torch.linalg.cholesky(positive(x))),
    "triangular solution": lambda x: torch.linalg.solve_triangular(x.tril() * 2, x, upper=False),
    "factor": lambda x: torch.linalg.cholesky(positive(x)),
    "eigenvalues": lambda x: torch.linalg.eigh(positive(x))[0],
    "reflections": lambda x: torch.linalg.householder_product(x.detach(), x.detach()[..., 0, :]),
}
TWICE: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[numbers(x, 40)] ** 2,
    "gathered columns": lambda x: x.gather(1, numbers(x, *x.shape)) ** 2,
    "maxima": lambda x: (x * x).max(-1).values,
    "sorted rows": lambda x: (x * x).sort(-1).values,
    "RMS norm": lambda x: F.rms_norm(x, (64,), x[0]),
}
SQUARE, ROWS, SAMPLES, IMAGES, MATRIX = (64, 64), (32, 20000), (4, 30, 64), (8, 8, 16, 16), (700, 9000)
def unique(x: Tensor, *more: str, function: Callable = torch.unique) -> None:
    """Find elements of which there is one each. How many is a kernel's answer, so that nothing is returned."""
    function(x, **{f"return_{name}": True for name in more})


KERNELS: dict[str, tuple[Callable[[Tensor], object], tuple[int, ...], torch.dtype]] = {
    **{f"power of {dtype}": (lambda x: x**2, SQUARE, dtype) for dtype in (torch.bool, torch.int64)},
    "root of integers": (lambda x: x**0.5, SQUARE, torch.int32),
    "clamped integers": (lambda x: x.clamp(0.5, 1.5), SQUARE, torch.int64),
    "mean of integers": (lambda x: x.mean(dtype=torch.float32), SQUARE, torch.int64),
    "logsumexp of integers": (lambda x: x.logsumexp(1), SQUARE, torch.int64),
    "booleans that are true": (lambda x: x.count_nonzero(1), SQUARE, torch.bool),
    "real times imaginary": (lambda x: x * 1j, SQUARE, torch.float32),
    "complex isinf": (torch.isinf, SQUARE, torch.complex64),
    "complex renorm": (lambda x: x.renorm(2, 0, 1.0), SQUARE, torch.complex64),
    "complex rms_norm": (lambda x: F.rms_norm(x, (64,)), SQUARE, torch.complex64),
    "complex convolution": (lambda x: F.conv2d(x, x[:8, :, :3, :3]), IMAGES, torch.complex64),
    "allclose": (lambda x: torch.allclose(x, x), SQUARE, torch.float32),
    "gradient of a binary target": (weighted, SQUARE, torch.float32),
    "largest of long rows": (lambda x: x.topk(5), ROWS, torch.float32),
    "largest of many rows": (lambda x: x.topk(2), (1000, 800), torch.float16),
    "fft": (torch.fft.fft, SQUARE, torch.bfloat16),
    "fft of a middle dimension": (lambda x: torch.fft.fft(x, dim=1), SAMPLES, torch.float32),
    "rfft2": (torch.fft.rfft2, SQUARE, torch.float16),
    "irfft2": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), SAMPLES, torch.float32),
    "encoder layer": (partial(attended, layer=nn.TransformerEncoderLayer), SAMPLES, torch.float32),
    "attention to others": (partial(attended, layer=nn.MultiheadAttention), SAMPLES, torch.float32),
    "sum of a convolution": (partial(convolved, layer=nn.Conv2d), IMAGES, torch.float32),
    "sum of a 1-D convolution": (lambda x: convolved(x.flatten(2), nn.Conv1d), IMAGES, torch.float32),
    "sum of a transposed convolution": (partial(convolved, layer=nn.ConvTranspose2d), IMAGES, torch.float32),
    "sum of a convolution with weights in channels last": (
        partial(convolved, layer=nn.Conv2d, format=torch.channels_last), IMAGES, torch.float32,
    ),
    "few rows, looked up often": (partial(looked_up, count=4096), SQUARE, torch.float32),
    "few rows of 16 bits, looked up often": (partial(looked_up, count=4096), SQUARE, torch.bfloat16),
    "gradient of two statistics": (lambda x: torch.var_mean(x, 0), SQUARE, torch.float32),
    "gradient of a function": (torch.func.grad(lambda x: (x.sin() * x).sum()), SQUARE, torch.float32),
    "distances": (lambda x: torch.cdist(x.view(2, 32, 64), x.view(2, 32, 64)[:, :9], p=1.0), SQUARE, torch.float32),
    "patches": (lambda x: F.unfold(x, 4, stride=4), IMAGES, torch.float32),
    "windows that overlap": (lambda x: x.unfold(1, 7, 4), SQUARE, torch.float32),
    "windows that overlap in the last dimension": (lambda x: x.unfold(-1, 7, 4).mean(-1), MATRIX, torch.float32),
    "windows side by side": (lambda x: x.unfold(0, 4, 4), SQUARE, torch.float32),
    "rolled dimensions": (lambda x: x.roll((1, 2, 3), (1, 2, 3)), IMAGES, torch.float32),
    "two layers of LSTM in bfloat16": (partial(recurrent, layer=nn.LSTM, num_layers=2), SAMPLES, torch.bfloat16),
    "GRU both ways in bfloat16": (partial(recurrent, layer=nn.GRU, bidirectional=True), SAMPLES, torch.bfloat16),
    "LSTM in float16": (partial(recurrent, layer=nn.LSTM), SAMPLES, torch.float16),
    "products with conjugates": (by_conjugates, SQUARE, torch.complex64),
    "Hermitian Fourier transform": (torch.fft.hfft, SAMPLES, torch.float32),
    "real transform of conjugates": (lambda x: torch.fft.irfft(x.conj()), SQUARE, torch.complex64),
    "Bessel function": (torch.special.i1e, SQUARE, torch.float32),
    **{f"second gradient of {name}": (partial(differentiated_twice, run=run), SQUARE, torch.float32)
       for name, run in TWICE.items()},
    "rows that are written to": (overwritten, SQUARE, torch.float32),
    "fake quantization by numbers": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), SQUARE, torch.float32),
    "value of a mask that is false": (
        lambda x: x.masked_fill(torch.zeros(64, 64, dtype=torch.bool, device=x.device), x[0, 0]), SQUARE, torch.float32,
    ),
    "scattered into a larger result": (
        lambda x: x[0].detach().masked_scatter(x.detach() == 1, x.detach()), SQUARE, torch.float32,
    ),
    "normal draws of one deviation": (lambda x: torch.normal(x.detach(), 0.5), SQUARE, torch.float32),
    "draws of one row with replacement": (lambda x: x[0].detach().multinomial(9, True), SQUARE, torch.float32),
    "distances of no points": (lambda x: torch.cdist(x[:0, None], x[None, :9]), SQUARE, torch.float32),
    "largest of many": (lambda x: torch._foreach_max([x.detach(), x.detach()[0]]), MATRIX, torch.float32),
    "norms": (lambda x: torch._foreach_norm([x, x, x[0]]), SQUARE, torch.float32),
    **{f"attention over nested tensors of {dtype}": (attended_nested, SAMPLES, dtype) for dtype in (torch.float32, torch.float16)},
    "causal attention over nested tensors": (partial(attended_nested, is_causal=True), SAMPLES, torch.bfloat16),
    "largest of nested tensors": (padded, SAMPLES, torch.float32),
    **{f"{name} of {count} × {rows}": (run, (count, rows, rows), torch.float32)
       for name, run in SOLVED.items() for count, rows in ((1, 130), (3, 90), (6, 20))},
    "singular values": (lambda x: torch.linalg.matrix_norm(x, "nuc"), (200, 32), torch.float32),
    "largest of a bag": (lambda x: F.embedding_bag(places(x), x, mode="max").sum(), SQUARE, torch.float32),
    "layer norm of many rows": (lambda x: nn.LayerNorm(513).to(x.device)(x), (65600, 513), torch.float32),
    "deviation of channels in double precision": (
        lambda x: x.to(memory_format=torch.channels_last).std((2, 3)), (2, 64, 32, 32), torch.float64,
    ),
    "large gradient in channels last": (lambda x: x.to(memory_format=torch.channels_last) * 2, (4, 64, 64, 64), torch.float32),
    "group norm in double precision": (lambda x: nn.GroupNorm(32, 64).to(x.device, x.dtype)(x), (2, 64, 32, 32), torch.float64),
    "RMS norm in double precision": (lambda x: F.rms_norm(x, (64,)), (9, 100, 64), torch.float64),
    "largest in channels last": (
        lambda x: F.max_pool3d(x.to(memory_format=torch.channels_last_3d), 2), (2, 8, 8, 16, 16), torch.float32,
    ),
    **{f"unique {dtype} {' '.join(more)}": ((lambda x, more=more: unique(x, *more)), (3000, 7), dtype)
       for dtype in (torch.bool, torch.float16, torch.float32, torch.int64) for more in ((), ("inverse",), ("counts",))},
    "runs": (lambda x: unique(x, "inverse", "counts", function=torch.unique_consecutive), (3000, 7), torch.int32),
    "linear layer of turned rows": (turned, SAMPLES, torch.float32),
    **{f"{name} of a turned matrix": ((lambda x, run=run: run(x.T)), MATRIX, torch.float32) for name, run in STRIDED.items()},
    **{f"{name} of every second column": ((lambda x, run=run: run(x[:, ::2])), MATRIX, torch.float32)
       for name, run in STRIDED.items()},
    **{f"{name} into a tensor": ((lambda x, run=run: run(x.detach())), MATRIX, torch.float32) for name, run in WRITTEN.items()},
    "weight that a pass without gradients has cast": (cast_twice, SAMPLES, torch.float32),
    "reflections and factors": (lambda x: torch.geqrf(x.detach()), (200, 64), torch.float32),
    "orthogonal and triangular factors": (lambda x: torch.linalg.qr(x), (200, 64), torch.float32),
    **{f"deformed convolution of {images} images in {groups} groups": (
        partial(deformed, groups=groups), (images, 16, 20, 20), torch.float32,
    ) for images, groups in ((2, 1), (1, 2), (64, 2), (3, 4))},
    "masked deformed convolution in halves": (partial(deformed, groups=1, masked=True), (2, 16, 20, 20), torch.float16),
    "deformed convolution in channels last": (
        lambda x: deformed(x.to(memory_format=torch.channels_last), 1), (2, 16, 20, 20), torch.float32,
    ),
}


def cases(mode: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the name of a kernel, what runs it, and a function that makes the input on a device."""
    _nt_view_dummy()  # which PyTorch makes once in a process, on meta, and a trace counts
    for name, (run, shape, kind) in KERNELS.items():
        yield name, run, partial(new, *shape, dtype=kind), (), {}


if __name__ == "__main__":
    print_measured(cases)
