"""Published runs as their sources do them, for `sizer.size_step`: each function returns a `setup` that returns one step.

What the runs keep alive between steps is kept here too: gradients until they are dropped, outputs and losses in the variables of
a loop. Models are built as `from_pretrained(torch_dtype=…)` builds them, under that default dtype. The transformers library
is whichever is installed: its models' code decides, so the library of a run's time comes nearest (its row names it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from torchvision.models import vit_l_16

Step = Callable[[], None]
Setup = Callable[[], Step]

BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-base-uncased": ("BertConfig", "BertForMaskedLM", {}),
    "bert-large-uncased": ("BertConfig", "BertForSequenceClassification", BERT_LARGE | {"use_cache": False}),
    "gpt2-large": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "opt-350m": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "pythia-410m": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50304,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "rotary_pct": 0.25,
            "max_position_embeddings": 2048,
        },
    ),
    "distilbert-base": ("DistilBertConfig", "DistilBertForMaskedLM", {}),
    "albert-base-v2": (
        "AlbertConfig",
        "AlbertForMaskedLM",
        {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", {}),
    "llama-2-7b": ("LlamaConfig", "LlamaForCausalLM", {"max_position_embeddings": 4096}),
}


def attention_benchmark(model: str, batch: int, seq: int, attention: str) -> Setup:
    """The loop of Hugging Face's SDPA tables: float16 throughout, the logits' sum as loss, no optimizer.

    optimum, tests/benchmark/benchmark_bettertransformer_training_minimal.py: gradients are dropped before each forward pass,
    `outputs` and `loss` live until the next ones replace them. Inputs are token ids and a mask of ones.
    """

    def setup() -> Step:
        module = build(model, attention, torch.float16)
        inputs = {
            "input_ids": torch.randint(module.config.vocab_size - 1, (batch, seq), device="cpu").cuda(),
            "attention_mask": torch.ones(batch, seq, dtype=torch.int64).cuda(),
        }
        kept: dict[str, Any] = {}

        def step() -> None:
            module.zero_grad()
            kept["outputs"] = module(**inputs)
            kept["loss"] = kept["outputs"].logits.sum()
            kept["loss"].backward()

        return step

    return setup


def vit_finetuning(batch: int, precision: str, accumulate: int, optimizer: str) -> Setup:
    """ViT-L/16 on 224 pixels with ten classes, as rasbt/pytorch-memory-optim trains it.

    `precision`: "32", "16-mixed" or "bf16-true" of Lightning Fabric: autocast and a gradient scaler, or weights and inputs in
    bfloat16; logits come back in float32. Without accumulation gradients are dropped between forward and backward pass, with it
    after the optimizer's step.
    """

    def setup() -> Step:
        half = torch.bfloat16 if precision == "bf16-true" else torch.float32
        module = vit_l_16()
        module.heads.head = nn.Linear(1024, 10)
        module = module.to(half).cuda().train()
        chosen = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](module.parameters(), lr=5e-5)
        scaler = torch.amp.GradScaler("cuda", enabled=precision == "16-mixed")
        cast = torch.autocast("cuda", torch.float16) if precision == "16-mixed" else nullcontext()
        kept: dict[str, Tensor] = {}
        steps = [0]

        def step() -> None:
            for _ in range(accumulate):
                kept["features"] = torch.zeros(batch, 3, 224, 224).cuda()
                kept["targets"] = torch.zeros(batch, dtype=torch.int64).cuda()
                with cast:
                    logits = module(kept["features"].to(half))
                kept["logits"] = logits.float()
                kept["loss"] = F.cross_entropy(kept["logits"], kept["targets"]) / accumulate
                if accumulate == 1:
                    chosen.zero_grad()
                scaler.scale(kept["loss"]).backward()
                if steps[0] % accumulate == 0:
                    scaler.step(chosen)
                    scaler.update()
                    if accumulate > 1:
                        chosen.zero_grad()
                steps[0] += 1

        return step

    return setup


def trainer(batch: int, accumulate: int, checkpointing: int, dtype: str, optimizer: str) -> Setup:
    """BERT-large classifying 512 tokens under the Trainer of transformers 4.15 and PyTorch 1.10.

    Attention is eager; `model.zero_grad()` filled gradients with zeros then and kept them; AdamW was transformers' own, tensor
    by tensor. `dtype` is "float32" or "amp-float16".
    """

    def setup() -> Step:
        module = build("bert-large-uncased", "eager", torch.float32)
        if checkpointing:  # the first name is transformers 5's
            getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
        parameters = list(module.parameters())
        chosen = AdamW(parameters) if optimizer == "adamw" else adafactor(parameters)
        mixed = dtype == "amp-float16"
        scaler = torch.amp.GradScaler("cuda", enabled=mixed)

        def step() -> None:
            for _ in range(accumulate):
                ids = torch.randint(100, 30000, (batch, 512), device="cpu").cuda()
                labels = torch.randint(0, 2, (batch,), device="cpu").cuda()
                with torch.autocast("cuda", torch.float16) if mixed else nullcontext():
                    loss = module(input_ids=ids, labels=labels).loss
                scaler.scale(loss / accumulate).backward()
            scaler.unscale_(chosen)
            for parameter in parameters:
                parameter.grad.norm()
                parameter.grad.mul_(1.0)
            scaler.step(chosen)
            scaler.update()
            module.zero_grad(set_to_none=False)

        return step

    return setup


def forward_pass(model: str, batch: int, seq: int) -> Setup:
    """A forward pass without gradients in float16, with what it returns for the next token: logits in float32 and the cache."""

    def setup() -> Step:
        module = build(model, "eager", torch.float16).eval()
        ids = torch.randint(module.config.vocab_size - 1, (batch, seq), device="cpu").cuda()
        mask = torch.ones(batch, seq, dtype=torch.int64).cuda()

        def step() -> None:
            with torch.no_grad():
                outputs = module(input_ids=ids, attention_mask=mask)
                outputs.logits.float()

        return step

    return setup


class AdamW(torch.optim.Optimizer):
    """transformers.optimization.AdamW of version 4: tensor by tensor, one temporary of the tensor's size."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step. `exp_avg` and `exp_avg_sq` appear in the first."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"])


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The Trainer's Adafactor: transformers' own, with a learning rate from outside."""
    return transformers.optimization.Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False)


def build(model: str, attention: str, dtype: torch.dtype) -> nn.Module:
    """A model of CONFIGS in training mode on the device, as `from_pretrained` makes it: under the default dtype."""
    config_name, class_name, values = CONFIGS[model]
    config = getattr(transformers, config_name)(**values)
    config._attn_implementation = attention
    with default_dtype(dtype):
        module = getattr(transformers, class_name)(config)
    return module.cuda().train()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it floating-point tensors are of this dtype where nobody says another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def on_the_host() -> Iterator[None]:
    """Within it modules are built where no device's memory is: nothing is recorded. `load` gives them their places then."""
    with _disable_current_modes():
        yield


def load(module: nn.Module) -> nn.Module:
    """The module with each weight and buffer in a block of its own, allocated in the order of `Module.cuda()`."""
    placed: set[int] = set()

    def place(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata in placed:  # tied: it is there already
            return tensor
        copy = torch.empty_like(tensor, device="cuda")
        placed.add(copy.untyped_storage()._cdata)
        return copy

    return module._apply(place)
