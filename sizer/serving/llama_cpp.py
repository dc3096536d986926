"""Memory of llama.cpp on a device: the tensors of a GGUF file, the cells of the KV cache, recurrent states, the compute buffer.

All of it is allocated when the server starts. Source: llama.cpp b11549 (October 2026), src/llama-model.cpp, llama-context.cpp,
llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp. `docs/serving.md` says what was compared with it.

*Known limitations*: the pools of CUDA kernels, a draft model and the projector of images are not counted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sizer.base.codec import Difference
from sizer.base.errors import Refusal, RequestError
from sizer.base.units import MIB
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.serving import FEW_OUTPUTS, NEWEST_BUILD
from sizer.report.served import ContextRow, Served, Starts, Want, both
from sizer.serving.answer import CONTEXTS, contexts_of
from sizer.serving.architecture import CHUNKED, SLIDING, STATE, Architecture, Layer
from sizer.serving.flags import check_engine
from sizer.serving.gguf import BLOCKS, COMPARED, WHOLE_GATES, Tensor, projector_bytes, tensors_of, types_of
from sizer.serving.levers import Change, Outcome, find_levers
from sizer.serving.llama_graph import Batch, Block, Latent, State
from sizer.serving.llama_graph import compute_bytes as graph_bytes

MOST_DEVICES = 16  # ggml/src/ggml-cuda/common.cuh, GGML_CUDA_MAX_DEVICES
CELL_STEP = 256  # llama-context.cpp, GGML_PAD(n_ctx, 256)
MICRO_BATCH = 512  # common/common.h, n_ubatch
INDEX_HEAD = 128  # llama-kv-cache-dsa.cpp, elements of an indexer's key
TURNED = 64  # elements of a head that a matrix rotates at least: src/llama-kv-cache.cpp, build_input_k_rot and build_input_v_rot
STREAMS = 4  # ggml-backend.cpp, GGML_SCHED_MAX_COPIES: micro-batches in flight if all layers are on several devices
REPEATS = 4  # equal layers in a graph, after which the places of tensors come again
# Models whose window llama.cpp ignores: all tokens are kept (src/models/phi3.cpp, llama.cpp, qwen2.cpp and starcoder2.cpp).
WITHOUT_WINDOW = ("phi3", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2")
PARALLEL = ("phi", "falcon", "gptj", "gpt_neox")  # attention and feed-forward part read the same hidden states
UNROTATED = ("gpt2", "bloom", "opt", "mpt")  # positions are embeddings, or in the mask
NORMS_LAST = ("olmo2", "olmo3")  # norms follow attention and the feed-forward part alone
# Rows with logits are chosen after the last norm (src/models, embeddings_nextn_masked).
LATE_ROWS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "gemma4", "gpt_oss")
ROTATION_FACTORS = ("llama", "phi3")  # models whose files may have a tensor that scales rotations, and no other that a config names
ADDS_LAST = ("lfm2", "lfm2_moe")  # the residual is the first operand of a sum
FEED_GATED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")  # a gate of one element multiplies the shared expert
NOT_COUNTED = "pools of llama.cpp's CUDA kernels"
SMALLER_FILES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "iq2_m")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFlags:
    """The flags of one llama.cpp server.

    Each of `slots` requests has up to `max_model_len` tokens. `file_type` is the type of the GGUF file, `kv` that of the cache.
    `layers` is the number of layers on the device, counted from the last; the head is one of them. The experts of the first
    `host_experts` layers stay on the host. `used_bytes` is the device memory of other processes. `build` is llama.cpp's version.
    Layers on the device are split among `devices` equal ones, the head on the last. `flash` is True for flash attention.
    """

    max_model_len: int
    slots: int
    file_type: str
    layers: int
    kv: str = "f16"
    host_experts: int = 0
    micro_batch: int = MICRO_BATCH
    used_bytes: int = 0
    build: int = NEWEST_BUILD
    devices: int = 1
    flash: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes on the device, and those of weights on the host."""

    weights: int
    host_weights: int
    cells: int
    compute: int

    @property
    def total(self) -> int:
        """Return all bytes on the device."""
        return self.weights + self.cells + self.compute


