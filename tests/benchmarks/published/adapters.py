"""LoRA on a Tesla T4 as `fitcheck-llm` measures it (scripts/measure.py, MIT): checkpointing, AdamW in float32, one batch.

Weights are read in float16 and go to the device as they are, then `peft` adds its adapters, which it keeps in float32. A step
drops the gradients first, and its output lives until the function returns. Attention is eager, or PyTorch's with its
memory-efficient kernel and grouped heads repeated before it. The measured peak is the second step's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sizer.architecture.quantizers import load_quantized, replace_layers
from sizer.catalogue.weights import WEIGHTS
from tests.benchmarks.published.language import Setup, Step, default_dtype, load, on_the_host

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LLAMA, _QWEN, _MISTRAL = "Llama", "Qwen2", "Mistral"
# Class, hidden size, layers, heads, key heads, intermediate size, vocabulary, head dim, tied: as the measured rows tell them.
MODELS: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "smollm2-135m": (_LLAMA, 576, 30, 9, 3, 1536, 49152, 64, True),
    "smollm2-360m": (_LLAMA, 960, 32, 15, 5, 2560, 49152, 64, True),
    "smollm2-1.7b": (_LLAMA, 2048, 24, 32, 32, 8192, 49152, 64, True),
    "tinyllama-1.1b": (_LLAMA, 2048, 22, 32, 4, 5632, 32000, 64, False),
    "qwen2.5-1.5b": (_QWEN, 1536, 28, 12, 2, 8960, 151936, 128, True),
    "qwen2.5-coder-1.5b": (_QWEN, 1536, 28, 12, 2, 8960, 151936, 128, True),
    "qwen2.5-7b": (_QWEN, 3584, 28, 28, 4, 18944, 152064, 128, False),
    "mistral-7b-v0.3": (_MISTRAL, 4096, 32, 32, 8, 14336, 32768, 128, False),
    "deepseek-coder-1.3b": (_LLAMA, 2048, 24, 16, 16, 5504, 32256, 128, False),
    "llama-3.2-1b": (_LLAMA, 2048, 16, 32, 8, 8192, 128256, 64, True),
    "llama-3.2-3b": (_LLAMA, 3072, 28, 24, 8, 8192, 128256, 128, True),
}


def lora_training(model: str, batch: int, seq: int, attention: str, rank: int) -> Setup:
    """LoRA on q, k, v and o of a float16 model."""

    def setup() -> Step:
        module = build(model, attention)
        module.config.use_cache = False
        return _step_of(module, batch, seq, attention, rank)

    return setup


def _step_of(module: nn.Module, batch: int, seq: int, attention: str, rank: int) -> Step:
    """A step of a model on the device, with adapters that are added to it there."""
    import peft

    adapters = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", target_modules=TARGETS
    )
    module = peft.get_peft_model(module, adapters)
    # the first name is transformers 5's
    enable = getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    module.enable_input_require_grads()
    module.train()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    batches: list[Tensor] = []  # made after what "load" measures

    def step() -> None:
        if not batches:
            batches.append(torch.randint(module.config.vocab_size, (batch, seq), device="cpu").cuda())
        ids = batches[0]
        with efficient_attention() if attention == "sdpa" else nullcontext():
            optimizer.zero_grad(set_to_none=True)
            out = module(input_ids=ids, labels=ids)
            out.loss.backward()
            optimizer.step()

    return step


def qlora_training(model: str, batch: int, seq: int, attention: str, rank: int) -> Setup:
    """LoRA on q, k, v and o of a model quantized to NF4 while it is loaded, the rest of it made float32.

    Cached memory is not given back between the two, as peft does from 0.20 on (prepare_model_for_kbit_training): 0.19.1 measured.
    """
    import peft

    def setup() -> Step:
        with on_the_host():
            module = replace_layers(
                without_weights(model, attention), WEIGHTS["nf4"].config, "float16", given="weights=nf4"
            )
        module = load_quantized(module, "cuda")
        module.config.use_cache = False
        module = peft.prepare_model_for_kbit_training(
            module, use_gradient_checkpointing=False
        )  # the step's own is as good
        return _step_of(module, batch, seq, attention, rank)

    return setup


def build(model: str, attention: str) -> nn.Module:
    """A model of MODELS in float16 on the device."""
    with on_the_host():
        module = without_weights(model, attention)
    return load(module)


def without_weights(model: str, attention: str) -> nn.Module:
    """A model of MODELS in float16."""
    family, hidden, layers, heads, key_heads, intermediate, vocabulary, head_dim, tied = MODELS[model]
    config = getattr(transformers, f"{family}Config")(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = attention
    with default_dtype(torch.float16):
        return getattr(transformers, f"{family}ForCausalLM")(config)


@contextmanager
def efficient_attention() -> Iterator[None]:
    """Within it PyTorch's attention is the memory-efficient kernel, with key and value heads repeated to the query's number."""
    original = F.scaled_dot_product_attention

    def repeated(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if key.size(-3) != query.size(-3):
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, dim=-3), value.repeat_interleave(groups, dim=-3)
            kwargs.pop("enable_gqa", None)
        return original(query, key, value, *args, **kwargs)

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), mock.patch.object(F, "scaled_dot_product_attention", repeated):
        yield
