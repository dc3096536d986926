"""The profile run of a server, traced on meta: an image encoder, one layer's forward pass, and the sampler of its version.

The modules make the same allocations as vLLM's layers and sampler, in the same order. Custom kernels that write into a given
tensor allocate nothing. Source: vllm/model_executor/models/llama.py, layers/fused_moe/fused_moe.py, v1/sample/sampler.py and
v1/sample/ops/topk_topp_sampler.py; vLLM 0.33, and 0.9.2 for the sort.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sizer.allocator.allocator import replay
from sizer.allocator.cuda import round_up
from sizer.architecture.blueprint import Blueprint, Example
from sizer.catalogue.gpus import Gpu
from sizer.serving.architecture import Architecture, Tower
from sizer.serving.flags import Flags
from sizer.serving.plan import Profile, encoder_items
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace

GUMBEL_BLOCK = 1024
CHUNK_TOKENS = 32_768  # vllm/envs.py, VLLM_FUSED_MOE_CHUNK_SIZE
# Experts on Marlin's kernel; vLLM 0.11 and 0.33, layers/fused_moe/fused_marlin_moe.py and csrc/moe/marlin_moe_wna16/ops.cu
MARLIN_BLOCKS, MARLIN_WIDTH, MARLIN_PER_PROCESSOR = (8, 16, 32, 48, 64), 256, 4
MODULAR = (0, 12, 0)  # from here on its output exists before its caches
DTYPE = torch.bfloat16


class Sampler(nn.Module):
    """vLLM's sampler on the hidden states of `max_num_seqs` requests, by one of its paths.

    `programs` is how many rows of scratch the Triton kernel keeps.
    """

    def __init__(self, path: str, hidden: int, vocabulary: int, programs: int) -> None:
        super().__init__()
        self.path, self.programs = path, programs
        self.head = nn.Parameter(torch.empty(vocabulary, hidden), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = torch.rand_like(hidden)
        return self.sample(hidden @ self.head.t())

    def sample(self, raw: Tensor) -> Tensor:
        """Return the tokens drawn from logits, which the caller holds until then."""
        if self.path in ("copied", "bare"):
            # vllm/v1/worker/gpu/sample/gumbel.py, gumbel_sample: of each 1,024 logits the largest and its place
            scores = raw.to(torch.float32) if self.path == "copied" else raw
            blocks = -(-scores.shape[-1] // GUMBEL_BLOCK)
            places = scores.new_empty(len(scores), blocks, dtype=torch.int64)
            return places.gather(-1, scores.new_empty(len(scores), blocks, dtype=torch.float32).argmax(dim=-1, keepdim=True))
        logits = raw.to(torch.float32)
        greedy = logits.argmax(dim=-1)
        logits.div_(torch.full((len(logits), 1), 0.5, device=logits.device))
        if self.path == "sort":
            logits = self._mask_sorted(logits)
        if self.path == "triton":
            self.scratch = torch.empty(self.programs, logits.shape[-1], dtype=torch.float32, device=logits.device)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        if self.path == "flashinfer":
            return torch.where(greedy > 0, greedy, probabilities.new_empty(len(logits), dtype=torch.int64))
        noise = torch.empty_like(probabilities)
        noise.exponential_()
        return torch.where(greedy > 0, greedy, probabilities.div_(noise).argmax(dim=-1))

    @staticmethod
    def _mask_sorted(logits: Tensor) -> Tensor:
        """Mask all but the first tokens of each row by top-k, then by top-p (apply_top_k_top_p, 0.9 to 0.15)."""
        values, places = logits.sort(dim=-1, descending=False)
        first = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        values.masked_fill_(values < values.gather(1, first), -float("inf"))
        sums = values.softmax(dim=-1)
        sums = torch.cumsum(sums, dim=-1, out=sums)
        low = sums <= 0.1
        low[:, -1] = False
        values.masked_fill_(low, -float("inf"))
        return values.scatter(dim=-1, index=places, src=values)


class RejectionSampler(Sampler):
    """Verification of one drafted token of each request, as the first model runner's profile run does it.

    Logits of all tokens are drawn anew. The sampler draws the last token of each request, and returns its logits in float32,
    while those of drafted tokens are sorted or masked. Up to 0.11.0 drafted tokens alone are verified, next to the logits of
    the sampler's run. Source: vllm/v1/worker/gpu_model_runner.py, _dummy_sampler_run, and v1/sample/rejection_sampler.py; vLLM
    0.9.2, 0.11.1 and 0.33.
    """

    def __init__(self, path: str, hidden: int, vocabulary: int, programs: int, rejection: str) -> None:
        super().__init__(path, hidden, vocabulary, programs)
        self.rejection = rejection

    def forward(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.head.t()
        rows = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
        if self.rejection == "drafted":
            return self._verify(torch.randn_like(logits))
        logits = torch.randn(2 * len(logits), logits.shape[-1], dtype=logits.dtype, device=logits.device)
        last = logits[rows]
        raw = last.to(torch.float32)
        tokens = self.sample(last)
        drafted = logits[rows].to(torch.float32)
        verified = self._verify(drafted.clone() if self.rejection == "copied" else drafted)
        return torch.where(tokens > 0, verified, raw.argmax(dim=-1))

    def _verify(self, logits: Tensor) -> Tensor:
        """Return the tokens drawn in place of rejected ones, from one row of noise for each request."""
        logits.div_(torch.full((len(logits), 1), 0.5, device=logits.device))
        if self.path == "sort":
            logits = self._mask_sorted(logits)
        else:
            self.scratch = torch.empty(self.programs, logits.shape[-1], dtype=torch.float32, device=logits.device)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        greedy = logits.argmax(dim=-1)
        noise = torch.empty_like(probabilities)
        noise.exponential_()
        return torch.where(greedy > 0, greedy, probabilities.argmax(dim=-1))


class DecoderLayer(nn.Module):
    """Tensors of one decoder layer on one rank, for a step of a given number of tokens.

    Without graphs the caller holds the input of each part while the part runs; compiled code drops it after its last use. With
    adapters that is after the first matrix. Its output then lives together with products with the matrices A, in float32 for
    each of `slices` (vllm/lora/punica_wrapper/punica_gpu.py, add_lora_linear; vLLM 0.33). Products of experts are not counted.
    """

    def __init__(self, architecture: Architecture, flags: Flags) -> None:
        super().__init__()
        self.eager, self.dtype = flags.eager, DTYPE
        self.hidden = architecture.hidden
        heads, kv_heads = architecture.heads // flags.tp, max(1, architecture.kv_heads // flags.tp)
        self.queries = heads * architecture.head_size
        self.attention = (heads + 2 * kv_heads) * architecture.head_size
        self.width = -(-architecture.intermediate // flags.tp)
        self.experts, self.chosen = architecture.experts, architecture.experts_per_token
        ranks = 1 if flags.ep else flags.tp * flags.dp
        self.expert_width = -(-architecture.expert_width // ranks)
        if self.experts:
            self.width = 0
        self.on_marlin = flags.experts_on_marlin
        self.own_experts = -(-self.experts // (flags.tp * flags.dp)) if flags.ep else self.experts
        self.processors, self.is_modular = flags.processors, flags.release >= MODULAR
        self.rank = flags.lora_rank if flags.loras else 0
        self.anchor = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        size = tokens.shape[0]

        def made(width: int, rows: int = size) -> Tensor:
            return torch.empty(rows, width, dtype=self.dtype, device=self.anchor.device)

        residual = made(self.hidden)
        held: list[Tensor] = []
        hidden = made(self.hidden)  # the norm's output
        hidden = self._then(hidden, held, lambda: self._attend(made))
        hidden = self._then(hidden, held, lambda: self._feed(made, size))
        return hidden.add_(residual)

    def _then(self, hidden: Tensor, held: list[Tensor], part) -> Tensor:
        """Return the output of a part; its input is held meanwhile if nothing is compiled."""
        if self.eager:
            held[:] = [hidden]
        del hidden
        made = part()
        held.clear()
        return made

    def _attend(self, made) -> Tensor:
        joined = made(self.attention)
        self._adapt(made, slices=3)
        out = made(self.queries)
        del joined
        return self._project(out, made)

    def _adapt(self, made, slices: int) -> None:
        """Allocate and release the tensors of adapters next to a merged matrix's output: products in float32, and its input."""
        if self.rank:
            held = None if self.eager else made(self.hidden)
            products = [made(2 * self.rank) for _ in range(slices)]
            del products, held

    def _project(self, out: Tensor, made) -> Tensor:
        projected = made(self.hidden)
        del out
        return projected

    def _feed(self, made, size: int) -> Tensor:
        if not self.experts:
            gates = made(2 * self.width)
            self._adapt(made, slices=2)
            product = made(self.width)
            del gates
            return self._project(product, made)
        if self.on_marlin:
            return self._feed_marlin(made, size)
        rows = min(size, CHUNK_TOKENS) * self.chosen
        out = made(self.hidden)
        first = made(max(2 * self.expert_width, self.hidden), rows)
        second = made(self.expert_width, rows)
        del first, second
        return out

    def _feed_marlin(self, made: Callable[..., Tensor], size: int) -> Tensor:
        """Allocate Marlin's two caches for all tokens at once, and float32 sums while each product runs."""
        rows = size * self.chosen
        block = next((block for block in MARLIN_BLOCKS if rows / self.own_experts / block < 0.9), MARLIN_BLOCKS[-1])
        partial_sums = self.processors * MARLIN_PER_PROCESSOR * block * MARLIN_WIDTH
        out = made(self.hidden) if self.is_modular else None
        first = made(max(2 * self.expert_width, self.hidden), rows)
        second = made(self.expert_width, rows)
        for width in (2 * self.expert_width, self.hidden):
            sums = min(width * (rows + self.own_experts * (block - 1)), partial_sums)
            times = 2 if block == MARLIN_BLOCKS[0] else 1
            torch.empty(times * sums, dtype=torch.float32, device=self.anchor.device)
        out = made(self.hidden) if out is None else out
        del first, second
        return out


