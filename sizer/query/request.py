"""A question as a value: architecture, mode, GPU and other choices, and properties that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.adapters import ALL_LINEAR
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import BLOCKS, MODEL, MODES, REDUCE_OVERHEAD
from sizer.catalogue.parallel import PARALLELS, SCHEDULES, beside_nccl, nccl_bytes
from sizer.catalogue.pipelines import ALL_CACHED
from sizer.catalogue.recipes import GROUP, GRPO, TRANSFORMERS, server_share
from sizer.catalogue.sources import SOURCES, is_fetched
from sizer.query.values import DTYPES, MAX_MICROBATCHES

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A question: architecture, mode, GPU and all other values of a query. `parse_query` makes it and checks every value.

    Each field belongs to one key of the query; sizer.query.keys describes the allowed values. None means the default of the model,
    of PyTorch, of the pipeline or of the server, if not stated otherwise below.

    Architecture:
        source: A key of SOURCES.
        name: Name of the model in its package, key of the preset, or "org/name". Empty for a config.
        revision: Branch, tag or commit, for the source "hub".
        config: Canonical JSON text, for the source "config".
        head: Name of a transformers class.
        sequence_length, image_size: Tokens; height and width in pixels.
        inputs: "text" if a model that also reads images or sound gets text only.
        classes: Number of classes.

    Work:
        mode: A key of MODES.
        focus: Dtype and batch size to show first. It changes no figure.
        train: One of TRAINS. The fields of an adapter count only if `train` is "adapter".
        adapter_alpha: None for twice the rank.
        weights, part_weights, server_weights: A key of WEIGHTS; layouts by part of a pipeline, with an empty name for the denoiser;
            one of LAYOUTS that WEIGHTS lacks.
        compute: Dtype of 4-bit products; None for the question's dtype.
        prepare: Whether prepare_model_for_kbit_training casts the other weights to float32.
        trainable_layers: Trained layers of a detection model's backbone, 0 to 5; None for all.
        accumulate: Forward and backward passes for each optimizer step.
        new, cache: Tokens after the prompt of `sequence_length` tokens, and the KV cache, for modes that generate. With
            objective=grpo `new` counts the tokens of a completion.
        compile, compile_scope, budget: Mode of torch.compile, None for eager code; one of SCOPES (`scope_of`); activation memory
            budget.
        outputs: One of OUTPUTS; None if the question leaves open whether the loop keeps the model's outputs.
        loss, step, evaluate, objective, reference, group, rollout, activations, optimizer_offload, autocast, liger: Fields of
            training recipes (sizer.catalogue.recipes).
        fla: Whether flash-linear-attention runs the linear attention of the model.

    Device:
        gpu: A key that `find_gpu` knows.
        torch: PyTorch version of the rules ("2.11"); None for the installed one.
        expandable_segments, cudnn_benchmark: PyTorch's settings of these names.

    Parallelism:
        parallel: A key of PARALLELS.
        ranks, replicate: Data-parallel size, for hsdp the shard group size; number of replica groups.
        reshard, offload: FSDP2's reshard_after_forward and CPUOffloadPolicy.
        tp, cp, pp: Sizes of tensor, context and pipeline parallel.
        sp, lp: Sequence parallel and loss parallel, with `tp`.
        schedule, microbatch: A key of SCHEDULES; samples in each microbatch.
        rank: Rank to report; None for the rank with the highest peak.

    Diffusion pipelines (sizer.catalogue.pipelines):
        frames, guidance, output, without, vae, offloading, stream, cached: Fields of a pipeline's call.

    Servers:
        SERVER_FIELDS (sizer.catalogue.modes): Flags of the server.
        max_model_len: Tokens, or "auto".
        used: Bytes of the device that other programs hold.
        outside, graphs: Bytes that replace fitted constants.
        want: Requests at once, and the tokens of each.
    """

    source: str
    name: str = ""
    revision: str | None = None
    config: str | None = None
    head: str | None = None
    mode: str = "training"
    dtypes: tuple[str, ...] = DTYPES
    batches: tuple[int, ...] = DEFAULT_BATCHES
    sequence_length: int | None = None
    image_size: tuple[int, int] | None = None
    inputs: str | None = None
    optimizer: str = "adamw"
    optimizer_impl: str | None = None
    attention: str = "sdpa"
    checkpointing: bool = False
    gpu: str = "a100-80gb"
    expandable_segments: bool = False
    torch: str | None = None
    train: str = "all"
    adapter: str = "lora"
    adapter_rank: int = 16
    adapter_alpha: int | None = None
    adapter_targets: tuple[str, ...] = (ALL_LINEAR,)
    adapter_dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    weights: str = "checkpoint"
    compute: str | None = None
    prepare: bool = True
    classes: int | None = None
    trainable_layers: int | None = None
    cudnn_benchmark: bool = False
    accumulate: int = 1
    compile: str | None = None
    compile_scope: str | None = None
    budget: float | None = None
    outputs: str | None = None
    focus: tuple[str, int] | None = None
    new: int = 512
    cache: str = "dynamic"
    parallel: str = "none"
    ranks: int = 8
    replicate: int = 1
    reshard: int = 1
    offload: bool = False
    tp: int = 1
    sp: bool = False
    lp: bool = False
    cp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    microbatch: int = 1
    rank: int | None = None
    frames: int | None = None
    offloading: str = "none"
    stream: bool = False
    vae: tuple[str, ...] | None = None
    guidance: bool | None = None
    output: str | None = None
    without: tuple[str, ...] | None = None
    part_weights: tuple[tuple[str, str], ...] = ()
    cached: str = ALL_CACHED
    engine: str = "vllm"
    engine_version: str | None = None
    util: float | None = None
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv: str = "auto"
    dp: int = 1
    ep: bool = False
    server_weights: str | None = None
    enforce_eager: bool = False
    api: str = "server"
    sampler: str = "auto"
    prefix_caching: str = "auto"
    fa: str = "auto"
    kv_bytes: int | None = None
    used: int = 0
    outside: int | None = None
    graphs: int | None = None
    want: tuple[int, int] | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    fully_sharded_loras: bool = False
    cpu_offload_gb: float = 0
    dcp: int = 1
    gpu_layers: int | None = None
    cpu_moe: int = 0
    speculative: tuple[str, int] | None = None
    attn_dp: int = 1
    pool: tuple[tuple[str, str], ...] | None = None
    loss: str = "full"
    step: str = "after"
    evaluate: str = "none"
    objective: str = "lm"
    reference: str | None = None
    group: int = GROUP
    rollout: str = TRANSFORMERS
    activations: str = "keep"
    optimizer_offload: bool = False
    autocast: bool = False
    liger: bool = False
    fla: bool = False

    @property
    def is_fetched(self) -> bool:
        """Return True if its config comes from the hub."""
        return is_fetched(self.source, self.name)

    @property
    def is_pipeline(self) -> bool:
        """Return True for the call of a diffusion pipeline, which is traced in a different way than a module."""
        return self.is_of_pipeline and not MODES[self.mode].trains

    @property
    def is_of_pipeline(self) -> bool:
        """Return True for a diffusion pipeline, called or trained. Training updates the denoiser only."""
        return self.source != "" and SOURCES[self.source].trace is not None

    @property
    def data_ranks(self) -> int:
        """Return the data-parallel size: the number of ranks with different samples."""
        return self.ranks * self.replicate if "ranks" in PARALLELS[self.parallel].keys else 1

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.data_ranks * self.tp * self.cp * self.pp

    @property
    def batch_step(self) -> int:
        """Return the divisor of all batch sizes: the passes of a step hold whole groups of completions."""
        return self.group // gcd(self.group, self.accumulate) if self.objective == GRPO else 1

    @property
    def possible_batches(self) -> tuple[int, ...]:
        """Return the batch sizes that the pipeline schedule allows, or that hold whole groups of completions; else all."""
        if self.objective == GRPO:
            return tuple(batch for batch in self.batches if batch % self.batch_step == 0)
        return tuple(batch for batch in self.batches if self.pp == 1 or self._is_scheduled(batch))

    def _is_scheduled(self, batch: int) -> bool:
        microbatches, rest = divmod(batch, self.microbatch)
        return (
            not rest and 0 < microbatches <= MAX_MICROBATCHES and SCHEDULES[self.schedule].takes(microbatches, self.pp)
        )


