"""Single operators as Liger Kernel's benchmarks measure them (benchmark/scripts, BSD 2-clause): PyTorch's own implementations.

A figure is the median of ten calls of `max_memory_allocated`, counted anew for each. Each benchmark builds the compared module of
Liger too, whose weights lie beside. `mode` is what is measured: the forward pass, forward and backward pass ("full"), or
the backward pass of an output that was kept; "full" ones keep the graph until the output goes, as their source does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from tests.benchmarks.published.language import Setup, Step

Forward = Callable[[], Tensor]


def cross_entropy(rows: int, vocabulary: int) -> Setup:
    """Float32 logits of leaf tensors."""

    def setup() -> Step:
        logits = torch.randn(rows, vocabulary, requires_grad=True, device="cuda")
        target = torch.randint(vocabulary, (rows, 1), device="cuda").squeeze(1)
        return lambda: F.cross_entropy(logits, target).backward()

    return setup


def linear_cross_entropy(rows: int, hidden: int, vocabulary: int) -> Setup:
    """A language model's head and its loss in bfloat16."""

    def setup() -> Step:
        head, beside = (nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).cuda() for _ in range(2))
        states = torch.randn(rows, hidden, requires_grad=True, dtype=torch.bfloat16, device="cuda")
        target = torch.randint(vocabulary, (rows, 1), device="cuda").squeeze(1)

        def step() -> None:
            F.cross_entropy(head(states), target).backward()

        step.beside = beside  # type: ignore[attr-defined]
        return step

    return setup


