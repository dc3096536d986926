"""CUDA graphs of vLLM: the sizes that are captured, and the bytes that they hold, which are fitted."""

from __future__ import annotations

from sizer.catalogue.serving import DRAFT_MODEL
from sizer.serving.architecture import Architecture
from sizer.serving.flags import Flags

LARGEST = 512  # tokens of the largest graph; vllm/config/vllm.py, _set_cudagraph_sizes


def capture_sizes(flags: Flags) -> tuple[int, ...]:
    """Return the batch sizes in tokens for which graphs are captured, none without graphs."""
    if flags.eager:
        return ()
    each = 1 + flags.draft_tokens if flags.rules.drafted_sizes else 1
    largest = min(flags.max_num_seqs * each * 2, LARGEST, flags.max_num_batched_tokens)
    sizes = [size for size in (1, 2, 4) if size <= largest]
    return (*sizes, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16))


def graph_bytes(architecture: Architecture, flags: Flags) -> int:
    """Return the bytes that graphs hold: of each captured size one for each layer, and for decoding one of all layers.

    With slots of adapters most versions capture each size twice: with adapters and without. Decoding verifies the drafted
    tokens of a request at once. A draft has graphs of its layers; in the second model runner a draft model has none.

    *Known limitations*: fitted. The logs range from 0.2 to 0.9 MiB for a layer and size.
    """
    sizes, each = capture_sizes(flags), 1 + flags.draft_tokens
    decoding = len({-(-size // each) for size in sizes if -(-size // each) <= flags.max_num_seqs})
    layers = -(-len(architecture.layers) // flags.pp)
    if architecture.draft is not None and not (flags.second_runner and flags.draft_method == DRAFT_MODEL):
        layers += len(architecture.draft.layers)
    rules = flags.rules
    kinds = 1 if not flags.loras else rules.second_lora_graphs if flags.second_runner else rules.lora_graphs
    return rules.graph_bytes * layers * (len(sizes) + decoding) * kinds