def resolve_llama(request: Any, layout: Layout) -> LlamaFlags:
    """Return the flags for a request. Raises RequestError for a value that the model does not take."""
    architecture = layout.architecture
    check_engine("llama.cpp", architecture)
    slots, length = request.want or (1, architecture.positions)  # wanted requests have a slot each, unless flags say otherwise
    if isinstance(request.max_model_len, int):
        length = request.max_model_len
    elif architecture.positions:
        length = min(length, architecture.positions)
    if not length or (architecture.positions and length > architecture.positions):
        known = bool(architecture.positions)
        allowed = f"at most the config's {architecture.positions:,} tokens" if known else "tokens: the config names no length"
        todo = "ask for less" if known else "write for example max_model_len=2k"
        refusal = Refusal(key="max_model_len", given=f"{length:,}", allowed=allowed, todo=todo)
        raise RequestError(refusals=[refusal])
    if request.cpu_moe and not architecture.experts:
        refusal = Refusal(key="cpu_moe", given=str(request.cpu_moe), allowed="0 for a model without experts", todo="remove it")
        raise RequestError(refusals=[refusal])
    if request.fa == "0" and request.kv not in ("auto", "f32"):
        allowed = "auto, f32 without flash attention"
        raise RequestError(refusals=[Refusal(key="kv", given=request.kv, allowed=allowed, todo="leave fa=0 out")])
    every = layout.layers + 1
    if request.pp > (1 if layout.shares_memory else layout.layers):
        allowed = "1 on a device that shares the host's memory" if layout.shares_memory else f"at most the {layout.layers} layers"
        raise RequestError(refusals=[Refusal(key="pp", given=str(request.pp), allowed=allowed, todo="ask for less")])
    return LlamaFlags(
        max_model_len=length,
        slots=request.max_num_seqs or slots,
        file_type=file_type_of(request, architecture),
        layers=every if request.gpu_layers is None else min(request.gpu_layers, every),
        kv="f16" if request.kv == "auto" else request.kv,
        host_experts=request.cpu_moe,
        micro_batch=request.max_num_batched_tokens or MICRO_BATCH,
        used_bytes=request.used,
        build=int(request.engine_version[1:]) if request.engine_version else NEWEST_BUILD,
        devices=request.pp,
        flash=request.fa != "0",
    )


def file_type_of(request: Any, architecture: Architecture) -> str:
    """Return the type of the GGUF file: as requested, MXFP4 for a checkpoint in it, else 16 bits."""
    asked = request.server_weights or request.weights
    if asked in ("checkpoint", "full"):
        return "mxfp4" if asked == "checkpoint" and architecture.quantization == "mxfp4" else "bf16"
    return str(asked)


