"""What Sizer is asked for, and its one language: the query string that links, forms and the command line share.

    text ──parse_query──► Request ──format_query──► canonical text          parse_query(format_query(r)) == r

Every key of the contract is one row of `KEYS` (sizer.query.keys). Whatever is not understood is refused by name, all at once;
nothing silently becomes its default. No torch here: names are checked by their form, and by list where the list is plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote as percent_encode
from urllib.parse import unquote_plus

from sizer.base.errors import Refusal, RefusedValueError, RequestError, quote, suggest
from sizer.catalogue.adapters import ALL_LINEAR
from sizer.catalogue.compilation import BLOCKS, MODEL, REDUCE_OVERHEAD
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.parallel import PARALLELS, beside_nccl, nccl_bytes
from sizer.catalogue.recipes import GROUP, GRPO, NEW, TRANSFORMERS, server_share
from sizer.catalogue.schedules import SCHEDULES
from sizer.catalogue.sources import EXAMPLE, SOURCES, is_fetched
from sizer.query.conflicts import conflicts
from sizer.query.keys import ARCH_ALLOWED, KEYS, Key
from sizer.query.values import COMPILED_BATCHES, COMPILED_DTYPES, DTYPES, MAX_MICROBATCHES, check_length

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
USUAL_PROMPTS = (1, 2, 4, 8)  # of groups of completions
USUAL_MICROBATCHES = 4  # for each stage of a pipeline, of which each microbatch is traced
MAX_QUERY_LENGTH = 3 * 2**20  # a config of 2 MiB that does not compress is 2.7 MiB of base64
MAX_KEYS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for: which architecture, in which mode, on which GPU. Made by `parse_query`, which checks every value.

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
    and how parts' weights are held, where an empty name is the denoiser; None is the pipeline's own choice.
    SERVER_FIELDS (sizer.catalogue.modes) are a server's flags; None is the server's own default. `server_weights` is one of LAYOUTS
    that WEIGHTS does not have, `max_model_len` tokens or "auto", `used` the bytes that others hold of the device, `outside` and
    `graphs` those of parts that are fitted without them, `want` how many requests of how many tokens are asked for.
    `loss`, `step`, `evaluate`, `objective`, `reference`, `group`, `rollout`, `activations` and `optimizer_offload` are of training
    recipes (sizer.catalogue.recipes); with objective=grpo `new` are the tokens of a completion.
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
    kv_bytes: int | None = None
    used: int = 0
    outside: int | None = None
    graphs: int | None = None
    want: tuple[int, int] | None = None
    loss: str = "full"
    step: str = "after"
    evaluate: str = "none"
    objective: str = "lm"
    reference: str | None = None
    group: int = GROUP
    rollout: str = TRANSFORMERS
    activations: str = "keep"
    optimizer_offload: bool = False

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
        """How many ranks there are."""
        return self.data_ranks * self.tp * self.cp * self.pp

    @property
    def possible_batches(self) -> tuple[int, ...]:
        """Return the batch sizes that its pipeline takes, or that are whole groups of completions; else all of them."""
        if self.objective == GRPO:
            return tuple(batch for batch in self.batches if batch % self.group == 0)
        return tuple(batch for batch in self.batches if self.pp == 1 or self._is_scheduled(batch))

    def _is_scheduled(self, batch: int) -> bool:
        microbatches, rest = divmod(batch, self.microbatch)
        return (
            not rest and 0 < microbatches <= MAX_MICROBATCHES and SCHEDULES[self.schedule].takes(microbatches, self.pp)
        )


def parse_query(text: str) -> Request:
    """The request that a query string asks for; a leading "?" is allowed.

    Raises RequestError with one refusal per key that is unknown, repeated, malformed, out of range or at odds with
    another one.
    """
    if len(text) > MAX_QUERY_LENGTH:
        raise RequestError(
            "query is too long",
            given=f"{len(text):,} characters",
            allowed=f"at most {MAX_QUERY_LENGTH:,}",
            todo="shorten the config to the keys of its architecture",
        )
    pairs, refusals = _split(text)
    values: dict[str, Any] = {}
    given_by: dict[str, str] = {}  # by field, the key that says its value
    for key, value in pairs.items():
        try:
            found = KEYS[key].read(value)
        except RefusedValueError as refused:
            refusals.append(refused.at(key, value))
            continue
        if other := next((given_by[name] for name in found if values.get(name, found[name]) != found[name]), None):
            given, todo = f"{quote(value)} with {other}={pairs[other]}", f"remove {other}, or {key}"
            refusals.append(Refusal(key=key, given=given, allowed=f"values that agree with {other}", todo=todo))
        values |= found
        given_by |= dict.fromkeys(found, key)
    if "arch" not in pairs and all(refusal.key != "arch" for refusal in refusals):
        refusals.append(Refusal(key="arch", given="nothing", allowed=ARCH_ALLOWED, todo=EXAMPLE))
    if values.get("parallel", "none") == "none" and values.get("mode") != "serve":
        values["parallel"] = next((key for key in ("pp", "tp") if values.get(key, 1) > 1), "none")
    source = SOURCES.get(str(values.get("source", "")))
    if source is not None:
        values = {**source.defaults, **values}
    if values.get("compile") is not None:
        values = {"dtypes": COMPILED_DTYPES, "batches": COMPILED_BATCHES, **values}
    if values.get("objective") == GRPO:
        values = {"new": NEW, **values}
    if "batches" not in values:
        values["batches"] = _usual_batches(Request(**{"source": "", **values}))
    request = Request(**{"source": "", **values})  # what was refused is judged at its default
    refusals.extend(conflicts(request))
    if refusals:
        raise RequestError(refusals=refusals)
    return request


def _usual_batches(request: Request) -> tuple[int, ...]:
    """The batch sizes of a request that names none: of a pipeline those that it takes, up to four microbatches for each stage; with
    objective=grpo a few numbers of prompts."""
    if request.objective == GRPO:
        return tuple(request.group * prompts for prompts in USUAL_PROMPTS)
    if MODES[request.mode].serves:
        return DEFAULT_BATCHES
    most = USUAL_MICROBATCHES * request.pp * request.microbatch
    usual = tuple(batch for batch in request.possible_batches if request.pp == 1 or batch <= most)
    return usual or DEFAULT_BATCHES


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
    """What NCCL holds of each rank's GPU, in bytes: the least, the usual, the most; nothing where there is one rank."""
    degrees = {"reshard": request.reshard, "tp": request.tp, "cp": request.cp, "pp": request.pp}
    return nccl_bytes(request.parallel, request.world, **degrees)


