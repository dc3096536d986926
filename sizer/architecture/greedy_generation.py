"""transformers' own `generate`, watched token by token: greedy, one token for each sequence and step, to the requested length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache, QuantizedCache

from sizer.architecture.blueprint import Example
from sizer.architecture.examples.example_spec import CACHE
from sizer.base.errors import RequestError
from sizer.catalogue.modes import OFFLOADED, QUANTIZED, QUANTO

# Called with the number of tokens of each sequence (0 when the prompt was read), and the cache; returns True to continue.
OnToken = Callable[[int, object], bool]

# Inputs of a decoder other than its prompt: `generate` makes them itself.
_MADE_BY_GENERATE = ("decoder_input_ids", "decoder_attention_mask", "labels")
_GROWING = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # [batch, tokens]


def generates(cls: type[PreTrainedModel]) -> bool:
    """Return whether a class generates text token by token, with transformers' own `generate`."""
    return cls.can_generate() and getattr(cls, "generate", None) is GenerationMixin.generate


def keeps_last_logits(name: str) -> bool:
    """Return whether a class of transformers only computes the logits of a prompt's last token in generation.

    A forward pass without `logits_to_keep` computes those of all tokens.
    """
    cls = getattr(transformers, name, None)
    return cls is not None and generates(cls) and "logits_to_keep" in signature(cls.forward).parameters


def generation_options(module: nn.Module, *, new: int, cache: str, read_first: int | None = None) -> dict[str, Any]:
    """Return the arguments of a GenerationConfig for greedy search to a length.

    The special tokens are those of the model's own config.

    `cache` is transformers' name of the implementation, "dynamic" for its default. A prompt is read in pieces of `read_first`
    tokens, if given. Compilation is off: `generate` would compile the decoding steps over a static cache on a GPU.
    """
    own = module.generation_config
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    # A token that no prompt contains (sizer.architecture.examples.example_spec.words): `generate` masks it out.
    padding = next((token for token in (own.pad_token_id, *ends, own.bos_token_id) if isinstance(token, int)), 0)
    return {
        "max_new_tokens": new,
        "do_sample": False,
        "num_beams": 1,
        "use_cache": True,
        "eos_token_id": None,
        "pad_token_id": padding,
        "bos_token_id": own.bos_token_id,
        "decoder_start_token_id": own.decoder_start_token_id if own.decoder_start_token_id is not None else 0,
        "cache_implementation": None if cache == "dynamic" else cache,
        "disable_compile": True,
        **({} if read_first is None else {"prefill_chunk_size": read_first}),
    }


def check_cache(module: nn.Module, cache: str) -> None:
    """Raise RequestError if transformers has no such cache for a model, or the package that quantizes it is missing."""
    if cache != QUANTIZED:
        return
    try:
        QuantizedCache("quanto", module.config)
    except (ImportError, ValueError) as error:
        raise RequestError(
            f"cache: {type(module).__name__} has none",
            given=f"{cache!r}: {' '.join(str(error).split())}",
            allowed="other caches",
            todo=f"pip install {QUANTO}, or ask for another" if isinstance(error, ImportError) else "ask for another",
        ) from error


def prompt_of(example: Example) -> dict[str, Any]:
    """Return the inputs of an example that are passed to `generate`; it makes the others itself."""
    return {name: value for name, value in example.kwargs.items() if name not in _MADE_BY_GENERATE}