def gated_mlp(batch: int, seq: int, hidden: int, intermediate: int, activation: str, mode: str) -> Setup:
    """Llama's MLP in bfloat16."""

    def setup() -> Step:
        config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, hidden_act=activation)
        x = torch.randn(batch, seq, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer = LlamaMLP(config).cuda().to(torch.bfloat16)
        return step_of(mode, lambda: layer(x))

    return setup


def norm(operator: str, rows: int, width: int, dtype: str) -> Setup:
    """A normalization of [rows, width] with float32 weights: "layer_norm" or "rms_norm" as Llama's code has it."""

    def setup() -> Step:
        make = {"layer_norm": nn.LayerNorm, "rms_norm": LlamaRMSNorm}[operator]
        layer, beside = make(width, eps=1e-6).cuda(), make(width, eps=1e-6).cuda()
        x = torch.randn(rows, width, dtype=getattr(torch, dtype), device="cuda")
        gradient = torch.randn_like(x)
        x.requires_grad_(True)

        def step() -> None:
            layer(x).backward(gradient, retain_graph=True)

        step.beside = beside  # type: ignore[attr-defined]
        return step

    return setup


def group_norm(rows: int, channels: int, length: int) -> Setup:
    """Groups of four channels in float32."""

    def setup() -> Step:
        layer, beside = (nn.GroupNorm(channels // 4, channels, eps=1e-6).cuda() for _ in range(2))
        x = torch.randn(rows, channels, length, device="cuda")
        gradient = torch.randn_like(x)
        x.requires_grad_(True)

        def step() -> None:
            layer(x).backward(gradient, retain_graph=True)

        step.beside = beside  # type: ignore[attr-defined]
        return step

    return setup


def add_rms_norm(rows: int, width: int) -> Setup:
    """A residual added and both normalised and handed on, written in PyTorch's operators, float32."""

    def setup() -> Step:
        weight = nn.Parameter(torch.ones(width, device="cuda"))
        beside = [torch.ones(width, device="cuda") for _ in range(3)]
        x, r = (torch.randn(rows, width, device="cuda") for _ in range(2))
        gradients = torch.randn_like(x), torch.randn_like(r)
        x.requires_grad_(True)
        r.requires_grad_(True)

        def forward() -> tuple[Tensor, Tensor]:
            states, residual = x.to(torch.float32), r.to(torch.float32)
            states = states + residual
            residual = states
            variance = states.pow(2).mean(-1, keepdim=True)
            states = states * torch.rsqrt(variance + 1e-6)
            return weight * states.to(x.dtype), residual.to(x.dtype)

        def step() -> None:
            y, s = forward()
            torch.autograd.backward((y, s), gradients)

        step.beside = beside  # type: ignore[attr-defined]
        return step

    return setup


def rope(seq: int, hidden: int) -> Setup:
    """Rotary positions of 32 query and 8 key heads in bfloat16."""

    def setup() -> Step:
        head_dim = hidden // 32
        config = LlamaConfig(hidden_size=hidden, num_attention_heads=32, num_key_value_heads=8, head_dim=head_dim)
        rotary = LlamaRotaryEmbedding(config).cuda()
        q, k = (
            torch.randn(1, seq, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True).transpose(
                1, 2
            )
            for heads in (32, 8)
        )
        dq, dk = torch.randn_like(q), torch.randn_like(k)
        positions = torch.arange(seq, device="cuda").unsqueeze(0)
        cos, sin = rotary(k, positions)

        def step() -> None:
            outputs = apply_rotary_pos_emb(q, k, cos, sin)
            torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

        step.beside = positions  # type: ignore[attr-defined]
        return step

    return setup


def divergence(operator: str, rows: int, vocabulary: int) -> Setup:
    """A loss between two distributions of float32: "kl_div", "jsd" or "tvd". Their inputs are no leaves: both are
    softmaxes, one of a tensor with gradient."""

    def setup() -> Step:
        softmax = partial(torch.softmax if operator == "tvd" else torch.log_softmax, dim=-1)
        student = softmax(torch.randn(rows, vocabulary, requires_grad=True, device="cuda"))
        second = partial(torch.log_softmax if operator == "jsd" else torch.softmax, dim=-1)
        teacher = second(torch.randn(rows, vocabulary, device="cuda"))
        loss = {"kl_div": partial(F.kl_div, reduction="batchmean"), "jsd": jensen_shannon, "tvd": total_variation}

        def step() -> None:
            y = loss[operator](student, teacher)
            y.backward(retain_graph=True)

        return step

    return setup


def linear_divergence(rows: int, hidden: int, vocabulary: int) -> Setup:
    """A student's and a teacher's head in bfloat16 and the Jensen-Shannon divergence between them. Both heads of Liger share
    their weights."""

    def setup() -> Step:
        heads = [nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).cuda() for _ in range(4)]
        student, teacher, *beside = heads
        for one, other in zip((student, teacher), beside, strict=True):
            one.weight.data = other.weight.data = torch.rand(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)
        ours = torch.rand(rows, hidden, requires_grad=True, dtype=torch.bfloat16, device="cuda")
        theirs = torch.rand(rows, hidden, dtype=torch.bfloat16, device="cuda")

        def forward() -> Tensor:
            logits, wanted = student(ours), teacher(theirs)
            q = torch.log_softmax(logits / 1.0, dim=-1)
            p = torch.log_softmax(wanted / 1.0, dim=-1)
            return jensen_shannon(q, p).to(torch.bfloat16)

        return lambda: forward().backward()

    return setup


def jensen_shannon(q: Tensor, p: Tensor) -> Tensor:
    """The divergence of two log distributions in float32, half from each side."""
    p, q = p.to(torch.float), q.to(torch.float)
    p, q = p.view(-1, p.size(-1)), q.view(-1, q.size(-1))
    m = torch.lerp(torch.exp(q), torch.exp(p), 0.5)
    kl = partial(F.kl_div, reduction="none", log_target=True)
    loss = 0.5 * kl(torch.log(m), p).sum(dim=-1) + 0.5 * kl(torch.log(m), q).sum(dim=-1)
    return (loss / q.shape[0]).sum()


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the sum of differences, by row."""
    distance = torch.abs(p - q) / 2.0
    return torch.sum(distance) / p.size(0)


def step_of(mode: str, forward: Forward) -> Step:
    """The step that a mode measures."""
    if mode == "backward":
        y = forward()
        gradient = torch.randn_like(y)
        return lambda: y.backward(gradient, retain_graph=True)

    def full() -> None:
        y = forward()
        y.backward(torch.randn_like(y), retain_graph=True)

    def alone() -> None:
        forward()

    if (
        mode == "forward"
    ):  # both modes ran before in the same process: the backward pass' thread holds its cuBLAS workspace
        one = torch.ones(1, 1, device="cuda", requires_grad=True)
        (one @ one).backward()
    return {"full": full, "forward": alone}[mode]
