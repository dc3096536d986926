"""Operators of cuFFT and cuSOLVER, a Triton-free tour of NVIDIA's other libraries."""

import sys

import torch

square = torch.randn(300, 300, device="cuda", requires_grad=True)
torch.fft.irfft2(torch.fft.rfft2(square)).sum().backward()
window = torch.hann_window(400, device="cuda")
waves = torch.stft(torch.randn(2, 4000, device="cuda"), 400, 100, window=window, return_complex=True)
values = torch.linalg.svd(square.detach())[1]
solved = torch.linalg.solve(square.detach(), torch.randn(300, 2, device="cuda"))
factors = [
    torch.linalg.qr(square.detach())[0],
    torch.linalg.cholesky(square.detach()),
    torch.linalg.eigh(square.detach())[1],
]
one = torch.eye(300, device="cuda")
sparse = (one if "dense" in sys.argv else one.to_sparse()) @ square.detach()
print(
    tuple(waves.shape), tuple(values.shape), tuple(solved.shape), [tuple(f.shape) for f in factors], tuple(sparse.shape)
)
print(values)
