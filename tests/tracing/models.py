"""Models for the comparison with the CPU: real architectures, shallow or small enough to run in a second."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torchvision

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.huggingface import huggingface_blueprint


def classifier(name: str, size: int) -> Blueprint:
    """A torchvision classifier with images of `size` pixels."""
    return Blueprint(
        name=name,
        class_name=name,
        build=lambda: torchvision.models.get_model(name, weights=None),
        example=lambda batch, training: Example(
            args=(torch.zeros(batch, 3, size, size),), targets=torch.arange(batch) % 1000
        ),
        loss=lambda module, example: F.cross_entropy(module(*example.args), example.targets),
        predict=lambda module, example: module(*example.args),
    )


def text(mode: str = "training", length: int | None = 64, attention: str = "sdpa", **config: object) -> Blueprint:
    """A transformers model from a config, with its usual head and `length` tokens."""
    return huggingface_blueprint(
        config,
        name=str(config["model_type"]),
        head=None,
        sequence_length=length,
        image_size=None,
        attention=attention,
        mode=mode,
    )


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 128,
           "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip
WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 128, "encoder_layers": 2,
           "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256,
           "decoder_ffn_dim": 256, "vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1, "num_mel_bins": 80}  # fmt: skip
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 3}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 3}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 2, "decoder_start_token_id": 0,
      "pad_token_id": 0}  # fmt: skip
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 3}
