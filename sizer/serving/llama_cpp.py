"""Memory of llama.cpp on a device: the weights in 16 bits, the cells of its KV cache, and recurrent states.

All cells are allocated when the server starts. Source: llama.cpp, src/llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and
llama-memory-recurrent.cpp, 2025: cells in steps of 256, a sliding window holds its tokens and one micro-batch, states are float32.

*Known limitations*: the compute buffer is not counted, nor layouts of GGUF files with fewer bits.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from sizer.base.codec import Difference
from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.gpus import Gpu
from sizer.report.served import ContextRow, Served, Want
from sizer.serving.architecture import CHUNKED, SLIDING, STATE, Architecture
from sizer.serving.flags import check_engine

CELL_STEP = 256  # llama-context.cpp, GGML_PAD(n_ctx, 256)
MICRO_BATCH = 512  # common/common.h, n_ubatch
NOT_COUNTED = "llama.cpp's compute buffer, and GGUF files with less than 16 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFlags:
    """The flags of one llama.cpp server: tokens of each of its `slots`, and device bytes that other processes use."""

    length: int
    slots: int
    used_bytes: int = 0


def resolve_llama(request: Any, architecture: Architecture) -> LlamaFlags:
    """Return the flags for a request. Raises RequestError for a length past the config's."""
    check_engine("llama.cpp", architecture)
    length = request.max_model_len if isinstance(request.max_model_len, int) else architecture.positions
    if not length or (architecture.positions and length > architecture.positions):
        known = bool(architecture.positions)
        allowed = f"at most the config's {architecture.positions:,} tokens" if known else "tokens: the config names no length"
        todo = "ask for less" if known else "write for example max_model_len=2k"
        refusal = Refusal(key="max_model_len", given=f"{length:,}", allowed=allowed, todo=todo)
        raise RequestError(refusals=[refusal])
    return LlamaFlags(length=length, slots=request.max_num_seqs or 1, used_bytes=request.used)


def cache_bytes(architecture: Architecture, flags: LlamaFlags) -> int:
    """Return the bytes of all cells and states."""
    cells, total = _cells(flags.length * flags.slots), 0
    for layer in architecture.layers:
        if layer.kind == STATE:
            total += (layer.state_elements + layer.conv_elements) * 4 * flags.slots
        elif layer.kind in (SLIDING, CHUNKED):
            total += layer.elements * 2 * min(cells, _cells(layer.window * flags.slots + MICRO_BATCH))
        else:
            total += layer.elements * 2 * cells
    return total


def _cells(tokens: int) -> int:
    return -(-tokens // CELL_STEP) * CELL_STEP


def longest_slot(architecture: Architecture, flags: LlamaFlags, available: int) -> int:
    """Return the longest request in tokens of each slot whose cells `available` bytes hold, 0 if none fits."""
    low, high = 0, architecture.positions or flags.length
    while low < high:
        middle = (low + high + 1) // 2
        fits = cache_bytes(architecture, replace(flags, length=middle)) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def answer_llama(
    architecture: Architecture, flags: LlamaFlags, gpu: Gpu, *, model: str, want: tuple[int, int] | None, auto: bool
) -> Served:
    """Return the estimate in bytes of a llama.cpp server on one device; with `auto`, use the longest request that fits."""
    budget = gpu.total_bytes - flags.used_bytes - gpu.context_bytes
    weights = sum(prod(weight.shape) * 2 for weight in architecture.weights)
    left = budget - weights
    longest = longest_slot(architecture, flags, left)
    if auto and longest:
        flags = replace(flags, length=longest)
    cache, tokens = cache_bytes(architecture, flags), flags.length * flags.slots
    starts = cache <= left
    wanted = None
    if want is not None:
        needed = cache_bytes(architecture, LlamaFlags(length=want[1], slots=want[0]))
        wanted = Want(requests=want[0], tokens=want[1], fits=needed <= left, missing_bytes=max(0, needed - left))
    requests = float(flags.slots) if starts else 0.0
    return Served(
        engine="llama.cpp",
        engine_version="",
        flags={"max_model_len": flags.length, "parallel": flags.slots},
        gpus=1,
        budget_bytes=budget,
        weights_bytes=weights,
        profile_peak_bytes=0,
        forward_bytes=0,
        sampler_bytes=0,
        encoder_bytes=0,
        compiling_bytes=0,
        outside_torch_bytes=0,
        graphs_bytes=0,
        graphs_in_budget=False,
        kv_cache_bytes=Difference(cache),
        kv_cache_low_bytes=Difference(cache),
        kv_cache_high_bytes=Difference(cache),
        blocks=_cells(tokens),
        block_tokens=1,
        kv_tokens=tokens if starts else 0,
        kv_tokens_low=tokens if starts else 0,
        kv_tokens_high=tokens if starts else 0,
        requests_at_once=requests,
        requests_at_once_low=requests,
        requests_at_once_high=requests,
        longest=longest,
        starts=starts,
        command=shlex.join(
            ["llama-server", "-m", f"{model}.gguf", "-c", str(tokens), "-np", str(flags.slots), "-ngl", "999"]
        ),
        message="" if starts else f"weights and cells take {weights + cache:,} bytes, {budget:,} are free",
        want=wanted,
        contexts=(ContextRow(context=flags.length, requests=flags.slots if starts else 0),),
        reasons=(f"exact for weights in 16 bits and the cells; not counted: {NOT_COUNTED}",),
    )