class TowerBlock(nn.Module):
    """Tensors of the image encoder on one rank, up to the end of a block.

    A caller holds the input of a part while the part runs: nothing here is compiled. Attention writes into one tensor.
    Source: vllm/model_executor/models/qwen3_vl.py and qwen2_5_vl.py, 0.11 and 0.33, siglip.py, clip.py, pixtral.py, mllama4.py,
    idefics2_vision_model.py and whisper.py, 0.33; layers/rotary_embedding/common.py and llama4_vision_rope.py.

    *Known limitations*: Qwen3-VL's caller holds the interpolated positions, too, one row more; published logs are nearer without.
    """

    def __init__(self, tower: Tower, flags: Flags) -> None:
        super().__init__()
        self.tower, self.ranks, self.float_rotations = tower, flags.tp, flags.rules.float_rotations
        self.anchor = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, patches: Tensor) -> Tensor:
        rows, hidden = patches.shape[0], self.tower.hidden
        own = -(-hidden // self.ranks)

        def made(width: int, dtype: torch.dtype = DTYPE, times: int = 1) -> Tensor:
            return torch.empty(times * rows, width, dtype=dtype, device=self.anchor.device)

        states = made(hidden)
        held = [made(hidden) for _ in range(self.tower.held)]
        if self.tower.interpolates:
            states = self._place(states, made)
        normed = made(hidden)
        joined = made(3 * own)
        copies = rotated = None
        if self.tower.as_floats:
            floats, turned = made(own, torch.float32, 2), made(own, torch.float32, 2)
            rotated = turned.to(DTYPE)
            del floats, turned
        elif self.tower.rotates and self.float_rotations:
            copies = made(own, times=3)
            both = made(own, times=2)
            floats, turned = made(own, torch.float32, 2), made(own, torch.float32, 2)
            rotated = turned.to(DTYPE)
            del floats, turned, both
        elif self.tower.rotates:
            copies = made(own, times=2)
            rotated = made(own, times=2)
        attended = made(own)
        out = made(hidden)
        del normed, joined, copies, rotated, attended
        summed = states + out
        if not self.tower.keeps:
            del out
            if self.tower.gated:
                del states  # Qwen2.5-VL: the norm writes into the block's input, norm2(x, residual=x_attn)
        normed = made(hidden)
        first = made(-(-self.tower.width // self.ranks) * (2 if self.tower.gated else 1))
        second = made(-(-self.tower.width // self.ranks))
        del first
        fed = made(hidden)
        del second, normed, held
        return summed + fed

    def _place(self, states: Tensor, made) -> Tensor:
        """Add the positions: of each patch four rows of the table, weighted and added."""
        rows = made(self.tower.hidden, times=4)
        first, second, third, fourth = (rows * rows).chunk(4)
        places = first + second + third + fourth
        del rows, first, second, third, fourth
        return states + places


def trace_encoder(tower: Tower, flags: Flags, items: int, gpu: Gpu) -> int:
    """Return the bytes of the encoder's dummy run on `items` of the largest images, with their patches.

    Raises:
        TraceError: It cannot be traced.
    """
    patches = torch.empty(items * tower.patches, tower.patch_elements, dtype=DTYPE, device="meta")
    return _peak(lambda: TowerBlock(tower, flags), patches, gpu, "encoder") + int(round_up([patches.nbytes])[0])


def trace_profile(architecture: Architecture, flags: Flags, gpu: Gpu) -> Profile:
    """Return the bytes of the profile run of vLLM with these flags.

    Raises:
        TraceError: A part cannot be traced.
    """
    path = flags.sampler
    if path == "flashinfer" and flags.release >= (0, 22, 0):
        path = "triton"  # it runs after FlashInfer's in the profile run, and takes more
    programs = min(flags.processors, flags.max_num_seqs)
    kept = min(1 << (programs - 1).bit_length(), flags.processors)
    sampler = trace_sampler(path, flags.max_num_seqs, architecture.vocabulary, kept, gpu)
    if flags.draft and not flags.second_runner:
        rejected = trace_rejection(path, flags.max_num_seqs, architecture.vocabulary, kept, gpu, rejection=flags.rules.rejection)
        sampler = max(sampler, rejected)
    tokens = torch.zeros(flags.max_num_batched_tokens, dtype=DTYPE)
    layer = _peak(lambda: DecoderLayer(architecture, flags), tokens, gpu, "layer")
    draft = architecture.draft
    drafted = 0 if draft is None else _peak(lambda: DecoderLayer(draft, flags), tokens, gpu, "draft")
    tower, items = architecture.tower, encoder_items(architecture, flags)
    if tower is None or not items:
        return Profile(sampler_bytes=sampler, forward_bytes=layer, draft_bytes=drafted)
    encoder = trace_encoder(tower, flags, items, gpu)
    encoded = items * tower.tokens * tower.outputs * 2
    return Profile(
        sampler_bytes=sampler, forward_bytes=layer, draft_bytes=drafted, encoder_bytes=encoder, encoded_bytes=encoded
    )


def trace_sampler(path: str, rows: int, vocabulary: int, programs: int, gpu: Gpu) -> int:
    """Return the bytes of the sampler by one of its paths on `rows` rows of logits.

    The hidden size is 1: the plan adds the rows of hidden states.
    """
    hidden = torch.zeros(rows, 1, dtype=DTYPE)
    return _peak(lambda: Sampler(path, 1, vocabulary, programs), hidden, gpu, "sampler")


def trace_rejection(path: str, rows: int, vocabulary: int, programs: int, gpu: Gpu, *, rejection: str) -> int:
    """Return the bytes of the rejection sampler on one drafted token of each of `rows` requests."""
    hidden = torch.zeros(rows, 1, dtype=DTYPE)
    return _peak(lambda: RejectionSampler(path, 1, vocabulary, programs, rejection), hidden, gpu, "rejection sampler")


def _peak(factory, inputs: Tensor, gpu: Gpu, name: str) -> int:
    """Return the peak bytes that a module's forward pass allocates, without its parameters and inputs."""
    example = Example(args=(inputs,))
    blueprint = Blueprint(
        name=name,
        class_name=name,
        build=factory,
        example=lambda batch, training: example,
        loss=lambda module, one: module(*one.args),
        predict=lambda module, one: module(*one.args),
    )
    module = build(blueprint, dtype="bfloat16")
    device = Device(gpu.backend, gpu.capability)
    tape = trace(blueprint, module, Work(mode="inference", dtype="bfloat16", optimizer="none"), batch=1, device=device)
    phases = replay(tape.resolve(size_oracle_of(gpu)), backend=gpu.backend).phases
    held = phases[0].allocated_bytes + int(round_up([inputs.nbytes])[0])
    return max(phase.peak_allocated_bytes for phase in phases) - held
