"""Steps with compiled code, written as for a real device: `sizer.size_step` and the null driver take the same functions.

`WORKS` maps a name to a setup. The names are MODEL DTYPE MODE OPTION…; MODE is eager or a mode of torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tracing.graph_works import GRAPH_WORKS
from tests.tracing.library_works import DIFFUSERS_WORKS, LIBRARY_WORKS

Step = Callable[[], Any]
_BATCH, _LENGTH = 2, 256


class Block(nn.Module):
    """A transformer block as nanoGPT has it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.before(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(b, t, c)))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


class SmallGpt(nn.Module):
    """A language model with a tied head that returns its loss."""

    def __init__(
        self, words: int = 50304, width: int = 384, heads: int = 6, layers: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _mlp(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18()


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=224, patch_size=16, num_layers=4, num_heads=6, hidden_dim=384, mlp_dim=1536)


def _llama(layers: int = 2, width: int = 512) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=1408, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=32000, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _encoder() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, batch_first=True) for _ in range(2)))


def _sequences() -> tuple[Tensor, ...]:
    return (torch.zeros(4, _LENGTH, 512, device="cuda"),)


def _rows() -> tuple[Tensor, ...]:
    return (torch.zeros(256, 512, device="cuda"),)


def _images() -> tuple[Tensor, ...]:
    return torch.zeros(_BATCH, 3, 224, 224, device="cuda"), torch.zeros(_BATCH, dtype=torch.long, device="cuda")


def _tokens() -> tuple[Tensor, ...]:
    return tuple(torch.zeros(_BATCH, _LENGTH, dtype=torch.long, device="cuda") for _ in range(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple], Callable[..., Tensor]]] = {
    "mlp": (_mlp, _rows, lambda model, x: model(x).square().mean()),
    "resnet18": (_resnet18, _images, lambda model, x, y: F.cross_entropy(model(x), y)),
    "vit": (_vit, _images, lambda model, x, y: F.cross_entropy(model(x), y)),
    "encoder": (_encoder, _sequences, lambda model, x: model(x).square().mean()),
    "gpt": (SmallGpt, _tokens, lambda model, ids, labels: model(ids, labels)),
    "gpt-dropout": (partial(SmallGpt, dropout=0.1), _tokens, lambda model, ids, labels: model(ids, labels)),
    "llama": (_llama, _tokens, lambda model, ids, labels: model(input_ids=ids, labels=labels).loss),
}


def _training(
    model: nn.Module, loss_of: Callable[..., Tensor], batch: tuple, cast: Callable[[], Any], update: Any = None
) -> Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    advance = optimizer.step if update is None else update(optimizer)

    def step() -> None:
        with cast():
            loss = loss_of(*batch)
        loss.backward()
        del loss
        advance()
        optimizer.zero_grad(set_to_none=True)

    return step


def of_model(name: str, dtype: str, mode: str, *, training: bool = True, **options: Any) -> Step:
    """Return the step of a model of MODELS; `dtype` is float32, bfloat16 or amp, `budget` the activation memory budget."""
    make, make_batch, loss_of = MODELS[name]
    budget, update = options.pop("budget", None), options.pop("update", None)
    if budget is not None:
        torch._functorch.config.activation_memory_budget = budget
    model = make().to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).cuda().train(training)
    halves = dtype == "bfloat16"
    batch = tuple(t.bfloat16() if halves and t.is_floating_point() else t for t in make_batch())
    called = model if mode == "eager" else torch.compile(model, mode=mode, **options)
    cast = partial(torch.autocast, "cuda", dtype=torch.bfloat16) if dtype == "amp" else nullcontext
    if training:
        return _training(model, partial(loss_of, called), batch, cast, update)

    def predict() -> None:
        with torch.no_grad(), cast():
            called(batch[0])

    return predict


class Two(nn.Module):
    """Two MLPs, and something between them that strains the compiler."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.between = _mlp(256), _mlp(256), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Square(torch.autograd.Function):
    """A square with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def breaks(x: Tensor) -> Tensor:
    """End a region."""
    torch._dynamo.graph_break()
    return x


def _prints(x: Tensor) -> Tensor:
    print(end="")
    return x


def asks(x: Tensor) -> Tensor:
    """Branch on a value, with the same memory on both sides."""
    return x * 2 if x.sum() > 1 else x * 3


def _selects(x: Tensor) -> Tensor:
    return x[x[:, 0] == 0]