def check_one_rank(request: Request, what: str) -> None:
    """Raise RequestError if the question has several ranks. `what` names the answer that needs one rank."""
    if request.parallel != "none":
        raise RequestError(
            f"{what}: not for one rank of several",
            given=f"parallel={request.parallel}",
            allowed="one GPU",
            todo="leave parallel out",
        )


def check_config_text(request: Request, config_text: str | None) -> None:
    """Raise RequestError for a config beside an architecture that is not from the hub."""
    if config_text is not None and not request.is_fetched:
        todo = "put the config itself into the query, as arch=config:..."
        raise RequestError("config_text", given=f"arch={request.source}:", allowed="with arch=hub:", todo=todo)


def scope_of(request: Request) -> str | None:
    """Return the compiled unit, one of SCOPES; None if the model runs eagerly."""
    if request.compile is None:
        return None
    records_inference = request.compile == REDUCE_OVERHEAD and not MODES[request.mode].trains
    by_blocks = SOURCES[request.source].package == "transformers" and not records_inference
    return request.compile_scope or (BLOCKS if by_blocks else MODEL)


def check_eager(request: Request, what: str) -> None:
    """Raise RequestError if the question has compiled code. `what` names the answer that needs eager code."""
    if request.compile is not None:
        raise RequestError(
            f"{what}: not for compiled code",
            given=f"compile={request.compile}",
            allowed="compile=off",
            todo="leave compile out",
        )


def check_traced(request: Request) -> None:
    """Raise RequestError for a server. Its plan has no step, tape or peak."""
    if MODES[request.mode].serves:
        refusal = Refusal(
            key="mode",
            given=f"{request.mode!r}",
            allowed="the commands `estimate`, `compare`, `levers`, `which`, `ranks` and `startup`, which plan a server",
            todo="ask `sizer estimate`, or for another mode",
        )
        raise RequestError(refusals=[refusal])


def gpu_of(request: Request) -> Gpu:
    """Return the GPU of a request, less the memory of NCCL (several ranks) and of a colocated server."""
    gpu = find_gpu(request.gpu)
    return beside_nccl(beside_nccl(gpu, nccl_of(request)), (served_bytes(request, gpu),) * 3)


def served_bytes(request: Request, gpu: Gpu) -> int:
    """Return the bytes of a device that a colocated server reserves: its whole share, whether used or not."""
    return int(server_share(request.rollout) * gpu.total_bytes)


def nccl_of(request: Request) -> tuple[int, int, int]:
    """Return NCCL's memory on each rank's GPU in bytes: least, usual and most; zeros for one rank."""
    degrees = {"reshard": request.reshard, "tp": request.tp, "cp": request.cp, "pp": request.pp}
    return nccl_bytes(request.parallel, request.world, **degrees)
