"""Recipes for tokens: the ids of a sentence, the mask a tokenizer would return, and further inputs of text models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from sizer.architecture.examples.example_spec import (
    CACHE,
    ExampleSpec,
    integers,
    ones,
    read,
    special_tokens,
    takes,
    words,
    zeros,
)

CHOICES = 4  # answers per question of a multiple-choice head, as in SWAG


def is_causal(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> bool:
    """Return True for a decoder that is trained to continue its own input.

    Its token batches are packed, without padding or mask.
    """
    if read(config, "is_encoder_decoder", default=False) or "MaskedLM" in cls.__name__:
        return False
    if config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return bool(read(config, "is_decoder", default=False)) or "CausalLM" in cls.__name__ or "LMHead" in cls.__name__
    return takes(cls, *CACHE, "cache_params", "mems", "state", "use_cache")


def sentence(spec: ExampleSpec) -> Tensor:
    """Return token ids (batch, length) without special tokens.

    A text that is not continued ends with the end token, as from tokenizers.
    """
    text = spec.text
    ids = words(vocabulary(spec), special_tokens(spec.config, text), spec.batch, spec.tokens)
    end = end_token(text)
    if end is not None and not is_causal(spec.config, spec.cls):
        ids[:, -1] = end
    return ids


def words_and_mask(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of a plain encoder: a sentence, all of whose tokens are attended to."""
    return {"input_ids": sentence(spec), "attention_mask": ones(spec.batch, spec.tokens)}


def vocabulary(spec: ExampleSpec) -> int:
    """Return the number of token ids of the input embedding."""
    return vocabulary_of(spec.text)


def vocabulary_of(text: PreTrainedConfig) -> int:
    """Return the number of token ids in the config of a text, or 256 (bytes) if it does not say."""
    return read(text, "vocab_size", "src_vocab_size", "encoder.vocab_size", default=256)


def end_token(text: PreTrainedConfig) -> int | None:
    """Return the id that ends a text, None if the vocabulary has none."""
    end = read(text, "eos_token_id", "sep_token_id")
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    return end if isinstance(end, int) and 0 <= end < vocabulary_of(text) else None


def token_mask(spec: ExampleSpec) -> Tensor | None:
    """Return the tokenizer's mask, (batch, length) ones; None for a decoder, whose training batches are packed without padding."""
    return None if is_causal(spec.config, spec.cls) else ones(spec.batch, spec.tokens)


def boxes_of_words(spec: ExampleSpec) -> Tensor:
    """Return a box (left, top, right, bottom) in thousandths of the page for every token, (batch, length, 4)."""
    corner = torch.arange(spec.tokens) % 500
    box = torch.stack([corner, corner, corner + 400, corner + 20], dim=-1)
    return box.expand(spec.batch, -1, -1).contiguous()


def translation(spec: ExampleSpec, inputs: dict[str, Any]) -> Tensor:
    """Return decoder input ids (batch, length) for a step without labels, if they cannot be derived from labels."""
    decoder = spec.config.get_text_config(decoder=True)
    size = read(decoder, "vocab_size", "tgt_vocab_size", default=vocabulary(spec))
    return words(size, special_tokens(spec.config, decoder), spec.batch, spec.tokens)


def derives_decoder_input(spec: ExampleSpec) -> bool:
    """Return True if a training step shifts the labels to get the decoder's input: the class knows its first token."""
    return spec.takes("labels") and read(spec.config, "decoder_start_token_id") is not None


def as_choices(inputs: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return inputs of batch * CHOICES texts, folded to (batch, CHOICES, ...)."""
    return {name: value.unflatten(0, (batch, CHOICES)) for name, value in inputs.items()}


def language(spec: ExampleSpec) -> Tensor | None:
    """Return the number of each text's language, (batch,) zeros; None if the config names a default."""
    return zeros(spec.batch) if read(spec.config, "default_language") is None else None


def xpath_tags(spec: ExampleSpec) -> Tensor:
    """Return for each token the path of its tag through the page's tree, (batch, length, depth)."""
    return integers(spec.config.max_xpath_tag_unit_embeddings, spec.batch, spec.tokens, spec.config.max_depth)


def xpath_subscripts(spec: ExampleSpec) -> Tensor:
    """Return the subscripts of those tags, (batch, length, depth)."""
    return integers(spec.config.max_xpath_subs_unit_embeddings, spec.batch, spec.tokens, spec.config.max_depth)