def _products(x: Tensor) -> Tensor:
    """Multiply by one-hot vectors and take products, whose gradient goes the way for factors of 0 in compiled code."""
    chosen = F.one_hot(x[:, :64].long(), 64)
    return (x[:, None, :64] * chosen).prod(1).repeat(1, 4)


def between(function: Callable[[Tensor], Tensor], **options: Any) -> Step:
    """Return the step of two MLPs with a function between them, compiled as one."""
    model = Two(function).cuda()
    called = torch.compile(model, **options)
    return _training(model, lambda x: called(x).square().mean(), (torch.zeros(128, 256, device="cuda"),), nullcontext)


def checkpointed() -> Step:
    """Return the step of a compiled module whose halves are checkpointed."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Two):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, checkpoint(self.first, x, use_reentrant=False), use_reentrant=False)

    model = Checkpointed(nn.Identity()).cuda()
    called = torch.compile(model)
    return _training(model, lambda x: called(x).square().mean(), (torch.zeros(128, 256, device="cuda"),), nullcontext)


def per_block() -> Step:
    """Return the step of three modules that are compiled one by one."""
    model = nn.Sequential(*(_mlp(256) for _ in range(3))).cuda()
    for block in model:
        block.compile()
    return _training(model, lambda x: model(x).square().mean(), (torch.zeros(128, 256, device="cuda"),), nullcontext)


def optimized(*kinds: Callable[..., torch.optim.Optimizer], steps: int = 1) -> Step:
    """Return the step of MLPs whose optimizers step in one compiled function, the first of them in step `steps`."""
    models = nn.ModuleList(_mlp(256) for _ in kinds).cuda()
    optimizers = [kind(model.parameters()) for kind, model in zip(kinds, models, strict=True)]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    updates = iter([*(update for _ in range(steps - 1)), torch.compile(update)])
    current = [update]

    def step() -> None:
        current[0] = next(updates, current[0])
        sum(model(torch.zeros(128, 256, device="cuda")).square().mean() for model in models).backward()
        current[0]()

    return step


def whole_step() -> Step:
    """Return a step that is compiled as one function: loss, backward pass, clipping and optimizer."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile
    def train(x: Tensor) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x), x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: train(torch.zeros(64, 256, device="cuda"))


def two_lengths() -> Step:
    """Return a step whose batch grows from step to step."""
    model, rows = _mlp(256).cuda(), [64]
    called = torch.compile(model)

    def step() -> None:
        rows[0] += 32
        called(torch.zeros(rows[0], 256, device="cuda")).square().mean().backward()
        model.zero_grad()

    return step


def lora() -> Step:
    """Return the step of a compiled language model with peft's adapters."""
    from peft import LoraConfig, get_peft_model

    model = _llama(layers=1, width=256).to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05)).cuda()
    called, ids = torch.compile(model), torch.zeros(2, 128, dtype=torch.long, device="cuda")
    return _training(model, lambda ids: called(input_ids=ids, labels=ids).loss, (ids,), nullcontext)


def device_by_name() -> Step:
    """Return a step whose compiled code names the device and asks where a tensor is."""

    class Named(Two):
        def forward(self, x: Tensor) -> Tensor:
            assert x.is_cuda and x.device.type == "cuda"
            places = torch.arange(x.shape[0], device="cuda") + torch.zeros(x.shape[0], device=x.device)
            return self.second(self.first(x) * places.to("cuda")[:, None])

    model = Named(nn.Identity()).cuda()
    called = torch.compile(model)
    return _training(model, lambda x: called(x).square().mean(), (torch.zeros(128, 256, device="cuda"),), nullcontext)