def format_query(request: Request, *, complete: bool = False) -> str:
    """The canonical query string of a request: keys in the contract's order, values at their default left out.

    With `complete` every key that applies and has a value is written, defaults too; None ("the model's own choice") has no text.
    """
    parts = []
    for name, key in KEYS.items():
        value = key.write(request)
        if value is not None and (not key.needs(request) if complete else not key.is_default(request)):
            parts.append(f"{name}={percent_encode(value, safe='/:@,')}")
    return "&".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryKey:
    """One key of a query in words: its name, the values that it takes, and its default. A key that `toggles` takes 0 or 1."""

    name: str
    allowed: str
    default: str
    toggles: bool


def query_keys() -> tuple[QueryKey, ...]:
    """The contract's table in words: every key of a query in its order."""
    plain = Request(source="")
    return tuple(
        QueryKey(
            name=name,
            allowed=key.allowed,
            default=key.otherwise or _default_text(key, plain),
            toggles=key.toggles,
        )
        for name, key in KEYS.items()
    )


def _default_text(key: Key, plain: Request) -> str:
    """The default as a query has it; nothing where there is none."""
    return (key.write(plain) if key.is_default(plain) else None) or ""


def _split(text: str) -> tuple[dict[str, str], list[Refusal]]:
    """The keys and values of a query, and the refusals of what is not one known key with one readable value."""
    items = text.removeprefix("?").split("&") if text.removeprefix("?") else []
    if len(items) > MAX_KEYS:
        raise RequestError(
            "query has too many keys",
            given=str(len(items)),
            allowed=f"at most {MAX_KEYS}, each key once",
            todo="drop the rest",
        )
    pairs: dict[str, str] = {}
    refusals: dict[str, Refusal] = {}
    for item in items:
        key, equals, raw = item.partition("=")
        try:
            if key not in KEYS:
                raise RefusedValueError(f"the keys {', '.join(KEYS)}", suggest(key, KEYS) or "remove it", quote(item))
            if key in pairs or key in refusals:
                raise RefusedValueError(
                    "each key once", "keep one of them; lists take commas", "the key more than once"
                )
            pairs[key] = _decode(key, raw if equals else None)
        except RefusedValueError as refused:
            name = key if key in KEYS else quote(key)
            refusals[name] = refused.at(name, raw)
            pairs.pop(key, None)
    return pairs, list(refusals.values())


def _decode(key: str, raw: str | None) -> str:
    if not raw:
        raise RefusedValueError("a value", f"write {key}=..., or leave the key out for its default", "nothing")
    try:
        value = unquote_plus(raw, errors="strict")
        value.encode()
    except UnicodeError:
        raise RefusedValueError("text in UTF-8", "encode it as UTF-8, then %xx") from None
    return value if key == "arch" else check_length(value)
