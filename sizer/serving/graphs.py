"""CUDA graphs of vLLM: the sizes that are captured, and the bytes that they hold, which are fitted."""

from __future__ import annotations

from sizer.catalogue.serving import DRAFT_MODEL
from sizer.serving.architecture import Architecture
from sizer.serving.flags import Flags


def capture_sizes(flags: Flags) -> tuple[int, ...]:
    """Return the batch sizes in tokens for which graphs are captured, none without graphs.

    Source: vllm/config/vllm.py, _set_cudagraph_sizes.
    """
    if flags.eager:
        return ()
    rules, steps = flags.rules, flags.max_num_batched_tokens
    each = 1 + flags.draft_tokens if rules.drafted_sizes else 1
    ceiling = min(flags.max_num_seqs * each * 2, flags.largest_graph)
    sizes = set(_steps(min(ceiling, steps)))
    if rules.step_graph and steps <= ceiling:
        sizes.add(steps)
    requests: tuple[int, ...] = ()
    if rules.decode_graphs != "none" and each > 1:
        most = min(flags.max_num_seqs, flags.largest_graph)
        requests = (*_steps(most), most)
    elif rules.decode_graphs == "all":
        requests = (flags.max_num_seqs,)
    sizes.update(size for one in requests if (size := one * each) <= min(ceiling, steps))
    return tuple(sorted(sizes))


def _steps(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, multiples of 8 and from 256 on of 16, up to the largest."""
    small = (size for size in (1, 2, 4) if size <= largest)
    return (*small, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16))


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