class Flexible(nn.Module):
    """Attention by flex_attention: with a learned bias by head, or with fewer heads of keys and values."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.biased = nn.Linear(256, 768), nn.Linear(256, 256), biased
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        b, t, c = x.shape
        q, k, v = (z.view(b, t, 8, -1).transpose(1, 2) for z in self.qkv(x).split(c, dim=2))
        if self.biased:
            bias = self.bias
            y = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] + (i - j), block_mask=mask)
        else:
            y = flex_attention(q, k[:, :2], v[:, :2], block_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


def flexible(mask: str, *, biased: bool = False, mode: str = "default", cast: str = "amp") -> Step:
    """Return the step of a compiled Flexible; `mask` is causal, documents or none."""
    from torch.nn.attention.flex_attention import create_block_mask

    number = torch.arange(384, device="cuda") // 64
    masks: dict[str, Callable[..., Tensor]] = {
        "causal": lambda b, h, q, k: q >= k,
        "documents": lambda b, h, q, k: number[q] == number[k],
    }
    block_mask = create_block_mask(masks[mask], None, None, 384, 384, device="cuda") if mask in masks else None
    dtype = torch.bfloat16 if cast == "bfloat16" else torch.float32
    model = Flexible(biased=biased).to(dtype).cuda()
    called, x = torch.compile(model, mode=mode), torch.zeros(3, 384, 256, dtype=dtype, device="cuda")
    within = partial(torch.autocast, "cuda", dtype=torch.bfloat16) if cast == "amp" else nullcontext
    return _training(model, lambda x: called(x, block_mask).float().square().mean(), (x,), within)


def _of(name: str, dtype: str, mode: str = "default", **options: Any) -> tuple[str, Callable[[], Step]]:
    text = " ".join(f"{key}={value}" for key, value in options.items())
    return f"{name} {dtype} {mode} {text}".strip(), partial(of_model, name, dtype, mode, **options)


WORKS: dict[str, Callable[[], Step]] = dict(
    [
        *(_of("mlp", dtype) for dtype in ("float32", "bfloat16", "amp")),
        _of("mlp", "float32", training=False),
        _of("mlp", "float32", "eager"),
        _of("mlp", "float32", backend="aot_eager"),
        _of("mlp", "float32", backend="eager"),
        *(_of("resnet18", dtype) for dtype in ("float32", "amp")),
        _of("resnet18", "float32", training=False),
        *(_of("vit", dtype) for dtype in ("float32", "amp")),
        *(_of("gpt", dtype) for dtype in ("float32", "bfloat16", "amp")),
        _of("gpt", "amp", dynamic=True),
        *(_of("gpt", "amp", budget=budget) for budget in (0.5, 0.0)),
        _of("encoder", "amp", budget=0.3),
        _of("gpt-dropout", "amp"),
        *(_of("llama", dtype) for dtype in ("bfloat16", "amp")),
        _of("llama", "bfloat16", training=False),
        _of("llama", "bfloat16", "eager"),
        *(_of(name, "bfloat16", "reduce-overhead") for name in ("mlp", "vit", "gpt", "gpt-dropout", "llama")),
        *(_of(name, "amp", "reduce-overhead") for name in ("gpt", "gpt-dropout")),
        _of("gpt", "amp", "reduce-overhead", budget=0.5),
        _of("resnet18", "float32", "reduce-overhead"),
        *(_of(name, "float32", "reduce-overhead", training=False) for name in ("mlp", "resnet18")),
    ]
) | {
    "graph break": partial(between, breaks),
    "print": partial(between, _prints),
    "branch on a value": partial(between, asks),
    "nonzero": partial(between, _selects),
    "autograd function": partial(between, Square.apply),
    "one-hot vectors and products": partial(between, _products),
    "checkpointed": checkpointed,
    "per block": per_block,
    "two lengths": two_lengths,
    "lora": lora,
    "device by name": device_by_name,
    "flex_attention": partial(flexible, "none", cast="bfloat16"),
    "flex_attention, causal": partial(flexible, "causal"),
    "flex_attention, documents": partial(flexible, "documents", cast="bfloat16"),
    "flex_attention, biased": partial(flexible, "causal", biased=True),
    "flex_attention, graphs": partial(flexible, "documents", mode="reduce-overhead"),
    "compiled Adam": partial(optimized, torch.optim.Adam),
    "compiled Adam, eager before": partial(optimized, torch.optim.Adam, steps=2),
    "compiled AdamW, fused": partial(optimized, partial(torch.optim.AdamW, fused=True)),
    "compiled AdamW, capturable": partial(optimized, partial(torch.optim.AdamW, capturable=True, lr=1e-3)),
    "compiled SGD and RMSprop": partial(optimized, partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.RMSprop),
    "whole step": whole_step,
    **GRAPH_WORKS,
    **LIBRARY_WORKS,
    **DIFFUSERS_WORKS,
}
# What the others of a kind show, in a few seconds.
FEW = (
    "mlp float32 default", "gpt amp default budget=0.5", "graph break", "per block", "device by name",
    "mlp bfloat16 reduce-overhead", "graphs of blocks with dropout", "graphs joined late", "a whole step recorded",
    "two graphs in a pool", "flex_attention, documents", "compiled Adam", "whole step",
    "one-hot vectors and products",
)  # fmt: skip