def generate(
    module: nn.Module,
    example: Example,
    *,
    new: int,
    cache: str,
    on_token: OnToken,
    read_first: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Generate `new` tokens for each sequence of the example, for any values.

    No token ends a sequence (see `generation_options`).

    `options` override those of `generation_options`. Return prompts and tokens [batch, tokens].
    """
    before = vars(module).get("_previous_max_cache_length")  # a static cache is never smaller than the previous one
    own = generation_options(module, new=new, cache=cache, read_first=read_first)
    config = GenerationConfig(**own | dict(options or {}))
    try:
        with _watched(module, on_token), mock.patch.object(module, "generation_config", config), _quiet():
            return module.generate(**prompt_of(example), generation_config=config)
    finally:
        if before is None:
            vars(module).pop("_previous_max_cache_length", None)


def is_text(example: Example) -> bool:
    """Return whether the prompts of an example only contain tokens."""
    return example.kwargs.keys() <= {*_GROWING, *_MADE_BY_GENERATE}


def lengthened(example: Example, more: int) -> Example:
    """Return the example with prompts extended by `more` copies of their last token; if `more` is negative, shortened."""

    def longer(name: str, value: Any) -> Any:
        if name not in _GROWING or not isinstance(value, Tensor) or not more:
            return value
        return value[:, :more] if more < 0 else torch.cat([value, value[:, -1:].expand(-1, more)], dim=1)

    return Example(kwargs={name: longer(name, value) for name, value in example.kwargs.items()})


def residual_length(cache: object) -> int | None:
    """Return the number of tokens after which a quantized cache quantizes its keys and values again; None for other caches."""
    return (
        max((getattr(layer, "residual_length", 0) for layer in getattr(cache, "layers", None) or ()), default=0) or None
    )


def window_lengths(cache: object) -> tuple[int, ...]:
    """Return the numbers of tokens at which layers of a cache are full, ascending; empty if all grow with every token.

    A layer of a static cache is full at its end: transformers then no longer pads masks.
    """
    whole = getattr(cache, "self_attention_cache", cache)
    found = set()
    for layer in getattr(whole, "layers", None) or ():
        if getattr(layer, "is_sliding", False) or (whole is cache and hasattr(layer, "max_cache_len")):
            found.add(int(getattr(layer, "sliding_window", None) or layer.max_cache_len))
    return tuple(sorted(found))


def indexed_lengths(module: nn.Module) -> set[int]:
    """Return the numbers of tokens at which the reads of attention stop growing: the maximum that its indexers choose.

    models/deepseek_v32/modeling_deepseek_v32.py, DeepseekV32Indexer, and deepseek_v4, DeepseekV4Indexer, 5.24.
    """
    indexers = (part for part in module.modules() if isinstance(getattr(part, "index_topk", None), int))
    return {part.index_topk * getattr(part, "compress_rate", 1) for part in indexers}


def compress_rates(cache: object) -> tuple[int, ...]:
    """Return the numbers of tokens per entry in layers of a cache; empty if all layers grow with every token.

    models/deepseek_v4/modeling_deepseek_v4.py, DeepseekV4HCACache, 5.24.
    """
    rates = {getattr(layer, "compress_rate", 1) for layer in getattr(cache, "layers", None) or ()}
    return tuple(sorted(rate for rate in rates if isinstance(rate, int) and rate > 1))


def empty_cache(module: PreTrainedModel, kind: str) -> DynamicCache | None:
    """Return the cache with which `generate` begins, None if it is not dynamic; `kind` is transformers' name for it."""
    if kind not in ("dynamic", OFFLOADED[0]) or not module._supports_default_dynamic_cache():
        return None
    return DynamicCache(config=module.config.get_text_config(decoder=True))


@contextmanager
def _watched(module: nn.Module, on_token: OnToken) -> Iterator[None]:
    """Call `on_token` for each token of a sequence within the context, and end `generate` when it returns False.

    `generate` calls `_has_unfinished_sequences` before each step and after the last one (generation/utils.py, _sample).
    """
    seen: dict[str, Any] = {"tokens": 0, "cache": None}

    def keep_cache(_: nn.Module, args: Any, output: Any) -> None:
        found = (getattr(output, name, None) for name in (*CACHE, "cache_params"))
        seen["cache"] = next((cache for cache in found if cache is not None), None)

    def has_unfinished(*args: Any, **kwargs: Any) -> bool:
        wanted = on_token(seen["tokens"], seen["cache"])
        seen["tokens"] += 1
        return wanted

    handle = module.register_forward_hook(keep_cache)
    try:
        with mock.patch.object(module, "_has_unfinished_sequences", has_unfinished):
            yield
    finally:
        handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' advice on prompts and lengths, which Sizer chooses itself."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