class Layout:
    """The files of one model, and where a server puts their tensors.

    Args:
        architecture: The model.
        shares_memory: True if device and host share their memory: all weights then count once, as on the device.
        copies_cache: True if attention copies a quantized cache of one layer to 16 bits, as CUDA's kernels do.
    """

    def __init__(self, architecture: Architecture, *, shares_memory: bool = False, copies_cache: bool = False) -> None:
        self.architecture, self.shares_memory, self.copies_cache = architecture, shares_memory, copies_cache
        self.tensors = tensors_of(architecture)
        self.layers = max((tensor.layer for tensor in self.tensors), default=-1) + 1
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._layers: dict[int, list[int]] = {}  # the numbers of each layer's tensors
        for number, tensor in enumerate(self.tensors):
            self._layers.setdefault(tensor.layer, []).append(number)
        self._graphs: dict[tuple[Any, ...], int] = {}

    def sizes(self, file_type: str) -> tuple[int, ...]:
        """Return the bytes of each tensor in a file of a type."""
        if file_type not in self._sizes:
            types = types_of(self.tensors, file_type, self.architecture)
            self._sizes[file_type] = tuple(one.bytes_in(name) for one, name in zip(self.tensors, types, strict=True))
        return self._sizes[file_type]

    def parts(self, flags: LlamaFlags) -> Parts:
        """Return the bytes of a server on its device, of several devices on the fullest."""
        return max((self.parts_of(flags, number) for number in range(flags.devices)), key=lambda parts: parts.total)

    def device_of(self, layer: int, flags: LlamaFlags) -> int:
        """Return the number of a layer's device, that of the head for a tensor outside of the layers; the first for the host's.

        Source: llama-model.cpp, load_tensors, get_layer_buft_list. Equal devices have as much free memory.
        """
        first = max(0, self.layers + 1 - flags.layers)
        place = (self.layers if layer < 0 else layer) - first
        return min(flags.devices - 1, flags.devices * max(0, place) // max(1, flags.layers))

    def parts_of(self, flags: LlamaFlags, number: int) -> Parts:
        """Return the bytes of a server on one of its devices, and all bytes of weights on the host.

        Source: llama-model.cpp, load_tensors: the embedding of tokens stays on the host; a head that is the same tensor is copied.
        """
        first = self.layers + 1 - flags.layers
        heads = self.device_of(-1, flags) == number
        tied = all(tensor.role != "output" for tensor in self.tensors)
        device = host = 0
        for tensor, size in zip(self.tensors, self.sizes(flags.file_type), strict=True):
            if tensor.is_input and not self.shares_memory:
                host += size
                if tied and tensor.role == "token_embd":
                    device += size if flags.layers and heads else 0
            elif self.shares_memory or _is_on_device(tensor, first, flags):
                device += size if self.device_of(tensor.layer, flags) == number else 0
            else:
                host += size
        return Parts(
            weights=device,
            host_weights=host,
            cells=self.cache_bytes(flags, number),
            compute=self.compute_bytes(flags, number),
        )

    def cache_bytes(self, flags: LlamaFlags, number: int = 0) -> int:
        """Return the bytes of all cells and states of the layers on a device."""
        layers, total = self.architecture.layers, 0
        widest = max((layer.elements for layer in layers), default=0)
        block, size = BLOCKS[flags.kv]
        first = 0 if self.shares_memory else max(0, self.layers + 1 - flags.layers) * len(layers) // max(1, self.layers)
        for place, layer in enumerate(layers[first:], first):
            if self.device_of(place * max(1, self.layers) // len(layers), flags) != number:
                continue
            if layer.kind == STATE:
                total += (layer.state_elements + layer.conv_elements) * 4 * flags.slots
                continue
            elements = layer.elements + (INDEX_HEAD if layer.index_bytes else 0)
            if layer.elements and not flags.flash and not self.architecture.latent:  # values of all layers are padded to the widest
                elements += (widest - layer.elements) // 2
            total += elements // block * size * self._own_cells(layer, flags) * flags.slots
        return total

    def _own_cells(self, layer: Layer, flags: LlamaFlags) -> int:
        """Return the cells of one slot in a layer with a cache: all tokens, or a window and a micro-batch."""
        cells = _cells(flags.max_model_len)
        if layer.kind == CHUNKED or (layer.kind == SLIDING and self.architecture.model_type not in WITHOUT_WINDOW):
            return min(cells, _cells(layer.window + flags.micro_batch))
        return cells

    def compute_bytes(self, flags: LlamaFlags, number: int = 0) -> int:
        """Return the bytes of a device's compute buffer, as ggml places a micro-batch's graph; 0 for a device without a layer.

        Source: llama.cpp b11549, tools/server/server-context.cpp, server_output_limits, for the logits that are kept.
        """
        tokens = min(flags.micro_batch, _cells(flags.max_model_len) * flags.slots)
        outputs = min(tokens, flags.slots) if flags.build >= FEW_OUTPUTS else tokens
        rows = next((tensor.rows for tensor in self.tensors if tensor.role == "token_embd"), self.architecture.vocabulary)
        key = (replace(flags, used_bytes=0), number)
        if key not in self._graphs:
            blocks, last = self._blocks(flags, number), self.device_of(-1, flags)
            batch = self._batch(flags, tokens, outputs, rows)
            if number and batch.inputs and batch.streams > 1:  # those of its own layers alone
                own = sum(self.device_of(layer, flags) == number for layer in range(self.layers))
                batch = replace(batch, inputs=batch.inputs * own // self.layers)
            if number and batch.streams > 1:
                batch = replace(batch, borrowed=self._borrowed_bytes(flags, number))
            self._graphs[key] = graph_bytes(blocks, batch, is_first=number == 0, is_last=number == last) if blocks else 0
        return self._graphs[key]

    def _borrowed_bytes(self, flags: LlamaFlags, number: int) -> int:
        """Return the bytes of keys and values that layers of a device read from the cache of a layer on another device."""
        layers, lent = self.architecture.layers, self.architecture.lent
        own, total = len(layers) - len(lent), 0
        block, size = BLOCKS[flags.kv]
        for place, lender in enumerate(lent, own):
            owner = max(at for at in range(own) if layers[at] == lender)
            if self.device_of(place, flags) == number != self.device_of(owner, flags):
                total += lender.elements // block * size * self._own_cells(lender, flags) * flags.slots
        return total

    def _batch(self, flags: LlamaFlags, tokens: int, outputs: int, rows: int) -> Batch:
        """Return a micro-batch in a graph."""
        block, size = BLOCKS[flags.kv]
        quantized = block > 1
        embedded = sum(tensor.columns for tensor in self.tensors if tensor.role == "per_layer_token_embd")
        return Batch(
            tokens=tokens,
            outputs=outputs,
            hidden=self.architecture.hidden,
            vocabulary=rows,
            item=(size, block),
            turns=_turns(self.architecture.head_size) if quantized else (),
            inputs=embedded,
            embedded=embedded // self.layers,
            copies=quantized and self.copies_cache,
            streams=self._streams(flags),
            flash=flags.flash,
            late=self.architecture.model_type.removesuffix("_text") in LATE_ROWS,
        )

    def _streams(self, flags: LlamaFlags) -> int:
        """Return the micro-batches in flight (llama-context.cpp, pipeline_parallel)."""
        return STREAMS if flags.devices > 1 and flags.layers > self.layers and not flags.host_experts else 1

    def _blocks(self, flags: LlamaFlags, device: int) -> list[Block]:
        """Return the layers of a device as blocks of a graph; of equal neighbours a few."""
        first = 0 if self.shares_memory else self.layers + 1 - flags.layers
        found: list[Block] = []
        for number in range(self.layers):
            if self.device_of(number, flags) != device:
                continue
            block = self._block(number, flags, number < first)
            if found[-REPEATS:] != [block] * REPEATS:
                found.append(block)
        return found

    def _block(self, number: int, flags: LlamaFlags, on_host: bool) -> Block:
        """Return one layer as a block of a graph."""
        model, sizes = self.architecture, self.sizes(flags.file_type)
        own = [(self.tensors[one], sizes[one]) for one in self._layers.get(number, ())]
        rows = {tensor.role: tensor.rows for tensor, _ in own if tensor.matrices == 1 and tensor.role}
        experts = [tensor for tensor, _ in own if tensor.is_of_experts]
        layer = model.layers[number * len(model.layers) // self.layers]
        attends = layer.kind != STATE
        own_layers = len(model.layers) - len(model.lent)
        read = model.lent[number - own_layers] if model.lent and number >= own_layers else layer
        result = next((tensor.columns for tensor, _ in own if tensor.role == "attn_output"), 0)
        gated = attends and not model.latent and rows.get("attn_q", 0) == 2 * result > 0
        query = rows.get("attn_q", 0) // (2 if gated else 1) or (model.heads * model.head_size if attends else 0)
        key = rows.get("attn_k") or layer.elements // 2
        whole = model.model_type in WHOLE_GATES
        on_host = on_host and not self.shares_memory
        moved = not self.shares_memory and number < flags.host_experts
        weights = {
            role: size
            for role, size in ((f"{tensor.role}_exps" if tensor.is_of_experts else tensor.role, size) for tensor, size in own)
            if role and (on_host or (moved and "_exps" in role))
        }
        factors = 4 * model.file_elements if model.model_type in ROTATION_FACTORS else 0
        weights |= {"norm": 4 * model.hidden, "rope_freqs": factors} if on_host else {}
        return Block(
            heads=model.heads,
            query=query,
            key=key,
            value=rows.get("attn_v") or layer.elements - key,
            feed=rows.get("ffn_up", 0) // (2 if whole and "ffn_gate" not in rows else 1),
            gate="split" if "ffn_gate" in rows else "whole" if whole else "",
            expert_gate="split" if any(one.role == "ffn_gate" for one in experts) else "whole" if whole else "",
            experts=model.experts if experts else 0,
            used=model.experts_per_token,
            width=model.expert_width,
            fused="attn_qkv" in rows and attends,
            kind=read.kind,
            cells=self._own_cells(read, flags),
            gated=gated,
            feed_gated=model.model_type.removesuffix("_text") in FEED_GATED,
            adds_last=model.model_type in ADDS_LAST,
            latent=self._latent(own),
            state=None if attends else self._state(layer, own, flags),
            parallel=model.model_type in PARALLEL,
            rotated=model.model_type not in UNROTATED,
            norms_first=model.model_type not in NORMS_LAST,
            weights=weights,
            cached=on_host,
        )

    def _latent(self, own: list[tuple[Tensor, int]]) -> Latent | None:
        """Return the sizes of a layer with MLA, None for other layers."""
        model = self.architecture
        if not model.latent:
            return None
        rank, keys, values = model.latent
        narrow = [tensor.rows for tensor, _ in own if tensor.role == "attn_q_a"]
        return Latent(heads=model.heads, rank=rank, key=keys, value=values, rotary=model.rotary, narrow=min(narrow, default=0))

    def _state(self, layer: Layer, own: list[tuple[Tensor, int]], flags: LlamaFlags) -> State:
        """Return the sizes of a layer with a state."""
        rows = {tensor.role: tensor.rows for tensor, _ in own}
        columns = {tensor.role: tensor.columns for tensor, _ in own}
        projected, inner = rows.get("ssm_in", rows.get("attn_qkv", 0)), columns.get("ssm_out", self.architecture.intermediate)
        kind = "mamba" if "ssm_x" in rows else "mamba2" if layer.state_elements else "convolution"
        kind = "delta" if "attn_qkv" in rows else kind
        steps = {
            "delta": rows.get("ssm_alpha", rows.get("ssm_ba", 0) // 2),
            "mamba": columns.get("ssm_dt", 0),
            "mamba2": max(0, projected - inner - layer.conv_channels),
            "convolution": 0,
        }
        return State(
            kind=kind,
            kept=layer.conv_elements,
            held=layer.state_elements,
            projected=projected,
            channels=layer.conv_channels,
            inner=inner,
            steps=steps[kind],
            ranks=rows.get("ssm_x", 0),
            requests=flags.slots,
        )

    def longest(self, flags: LlamaFlags, budget: int) -> int:
        """Return the longest request in tokens of each slot for which `budget` bytes are enough, 0 if none is."""
        limit = self.architecture.positions or flags.max_model_len
        return _largest(limit, lambda length: self.parts(replace(flags, max_model_len=length)).total <= budget)


def _turns(head_size: int) -> tuple[int, ...]:
    """Return the bytes of the matrices that rotate keys and values of a quantized cache."""
    if head_size % TURNED:
        return ()
    return 4 * (head_size & -head_size) ** 2, 4 * TURNED**2


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to a limit that fits, where each smaller one fits, too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _is_on_device(tensor: Tensor, first: int, flags: LlamaFlags) -> bool:
    """Return True if a tensor is on the device: those outside of the layers belong to the head."""
    if tensor.layer < 0:
        return flags.layers > 0
    return tensor.layer >= first and not (tensor.is_of_experts and tensor.layer < flags.host_experts)


def _cells(tokens: int) -> int:
    return -(-tokens // CELL_STEP) * CELL_STEP


def answer_llama(
    layout: Layout,
    flags: LlamaFlags,
    gpu: Gpu,
    *,
    model: str,
    want: tuple[int, int] | None,
    auto: bool,
    with_levers: bool = True,
) -> Served:
    """Return the estimate of a llama.cpp server on one device.

    Args:
        layout: The model's files.
        flags: The server's flags.
        gpu: The device.
        model: The repository of the model, for the command.
        want: (concurrent requests, tokens of each) to check, or None.
        auto: True to use the longest request that fits.
        with_levers: False to skip the suggested changes, each of which needs a plan.
    """
    budget = gpu.total_bytes - flags.used_bytes - gpu.context_bytes
    longest = layout.longest(flags, budget)
    if auto and longest:
        flags = replace(flags, max_model_len=longest)

    def outcome(other: LlamaFlags) -> Outcome:
        found = layout.parts(other)
        starts = found.total <= budget
        fits = both(starts, _wanted(layout, other, want, budget)) if want else starts
        return Outcome(
            starts=starts, fits=fits, kv_cache_bytes=found.cells, requests_at_once=float(other.slots) if starts else 0.0
        )

    parts = layout.parts(flags)
    starts: Starts = parts.total <= budget
    changes = [*_changes(layout, flags, budget, want, longest)] if with_levers else []
    tokens = flags.max_model_len * flags.slots
    requests = float(flags.slots) if starts else 0.0
    rows = contexts_of(CONTEXTS, flags.max_model_len, want)
    return Served(
        engine="llama.cpp",
        engine_version="" if flags.build == NEWEST_BUILD else f"b{flags.build}",
        flags={
            "max_model_len": flags.max_model_len,
            "parallel": flags.slots,
            "file_type": flags.file_type,
            "gpu_layers": flags.layers,
            "cpu_moe": flags.host_experts,
            "cache_type": flags.kv,
            "ubatch_size": flags.micro_batch,
            "devices": flags.devices,
            "fa": flags.flash,
        },
        gpus=flags.devices,
        budget_bytes=budget,
        weights_bytes=parts.weights,
        offloaded_bytes=parts.host_weights,
        profile_peak_bytes=parts.compute,
        forward_bytes=parts.compute,
        sampler_bytes=0,
        encoder_bytes=0,
        compiling_bytes=0,
        outside_torch_bytes=0,
        graphs_bytes=0,
        graphs_in_budget=False,
        kv_cache_bytes=Difference(parts.cells),
        kv_cache_low_bytes=Difference(parts.cells),
        kv_cache_high_bytes=Difference(parts.cells),
        blocks=_cells(flags.max_model_len) * flags.slots,
        block_tokens=1,
        kv_tokens=tokens if starts else 0,
        kv_tokens_low=tokens if starts else 0,
        kv_tokens_high=tokens if starts else 0,
        requests_at_once=requests,
        requests_at_once_low=requests,
        requests_at_once_high=requests,
        longest=longest,
        starts=starts,
        command=_command(layout, flags, model),
        message="" if starts else _message(parts, budget, layout),
        want=_wanted(layout, flags, want, budget) if want is not None else None,
        levers=find_levers(changes, flags, outcome),
        contexts=tuple(
            ContextRow(context=one, requests=flags.slots if one <= longest else 0) for one in rows
        ),
        reasons=tuple(_reasons(layout.architecture, flags)),
    )


def _reasons(architecture: Architecture, flags: LlamaFlags) -> Iterator[str]:
    """Yield what is counted, and a warning for a model whose file was not compared with llama.cpp's."""
    if flags.devices > 1:
        yield f"layers are split among {flags.devices} equal devices (-sm layer); the figures are those of the fullest"
    yield f"the file's tensors, cells and buffers as llama.cpp allocates them; not counted: {NOT_COUNTED}"
    if size := projector_bytes(architecture):
        named = "a projector of images or sound (--mmproj, also loaded by -hf)"
        yield f"not counted: {named}, {size / MIB:,.0f} MiB in 16 bits and its buffer"
    if architecture.model_type not in COMPARED:
        yield f"files of models of type {architecture.model_type} were not compared with llama.cpp, which may not run them"


def _wanted(layout: Layout, flags: LlamaFlags, want: tuple[int, int], budget: int) -> Want:
    """Return whether a server with a slot for each wanted request holds them, and the missing bytes."""
    needed = layout.parts(replace(flags, slots=want[0], max_model_len=want[1])).total
    return Want(requests=want[0], tokens=want[1], fits=needed <= budget, missing_bytes=max(0, needed - budget))


def _message(parts: Parts, budget: int, layout: Layout) -> str:
    """Return what a server prints that cannot allocate one of its three buffers (ggml-cuda.cu, alloc_buffer)."""
    if layout.shares_memory:
        return f"weights, cells and compute buffer take {parts.total:,} bytes, {budget:,} are free"
    left = budget
    for size in (parts.weights, parts.cells, parts.compute):
        if size > left:
            return f"allocating {size / MIB:.2f} MiB on device 0: cudaMalloc failed: out of memory"
        left -= size
    return ""


def _changes(
    layout: Layout, flags: LlamaFlags, budget: int, want: tuple[int, int] | None, longest: int
) -> Iterator[Change]:
    """Yield each change that may make room, with the least that is enough of those that come in steps.

    `longest` is the longest request in tokens for which the budget is enough, 0 if none is.
    """
    if want is None and 0 < longest < flags.max_model_len:
        flag, note = f"-c {longest * flags.slots}", "longer requests are refused"
        yield Change(flag=flag, query=f"max_model_len={longest}", fields={"max_model_len": longest}, note=note)
    if want is not None:
        flags = replace(flags, slots=want[0], max_model_len=want[1])

    def fits(other: LlamaFlags) -> bool:
        return layout.parts(other).total <= budget

    if flags.kv == "f16" and flags.flash:
        yield Change(
            flag="-ctk q8_0 -ctv q8_0", query="kv=q8_0", fields={"kv": "q8_0"}, note="keys and values are rounded to 8 bits"
        )
    size = sum(layout.sizes(flags.file_type))
    smaller = [one for one in SMALLER_FILES if sum(layout.sizes(one)) < size]
    if smaller:
        chosen = next((one for one in smaller if fits(replace(flags, file_type=one))), smaller[-1])
        note = "another file, rounded more" if flags.file_type not in ("f32", "f16", "bf16") else "weights are rounded"
        yield Change(flag=f"a {chosen.upper()} file", query=f"weights={chosen}", fields={"file_type": chosen}, note=note)
    if layout.shares_memory:
        return
    count = layout.layers
    if flags.devices < MOST_DEVICES and 2 * flags.devices <= count:
        devices = 2 * flags.devices
        yield Change(flag=f"{devices} devices", query=f"pp={devices}", fields={"devices": devices}, note="-sm layer, by default")
    if layout.architecture.experts and flags.host_experts < count:
        most = count - _largest(count - flags.host_experts, lambda kept: fits(replace(flags, host_experts=count - kept)))
        note = f"experts of {most} of {count} layers are computed on the host, more slowly"
        yield Change(flag=f"--n-cpu-moe {most}", query=f"cpu_moe={most}", fields={"host_experts": most}, note=note)
    layers = _largest(flags.layers - 1, lambda one: fits(replace(flags, layers=one)))
    if layers < flags.layers and fits(replace(flags, layers=layers)):
        note = f"{count + 1 - layers} of {count + 1} layers are computed on the host, more slowly"
        yield Change(flag=f"-ngl {layers}", query=f"gpu_layers={layers}", fields={"layers": layers}, note=note)


def _command(layout: Layout, flags: LlamaFlags, model: str) -> str:
    """Return the command of the server, with a file named as people name them."""
    file = f"{model}-{flags.file_type.upper()}.gguf"
    words = ["llama-server", "-m", file, "-c", str(flags.max_model_len * flags.slots), "-np", str(flags.slots)]
    words += ["-ngl", "999" if flags.layers > layout.layers else str(flags.layers)]
    words += ["--n-cpu-moe", str(flags.host_experts)] if flags.host_experts else []
    words += [] if flags.flash else ["-fa", "off"]
    words += ["-ctk", flags.kv, "-ctv", flags.kv] if flags.kv != "f16" else []
    words += ["-ub", str(flags.micro_batch), "-b", str(max(2048, flags.micro_batch))] if flags.micro_batch != MICRO_BATCH else []
    return shlex.join(words)
