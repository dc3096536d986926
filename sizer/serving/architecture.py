"""A language model as a server sees it: the tensors of its checkpoint, and what each layer keeps of a request."""

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
    """Memory that one layer keeps for a request.

    `kind` is FULL or SLIDING attention of `window` tokens, CHUNKED attention within chunks of `window` tokens, CROSS attention to
    an encoder, or STATE, which has the same size for each request. A token has `elements` in the cache, split among up to
    `kv_heads` ranks; all ranks hold them if `shared` (MLA).
    A state has `state_elements` of the state's dtype and `conv_elements` of the model's, split among all ranks. The indexer of
    sparse attention keeps `index_bytes` of a token on each rank, whatever the cache's dtype. A COMPRESSED layer has an entry for
    each `ratio` tokens and a window of the last ones; with a ratio of 1 it has the window alone.
    """

    kind: str
    elements: int = 0
    kv_heads: int = 1
    shared: bool = False
    window: int = 0
    state_elements: int = 0
    conv_elements: int = 0
    index_bytes: int = 0
    ratio: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The encoder of images of a Qwen-VL model, and the largest image that its processor lets through.

    The image has `patches` of `patch_elements` each, of which the language model gets `tokens` of `outputs` elements. A block has
    `hidden` elements for each patch and `width` in its feed-forward part, twice that if `gated`. `interpolates` says whether a
    learned table of positions is interpolated.
    """

    tokens: int
    patches: int
    patch_elements: int
    hidden: int
    width: int
    gated: bool
    interpolates: bool
    outputs: int


ENCODER = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|image\w*|encoder|multi_modal_projector)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The facts of a model that a server's plan depends on.

    `positions` are the tokens that its config allows, `rotary` the elements of each row of its tables of rotations, `rotary_rows`
    the rows of each table. `intermediate` is the width of a dense layer's feed-forward part, `expert_width` that of one expert.
    `quantization` is the checkpoint's own layout ("awq", "gptq", "fp8", "w8a8", "mxfp4", "nvfp4"), None if it has none, with
    its group size and the layers that it leaves as they are; `expert_quantization` is that of experts if it differs. `encoder`
    names what is not text, None if the model reads text alone.
    `tower` is the encoder if the profile run of vLLM counts it. `deepstack` is how many layers get features of images of their own.
    `rotary_widths` are the elements of a row of each table if they differ, `rotary_itemsize` the bytes of one. `step_buffers` are
    the elements for each token of a step that buffers made with the model hold, `idle_weights` what vLLM makes and no checkpoint
    fills.
    `lent` is what the last layers would keep if they did not use the cache of earlier layers.
    `vision` are the layers and the hidden size of what reads images as its config names them, None if nothing does.
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
    latent: tuple[int, int, int] | None = None  # of MLA: rank of the latent, width of a head without rotation, of its values
    encoder: str | None = None
    encoder_tokens: int = 0
    vision: tuple[int, int] | None = None
    tower: Tower | None = None
    deepstack: int = 0
    rotary_widths: tuple[int, ...] = ()
    rotary_itemsize: int = 2
    step_buffers: tuple[int, ...] = ()
    idle_weights: tuple[Weight, ...] = ()
    uncounted: tuple[str, ...] = ()
    lent: tuple[Layer, ...] = ()

    def reading_text(self) -> Architecture:
        """Return the model without what reads images and sound: vLLM loads none of it if no prompt may have any.

        Source: vllm/model_executor/models/interfaces.py, _mark_tower_model, 0.33, and a log of 0.30.
        """
        if any(layer.kind == CROSS for layer in self.layers):
            return self  # an encoder whose output each request reads
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
