"""A question as a value: which architecture, in which mode, on which GPU, and what follows from these choices alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.adapters import ALL_LINEAR
from sizer.catalogue.compilation import BLOCKS, MODEL, REDUCE_OVERHEAD
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.parallel import PARALLELS, beside_nccl, nccl_bytes
from sizer.catalogue.pipelines import ALL_CACHED
from sizer.catalogue.recipes import GROUP, GRPO, TRANSFORMERS, server_share
from sizer.catalogue.schedules import SCHEDULES
from sizer.catalogue.sources import SOURCES, is_fetched
from sizer.query.values import DTYPES, MAX_MICROBATCHES

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Architecture, mode and GPU of a question. Made by `parse_query`, which checks every value.

    `source` is a key of SOURCES. `name` is what a package calls the model, the preset's key or "org/name"; empty for a config.
    `revision` belongs to the source "hub", `config` (canonical JSON text) to "config"; None elsewhere. `mode` is a key of MODES.
    `head`, `sequence_length` (tokens), `image_size` (height, width in pixels) and `optimizer_impl` are None where the
    architecture's or PyTorch's own choice is asked for. `expandable_segments` is PyTorch's allocator setting of that name.
    `gpu` is a key that `find_gpu` knows. `torch` is the PyTorch ("2.11") whose rules are asked for, None for the installed one.
    `train` is one of TRAINS, `adapter` a key of ADAPTERS, whose fields count where `train` is "adapter" and where it takes them;
    `adapter_alpha` None stands for twice the rank. `weights` is a key of WEIGHTS, `compute` the dtype of its 4-bit products (None
    for the question's own), `prepare` whether `prepare_model_for_kbit_training` makes the other weights float32. `classes` is how
    many a model tells apart (None for its own number), `trainable_layers` how many layers of a detection model's backbone train (0
    to 5, None for all). `cudnn_benchmark` sets `torch.backends.cudnn.benchmark`. `accumulate` is how many forward and backward
    passes an optimizer's step has. `inputs` is "text" if a model that reads images or sound is given text alone, None if it is
    given all that it reads.
    `compile` is a mode of torch.compile, None for eager code. `compile_scope` is one of SCOPES, None for the usual one of the
    source (`scope_of`). `budget` is PyTorch's activation memory budget, None for PyTorch's own.
    `outputs` is one of OUTPUTS (sizer.catalogue.modes), None if the question leaves open whether the loop keeps them.
    `focus` is the dtype and batch size to look at first, one of those asked for; it changes no figure. `new` (tokens after the
    prompt, which has `sequence_length`) and `cache` are of modes that generate. `parallel` is a key of PARALLELS, `ranks` how many
    GPUs share one copy of what is sharded, of which there are `replicate`; `reshard` is FSDP2's `reshard_after_forward`, `offload`
    its CPUOffloadPolicy, `tp` among how many GPUs matrices are split, `sp` and `lp` whether the sequence between the matrices and
    the logits are, too, `cp` over how many each sequence lies, `pp` among how many layers are split, which work as a pipeline by
    `schedule`, a key of SCHEDULES, on a `microbatch` of so many samples at a time; `rank` is the one whose figures are asked for,
    None for the one that needs most.
    The last fields are of diffusion pipelines (sizer.catalogue.pipelines): `frames` of a video, how weights are offloaded, on a
    `stream` or not, how the `vae` decodes, whether the call has `guidance`, what it puts out, the parts that it is built without,
    and how parts' weights are held, where an empty name is the denoiser; None is the pipeline's own choice. `cached` is one of
    CACHED.
    SERVER_FIELDS (sizer.catalogue.modes) are a server's flags; None is the server's own default. `server_weights` is one of LAYOUTS
    that WEIGHTS does not have, `max_model_len` tokens or "auto", `used` the bytes that others hold of the device, `outside` and
    `graphs` those of parts that are fitted without them, `want` how many requests of how many tokens are asked for.
    `loss`, `step`, `evaluate`, `objective`, `reference`, `group`, `rollout`, `activations`, `optimizer_offload`, `autocast`
    and `liger` are of training recipes (sizer.catalogue.recipes); with objective=grpo `new` are the tokens of a completion.
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

    @property
    def is_fetched(self) -> bool:
        """Return True if its config comes from the hub."""
        return is_fetched(self.source, self.name)

    @property
    def is_pipeline(self) -> bool:
        """Return True for the call of a diffusion pipeline, which has a trace of its own."""
        return self.is_of_pipeline and not MODES[self.mode].trains

    @property
    def is_of_pipeline(self) -> bool:
        """Return True for a diffusion pipeline, whose denoiser alone trains."""
        return self.source != "" and SOURCES[self.source].trace is not None

    @property
    def data_ranks(self) -> int:
        """Among how many ranks data are parallel: each has samples of its own."""
        return self.ranks * self.replicate if "ranks" in PARALLELS[self.parallel].keys else 1

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.data_ranks * self.tp * self.cp * self.pp

    @property
    def batch_step(self) -> int:
        """Return what a batch size is a multiple of: the passes of a step have whole groups of completions together."""
        return self.group // gcd(self.group, self.accumulate) if self.objective == GRPO else 1

    @property
    def possible_batches(self) -> tuple[int, ...]:
        """Return the batch sizes that its pipeline takes, or that make whole groups of completions; else all of them."""
        if self.objective == GRPO:
            return tuple(batch for batch in self.batches if batch % self.batch_step == 0)
        return tuple(batch for batch in self.batches if self.pp == 1 or self._is_scheduled(batch))

    def _is_scheduled(self, batch: int) -> bool:
        microbatches, rest = divmod(batch, self.microbatch)
        return (
            not rest and 0 < microbatches <= MAX_MICROBATCHES and SCHEDULES[self.schedule].takes(microbatches, self.pp)
        )


def check_one_rank(request: Request, what: str) -> None:
    """Raise RequestError for one rank of several: `what` says of which answer there is none for it."""
    if request.parallel != "none":
        raise RequestError(
            f"{what}: not for one rank of several",
            given=f"parallel={request.parallel}",
            allowed="one GPU",
            todo="leave parallel out",
        )


def scope_of(request: Request) -> str | None:
    """Return how much of the model is compiled as one, one of SCOPES; None if the model runs eagerly."""
    if request.compile is None:
        return None
    records_inference = request.compile == REDUCE_OVERHEAD and not MODES[request.mode].trains
    by_blocks = SOURCES[request.source].package == "transformers" and not records_inference
    return request.compile_scope or (BLOCKS if by_blocks else MODEL)


def check_eager(request: Request, what: str) -> None:
    """Raise RequestError for compiled code: `what` names the answer that is not available for it."""
    if request.compile is not None:
        raise RequestError(
            f"{what}: not for compiled code",
            given=f"compile={request.compile}",
            allowed="compile=off",
            todo="leave compile out",
        )


def check_traced(request: Request) -> None:
    """Raise RequestError for a server, whose scheduler is planned: it has no step, tape or peak to look at."""
    if MODES[request.mode].serves:
        refusal = Refusal(
            key="mode",
            given=f"{request.mode!r}",
            allowed="the commands `estimate`, `levers`, `which`, `ranks` and `startup`, which plan a server",
            todo="ask `sizer estimate`, or for another mode",
        )
        raise RequestError(refusals=[refusal])


def gpu_of(request: Request) -> Gpu:
    """The GPU that a request is for, as its process has it: with what NCCL holds, where there are several ranks, and a server."""
    gpu = find_gpu(request.gpu)
    return beside_nccl(beside_nccl(gpu, nccl_of(request)), (served_bytes(request, gpu),) * 3)


def served_bytes(request: Request, gpu: Gpu) -> int:
    """Return the bytes of a device that a server has beside the trainer: its share of the memory, whatever it holds of it."""
    return int(server_share(request.rollout) * gpu.total_bytes)


def nccl_of(request: Request) -> tuple[int, int, int]:
    """Return what NCCL holds of each rank's GPU, in bytes: the least, the usual, the most; nothing where there is one rank."""
    degrees = {"reshard": request.reshard, "tp": request.tp, "cp": request.cp, "pp": request.pp}
    return nccl_bytes(request.parallel, request.world, **degrees)
