"""A language model as a server uses it: the tensors of its checkpoint, and the memory that each layer keeps for a request."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

FULL, SLIDING, CHUNKED, STATE, CROSS, COMPRESSED = "full", "sliding", "chunked", "state", "cross", "compressed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter of the checkpoint, by name and shape; `itemsize` is that of its dtype in bytes."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Memory that one layer allocates for a request.

    `kind` is FULL or SLIDING attention of `window` tokens, CHUNKED attention within chunks of `window` tokens, CROSS attention
    to an encoder, or STATE, which has the same size for each request. A token has `elements` in the cache. They are split among
    up to `kv_heads` ranks, or replicated on all ranks if `shared` (MLA).

    A state has `state_elements` of the state's dtype and `conv_elements` of the model's, split among all ranks; with speculative
    decoding `conv_channels` more for each drafted token. The indexer of sparse attention keeps `index_bytes` of a token on each
    rank, whatever the cache's dtype. A COMPRESSED layer has an entry for each `ratio` tokens and a window of the last tokens;
    with a ratio of 1 it has only the window.
    """

    kind: str
    elements: int = 0
    kv_heads: int = 1
    shared: bool = False
    window: int = 0
    state_elements: int = 0
    conv_elements: int = 0
    conv_channels: int = 0
    index_bytes: int = 0
    ratio: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An encoder of images or sound, and the largest image or piece of sound that its processor makes.

    The image has `patches` of `patch_elements` each. The language model gets `tokens` of `outputs` elements from them. A block
    has `hidden` elements for each patch and `width` in its feed-forward part, twice that if `gated`. `interpolates` says
    whether a learned table of positions is interpolated, `rotates` whether queries and keys are rotated, `as_floats` whether as
    complex numbers of 64 bits.

    Callers hold `held` tensors of all patches while a block runs. A block that `keeps` holds its input and the output of its
    attention to its end. A request of `sound` has as many pieces as its length takes.
    """

    tokens: int
    patches: int
    patch_elements: int
    hidden: int
    width: int
    outputs: int
    gated: bool = False
    interpolates: bool = False
    rotates: bool = True
    as_floats: bool = False
    held: int = 0
    keeps: bool = False
    sound: bool = False


LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
ENCODER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|image\w*|encoder|multi_modal_projector)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The facts of a model that a server's plan depends on.

    `positions` is the number of tokens that the config allows. `rotary` is the number of elements in each row of the rotary
    tables, and `rotary_rows` is the number of rows of each table. `intermediate` is the width of a dense layer's feed-forward
    part, `expert_width` the width of one expert.

    `quantization` is the checkpoint's own layout ("awq", "gptq", "fp8", "w8a8", "mxfp4", "nvfp4"), None if it has none, with
    its group size and the layers that are not quantized. `expert_quantization` is the layout of experts if it differs.
    `encoder` names the modalities other than text, None for a text-only model.

    `tower` is the encoder if vLLM's profile run counts it. `deepstack` is the number of layers that receive image features.
    `rotary_widths` are the elements of a row of each table if they differ, `rotary_itemsize` the bytes of one. `step_buffers`
    is the number of elements per token of a step in buffers that are allocated with the model. `idle_weights` are weights that
    vLLM allocates and no checkpoint fills. `file_elements` is the number of float32 elements that a GGUF
    file has in addition to the parameters.

    `item_tokens` is the number of tokens of the largest image or video if a step must hold it as a whole, else 0.

    `lent` is the memory that the last layers would keep if they did not share the cache of earlier layers.

    `mtp_layers` is the number of the checkpoint's layers for multi-token prediction. `draft` is the model that drafts tokens, with
    the weights that it does not share; None without one. A head of EAGLE-3 has `states_read` hidden states of the model as input.

    `vision` is the number of layers and the hidden size of the vision encoder as its config names them, None without one.
    """

    name: str
    model_type: str
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    positions: int
    rotary: int
    rotary_rows: tuple[int, ...]
    weights: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    quantization: str | None = None
    expert_quantization: str | None = None
    group: int = 128
    zero_points: bool = False
    unquantized: tuple[str, ...] = ()
    state_itemsize: int = 2
    latent: tuple[int, int, int] | None = None  # of MLA: rank of the latent, width of a head without rotation, width of its values
    encoder: str | None = None
    encoder_tokens: int = 0
    vision: tuple[int, int] | None = None
    tower: Tower | None = None
    deepstack: int = 0
    rotary_widths: tuple[int, ...] = ()
    rotary_itemsize: int = 2
    step_buffers: tuple[int, ...] = ()
    file_elements: int = 0
    idle_weights: tuple[Weight, ...] = ()
    uncounted: tuple[str, ...] = ()
    lent: tuple[Layer, ...] = ()
    mtp_layers: int = 0
    draft: Architecture | None = None
    states_read: int = 0
    item_tokens: int = 0

    def reading_text(self) -> Architecture:
        """Return the model without its image and sound encoders: vLLM loads neither if prompts contain text only.

        Source: vllm/model_executor/models/interfaces.py, _mark_tower_model, 0.33, and a log of 0.30.
        """
        if any(layer.kind == CROSS for layer in self.layers):
            return self  # the encoder's output is read by each request
        weights = tuple(weight for weight in self.weights if not ENCODER.search(weight.name))
        uncounted = tuple(words for words in self.uncounted if "encoder" not in words)
        return replace(self, weights=weights, encoder=None, tower=None, uncounted=uncounted)

    @property
    def is_compressed(self) -> bool:
        """Return whether layers keep compressed entries (DeepSeek V4)."""
        return any(layer.kind == COMPRESSED for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Return whether a layer keeps a state of each request."""
        return any(layer.kind == STATE for layer in self.layers)
