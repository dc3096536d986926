"""Keys of a query. Each key of the contract is one row of `KEYS`: parser, formatter, allowed values and conditions.

A key sets one or more fields of Request (sizer.query.request). Conditions are functions of sizer.query.needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sizer.base.config_json import encode_config
from sizer.base.errors import RefusedValueError, letters, suggest
from sizer.base.versions import OLDEST, format_version
from sizer.catalogue.adapters import ADAPTERS, ALL_LINEAR, ATTENTION, SCRIPT, TRAINS
from sizer.catalogue.gpu_keys import EXAMPLE as CUSTOM_EXAMPLE
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import ALL, INPUTS, MODES, OUTPUTS, SCOPES
from sizer.catalogue.optimizers import IMPLEMENTATIONS, OPTIMIZERS, items_of_optimizer
from sizer.catalogue.parallel import OTHER_NAMES, PARALLELS, SCHEDULES
from sizer.catalogue.pipelines import (
    CACHED,
    CAST,
    MAX_BLOCKS,
    MAX_FRAMES,
    OFFLOADS,
    OPTIONAL_PARTS,
    PART_NAME,
    PART_WEIGHTS,
    PIPELINE_OUTPUTS,
    VAES,
)
from sizer.catalogue.recipes import (
    ACTIVATIONS,
    AFTER,
    CHECKPOINT_OFFLOAD,
    FULL,
    GROUP,
    GRPO,
    KEEP,
    LM,
    LOSSES,
    MAX_GROUP,
    MIN_GROUP,
    NEW,
    NONE,
    OBJECTIVES,
    REFERENCES,
    STEPS,
    TRANSFORMERS,
)
from sizer.catalogue.serving import (
    APIS,
    AUTO,
    CACHE_TYPES,
    DRAFTS,
    ENGINES,
    KV_DTYPES,
    LAYOUTS,
    LORA_RANKS,
    MAX_LAYERS,
    MAX_LORAS,
    MAX_SEQS,
    MAX_TOKENS,
    POOL_FLAGS,
    SAMPLERS,
    SWITCHES,
)
from sizer.catalogue.sources import EXAMPLE, SOURCES, find_source
from sizer.catalogue.weights import WEIGHTS
from sizer.query.hints import HINTS
from sizer.query.needs import (
    completions,
    four_bits,
    generation,
    of_adapters,
    of_autocast,
    of_compiled,
    of_compiled_training,
    of_context,
    of_denoiser_adapters,
    of_diffusion,
    of_engines,
    of_group_offload,
    of_groups,
    of_language_models,
    of_offload,
    of_one_device,
    of_parallels,
    of_pipeline_calls,
    of_pipelines,
    of_preferences,
    of_ranks,
    of_replicas,
    of_saved_modules,
    of_split,
    of_targets,
    of_transformers,
    of_weights,
    once_passed,
    one_stage,
    quantized_adapters,
    served_or,
    serving,
    training,
    unserved,
)
from sizer.query.request import Request
from sizer.query.values import (
    ATTENTIONS,
    CACHES,
    COMPILED_BATCHES,
    COMPILED_DTYPES,
    COMPILES,
    COMPUTES,
    DTYPES,
    MAX_ACCUMULATE,
    MAX_ALPHA,
    MAX_BATCH,
    MAX_CLASSES,
    MAX_IMAGE,
    MAX_NEW,
    MAX_PP,
    MAX_RANK,
    MAX_SEQUENCE_LENGTH,
    MAX_TP,
    MAX_WORLD,
    MIN_IMAGE,
    OFF,
    OTHER_DTYPES,
    check_length,
    choice,
    format_image_size,
    format_list,
    format_pool,
    format_size,
    format_speculative,
    format_switch,
    format_want,
    listed,
    read_activations,
    read_batches,
    read_budget,
    read_cache,
    read_compile,
    read_engine,
    read_evaluate,
    read_group,
    read_head,
    read_image_size,
    read_inputs,
    read_kv,
    read_layers,
    read_layout,
    read_length,
    read_lora_rank,
    read_loss,
    read_modules,
    read_new,
    read_objective,
    read_offload,
    read_pool,
    read_rank,
    read_release,
    read_reshard,
    read_rollout,
    read_sequence_length,
    read_share,
    read_size,
    read_speculative,
    read_switch,
    read_targets,
    read_token_count,
    read_torch,
    read_trainable_layers,
    read_util,
    read_want,
    whole_number,
)

MODULE, TRACE, REPLAY, NOTHING = "module", "trace", "replay", "nothing"  # stages that a key affects

ARCH_ALLOWED = ", ".join(source.usage for source in SOURCES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a query.

    Attributes:
        read: Parser: text → fields of Request.
        write: Formatter: Request → text; None if the value has no text.
        is_default: Whether a request has the default.
        allowed: Allowed values, for help and errors.
        otherwise: Description of the default if the default has no text.
        needs: Condition on the request. Returns the missing part of the question, or an empty text if the key applies.
        label: Title of the key's plain field in the form. Keys without a label have other widgets (sizer.ui.form).
        toggles: Whether the plain field is a switch.
        affects: Earliest stage that a value changes: MODULE (the module that is built), TRACE, REPLAY or NOTHING. Questions share
            the stages before their first difference (sizer.estimating.scopes).
    """

    read: Callable[[str], dict[str, Any]]
    write: Callable[[Request], str | None]
    is_default: Callable[[Request], bool]
    allowed: str
    otherwise: str = ""
    needs: Callable[[Request], str] = lambda request: ""
    label: str = ""
    toggles: bool = False
    affects: str = TRACE


def _field(
    name: str,
    read: Callable[[str], object],
    write: Callable[[Any], str] = str,
    *,
    allowed: str,
    otherwise: str = "",
    needs: Callable[[Request], str] = lambda request: "",
    label: str = "",
    compiled: object = None,
    affects: str = TRACE,
) -> Key:
    """Return the key of one field of Request. `compiled`, if given, is the default of questions with compiled code."""

    def write_field(request: Request) -> str | None:
        value = getattr(request, name)
        return None if value is None else write(value)

    return Key(
        read=lambda text: {name: read(text)},
        write=write_field,
        is_default=lambda request: getattr(request, name)
        == (_usual_of(request, name) if compiled is None or request.compile is None else compiled),
        allowed=allowed,
        otherwise=otherwise,
        needs=needs,
        label=label,
        toggles=read is read_switch,
        affects=affects,
    )


def _recipe(
    name: str,
    read: Callable[[str], object],
    default: object,
    write: Callable[[Any], str] = str,
    *,
    allowed: str,
    label: str,
    needs: Callable[[Request], str] = of_one_device,
    otherwise: str = "",
    affects: str = TRACE,
) -> Key:
    """Return the key of a training recipe. Its default has no text."""
    return Key(
        read=lambda text: {name: read(text)},
        write=lambda request: None if getattr(request, name) == default else write(getattr(request, name)),
        is_default=lambda request: getattr(request, name) == default,
        allowed=allowed,
        otherwise=otherwise or str(default),
        needs=needs,
        label=label,
        toggles=read is read_switch,
        affects=affects,
    )


def _usual_of(request: Request, name: str) -> object:
    """Return the default of a field of Request. A source may have a different one."""
    source = SOURCES.get(request.source)
    return source.defaults[name] if source is not None and name in source.defaults else _default_of(request, name)


def _default_of(request: Request, name: str) -> object:
    return request.__dataclass_fields__[name].default


def _read_version(text: str) -> dict[str, object]:
    choice(("1",))(text)
    return {}


def _read_arch(text: str) -> dict[str, object]:
    source, _, value = text.partition(":")
    if source not in SOURCES and (found := find_source(check_length(text))):
        source, value = found
    if source not in SOURCES:
        raise RefusedValueError(ARCH_ALLOWED, suggest(source, SOURCES) or EXAMPLE)
    if SOURCES[source].entry != "config" and not SOURCES[source].trace:
        check_length(text)
    return {"source": source, **SOURCES[source].read(value)}


def read_optimizer(text: str) -> str:
    """Return an optimizer's key, given its key or its name in a trainer's config."""
    if letters(text) in map(letters, OPTIMIZERS) or (items := items_of_optimizer(text)) is None:
        return choice(OPTIMIZERS)(text)
    if len(items) > 1:
        written = "&".join(f"{key}={value}" for key, value in items.items())
        raise RefusedValueError(", ".join(OPTIMIZERS), f"write {written}")
    return items["optimizer"]


def _read_parallel(text: str) -> dict[str, object]:
    if text not in PARALLELS and (hint := OTHER_NAMES.get(text)):
        raise RefusedValueError(", ".join(PARALLELS), hint)
    return {"parallel": choice(PARALLELS)(text)}


def _read_focus(text: str) -> tuple[str, int]:
    dtype, colon, batch = text.partition(":")
    try:
        (size,) = read_batches(batch) if colon else ()
        return choice(DTYPES, OTHER_DTYPES)(dtype), size
    except (RefusedValueError, ValueError):
        raise RefusedValueError("a dtype, a colon, a batch size", "focus=bfloat16:8") from None


def _read_weights(text: str) -> dict[str, object]:
    if text in WEIGHTS or (":" not in text and text != CAST):
        return {"weights": choice(WEIGHTS, hints=HINTS["weights"])(text)}
    parts = {}
    for item in text.split(","):
        part, colon, how = item.strip().rpartition(":")
        if how not in PART_WEIGHTS or (colon and not PART_NAME.fullmatch(part)) or part in parts:
            raise RefusedValueError(
                f"{', '.join(WEIGHTS)}; of a pipeline {', '.join(PART_WEIGHTS)}, or <part>:<one of these> for single parts",
                "write for example weights=transformer:nf4,text_encoder_2:nf4",
            )
        parts[part] = how
    return {"part_weights": tuple(parts.items())}


def _write_weights(request: Request) -> str:
    parts = (f"{part}:{how}" if part else how for part, how in request.part_weights)
    return ",".join(parts) if request.part_weights else request.weights


def _read_offload(text: str) -> dict[str, object]:
    if text in ("0", "1"):
        return {"offload": text == "1"}
    kind, colon, blocks = text.partition(":")
    counted = kind == "group-block" and (not colon or (blocks.isdecimal() and 0 < int(blocks) <= MAX_BLOCKS))
    if not counted and (kind not in OFFLOADS or colon):
        close = "write offload=group-block:1" if kind == "group-block" else suggest(kind, OFFLOADS)
        raise RefusedValueError(
            f"0, 1; of a pipeline {', '.join(OFFLOADS)}, group-block:<1 to {MAX_BLOCKS} blocks>", close or "write offload=model"
        )
    return {"offloading": kind if kind != "group-block" else f"{kind}:{int(blocks or 1)}"}


def _write_offload(request: Request) -> str:
    return request.offloading if request.offloading != OFFLOADS[0] else format_switch(request.offload)


def _write_arch(request: Request) -> str:
    if request.config is not None:
        return f"{request.source}:{encode_config(request.config)}"
    revision = f"@{request.revision}" if request.revision is not None else ""
    return f"{request.source}:{request.name}{revision}"


def _anything(request: Request) -> str:
    return ""


_SWITCH = "0, 1"

# The contract's table, in its order, which is also the canonical order of a query.
KEYS: dict[str, Key] = {
    "v": Key(read=_read_version, write=lambda request: "1", is_default=lambda request: True, allowed="1", affects=NOTHING),
    "arch": Key(
        read=_read_arch,
        write=_write_arch,
        is_default=lambda request: False,
        allowed=f"{ARCH_ALLOWED}; or only a name, or the address of a hub repository; required",
        affects=MODULE,
    ),
    "head": _field(
        "head",
        read_head,
        allowed="a transformers class, e.g. LlamaForCausalLM or AutoModelForSequenceClassification",
        otherwise="the config's class, or the usual one of its model type",
        affects=MODULE,
    ),
    "mode": _field("mode", choice(MODES, hints=HINTS["mode"]), allowed=", ".join(MODES), affects=MODULE),
    "dtype": _field(
        "dtypes",
        listed(choice(DTYPES, OTHER_DTYPES, HINTS["dtype"])),
        format_list,
        allowed=f"a comma list of {', '.join(DTYPES)}",
        needs=unserved(_anything),
        compiled=COMPILED_DTYPES,
        affects=REPLAY,
    ),
    "batch": _field(
        "batches",
        read_batches,
        format_list,
        allowed=f"a comma list of 1 to {MAX_BATCH}",
        needs=unserved(_anything),
        compiled=COMPILED_BATCHES,
        affects=REPLAY,
    ),
    "seq": _field(
        "sequence_length",
        read_sequence_length,
        allowed=f"tokens, 1 to {MAX_SEQUENCE_LENGTH}",
        otherwise="the model's usual length",
        needs=unserved(_anything),
        affects=MODULE,
    ),
    "image": _field(
        "image_size",
        read_image_size,
        format_image_size,
        allowed=f"pixels, 224 or 224x320, {MIN_IMAGE} to {MAX_IMAGE}",
        otherwise="the model's usual size",
        needs=unserved(_anything),
        affects=MODULE,
    ),
    "inputs": _field(
        "inputs",
        read_inputs,
        allowed=f"{', '.join(INPUTS)}: inputs of a model that reads images or sound together with text",
        otherwise=ALL,
        affects=MODULE,
    ),
    "new": Key(
        read=lambda text: {"new": read_new(text)},
        write=lambda request: str(request.new),
        is_default=lambda request: request.new
        == (NEW if request.objective == GRPO else _default_of(request, "new")),
        allowed=f"tokens generated after the prompt of `seq` tokens, 1 to {MAX_NEW}, with mode=generate or objective=grpo",
        otherwise=f"512; {NEW} with objective=grpo",
        needs=completions,
        label="Tokens of a completion",
    ),
    "cache": _field(
        "cache",
        read_cache,
        allowed=f"{', '.join(CACHES)}: transformers' KV cache, with mode=generate",
        needs=generation,
    ),
    "optimizer": _field("optimizer", read_optimizer, allowed=", ".join(OPTIMIZERS)),
    "optimizer_impl": _field(
        "optimizer_impl",
        choice(IMPLEMENTATIONS),
        allowed=", ".join(IMPLEMENTATIONS),
        otherwise="PyTorch's choice on the device",
    ),
    "attention": _field("attention", choice(ATTENTIONS, hints=HINTS["attention"]), allowed=", ".join(ATTENTIONS), affects=MODULE),
    "checkpointing": _field("checkpointing", read_switch, format_switch, allowed=_SWITCH, affects=MODULE),
    "gpu": _field(
        "gpu",
        lambda text: find_gpu(text).key,
        allowed=f"a key of `python -m sizer gpus`, or a custom device by memory and compute capability: {CUSTOM_EXAMPLE}",
        affects=REPLAY,
    ),
    "expandable": _field(
        "expandable_segments",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: PYTORCH_ALLOC_CONF=expandable_segments:True",
        affects=REPLAY,
    ),
    "torch": _field(
        "torch",
        read_torch,
        allowed=f"PyTorch version of the allocator's and kernels' rules, {format_version(OLDEST)} or newer",
        otherwise="the installed version",
        affects=REPLAY,
    ),
    "train": _field(
        "train",
        choice(TRAINS, hints=HINTS["train"]),
        allowed=f"{', '.join(TRAINS)}: train every weight, all except a vision or audio tower, only the head, or only an adapter",
        needs=training,
        affects=MODULE,
    ),
    "adapter": _field("adapter", choice(ADAPTERS), allowed=", ".join(ADAPTERS), needs=of_adapters("adapter"), affects=MODULE),
    "r": _field(
        "adapter_rank",
        whole_number(MAX_RANK, "r=16"),
        allowed=f"rank of the adapter, or the number of virtual tokens of a prompt method, 1 to {MAX_RANK}",
        needs=of_adapters("r"),
        affects=MODULE,
    ),
    "alpha": _field(
        "adapter_alpha",
        whole_number(MAX_ALPHA, "alpha=32"),
        allowed=f"1 to {MAX_ALPHA}: the adapter's output is scaled by alpha / r",
        otherwise="2 × r",
        needs=of_adapters("alpha"),
        affects=MODULE,
    ),
    "targets": _field(
        "adapter_targets",
        read_targets,
        format_list,
        allowed=f"adapted layers: {ALL_LINEAR}, {ATTENTION}, or a comma list of module names",
        otherwise=f"{ALL_LINEAR}; for a pipeline {SCRIPT}, the layers of diffusers' example script",
        needs=of_targets,
        affects=MODULE,
    ),
    "adapter_dropout": _field(
        "adapter_dropout",
        read_share,
        lambda share: f"{share:g}",
        allowed="0 to below 1, such as 0.05",
        needs=of_adapters("adapter_dropout"),
        affects=MODULE,
    ),
    "modules_to_save": _recipe(
        "modules_to_save",
        read_modules,
        (),
        format_list,
        allowed="none, or a comma list of module names, such as embed_tokens,lm_head: a copy of each trains with the adapter",
        otherwise="none",
        needs=of_saved_modules,
        label="Complete modules to train",
        affects=MODULE,
    ),
    "weights": Key(
        read=lambda text: read_layout(text) or _read_weights(text),
        write=lambda request: request.server_weights or _write_weights(request),
        is_default=lambda request: request.weights == "checkpoint" and not (request.part_weights or request.server_weights),
        allowed=f"{', '.join(WEIGHTS)}: as in the checkpoint, unquantized, or quantized on loading; for a pipeline also {CAST}, "
        f"or by part: transformer:nf4,text_encoder_2:nf4; with mode=serve {', '.join(LAYOUTS)}, or with engine=llama.cpp "
        "the type of the GGUF file, such as q4_k_m",
        needs=of_weights,
        affects=MODULE,
    ),
    "compute": _field(
        "compute",
        choice(COMPUTES),
        allowed=f"{', '.join(COMPUTES)}: bnb_4bit_compute_dtype, the compute dtype of 4-bit layers",
        otherwise="the question's dtype",
        needs=four_bits,
        label="Compute dtype",
        affects=MODULE,
    ),
    "prepare": _field(
        "prepare",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: prepare_model_for_kbit_training, which casts norms and embeddings to float32",
        needs=quantized_adapters,
        label="Prepare for k-bit training",
        affects=MODULE,
    ),
    "classes": _field(
        "classes",
        whole_number(MAX_CLASSES, "classes=10"),
        allowed=f"number of classes, 1 to {MAX_CLASSES}; torchvision's detection models count the background, too",
        otherwise="the model's default",
        label="Classes",
        affects=MODULE,
    ),
    "trainable_layers": _field(
        "trainable_layers",
        read_trainable_layers,
        allowed="0 to 5: trainable_backbone_layers of torchvision's detection models; below 5, batch norm is also frozen",
        otherwise="5: all layers train",
        needs=training,
        label="Trainable layers",
        affects=MODULE,
    ),
    "cudnn_benchmark": _field(
        "cudnn_benchmark",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: torch.backends.cudnn.benchmark, which tries all plans of each convolution in the first step",
        label="cuDNN benchmark",
    ),
    "accumulate": _field(
        "accumulate",
        whole_number(MAX_ACCUMULATE, "accumulate=4"),
        allowed=f"forward and backward passes for each optimizer step, 1 to {MAX_ACCUMULATE}",
        needs=training,
    ),
    "compile": _field(
        "compile",
        read_compile,
        allowed=f"{', '.join(COMPILES)}: torch.compile with Inductor, run without a GPU",
        otherwise=OFF,
        needs=once_passed,
        label="torch.compile",
    ),
    "compile_scope": _field(
        "compile_scope",
        choice(SCOPES),
        allowed=f"{', '.join(SCOPES)}: compile each repeated block, or the whole model",
        otherwise="blocks for transformers models, model for others",
        needs=of_compiled,
        label="Compiled part",
    ),
    "budget": _field(
        "budget",
        read_budget,
        lambda share: f"{share:g}",
        allowed="0 to 1: torch._functorch.config.activation_memory_budget, with compile and mode=training",
        otherwise="1, PyTorch's default",
        needs=of_compiled_training,
        label="Activation memory budget",
    ),
    "outputs": _field(
        "outputs",
        choice(OUTPUTS),
        allowed=f"{', '.join(OUTPUTS)}: whether the training loop keeps the model's outputs during the backward pass",
        otherwise="figures of freed; the range covers both",
        needs=one_stage,
        affects=REPLAY,
    ),
    "loss": _recipe(
        "loss",
        read_loss,
        FULL,
        allowed=f"{', '.join(LOSSES)}, chunked:<chunks>: the loss of a language model; trl, liger and cce call these libraries; "
        "chunked:<chunks> computes logits in chunks of tokens, as torchtune does",
        label="Loss",
        needs=of_language_models,
    ),
    "step": _recipe(
        "step",
        choice(STEPS),
        AFTER,
        allowed=f"{', '.join(STEPS)}: step the optimizer after the backward pass, or for each parameter during it",
        label="Optimizer step",
    ),
    "evaluate": _recipe(
        "evaluate",
        read_evaluate,
        NONE,
        allowed="none, loss, logits:<batches>: an evaluation after the steps; logits keeps the logits of all batches on the "
        "device, as transformers' Trainer does for compute_metrics",
        label="Evaluation",
        needs=of_replicas,
    ),
    "objective": _recipe(
        "objective",
        read_objective,
        LM,
        allowed=f"{', '.join(OBJECTIVES)}, contrastive:<texts>: training objective. TRL's losses: pairs of completions (dpo, "
        "orpo), single completions (kto), rewards of pairs (reward), groups of generated completions (grpo). "
        "sentence-transformers' loss: embeddings of text pairs (contrastive), with gradient caching in mini-batches of <texts>",
        label="Objective",
        needs=of_language_models,
        affects=MODULE,
    ),
    "reference": _recipe(
        "reference",
        choice(REFERENCES),
        None,
        allowed=f"{', '.join(REFERENCES)}: a second, frozen model; the model without its adapter; "
        "precomputed log-probabilities; or no reference (grpo, TRL's beta=0)",
        label="Reference",
        otherwise="adapter with train=adapter, else model",
        needs=of_preferences,
        affects=MODULE,
    ),
    "group": _recipe(
        "group",
        read_group,
        GROUP,
        allowed=f"completions for each prompt with objective=grpo, {MIN_GROUP} to {MAX_GROUP}; batch counts completions",
        label="Completions of a prompt",
        needs=of_groups,
    ),
    "rollout": _recipe(
        "rollout",
        read_rollout,
        TRANSFORMERS,
        allowed="transformers, colocated:<share>: generator of the completions with objective=grpo: transformers' generate, or a "
        "server on the same device with this share of its memory (vLLM's gpu_memory_utilization)",
        label="Rollout",
        needs=of_groups,
    ),
    "activations": replace(
        _recipe(
            "activations",
            choice(ACTIVATIONS),
            KEEP,
            allowed=f"{', '.join(ACTIVATIONS)}, {CHECKPOINT_OFFLOAD}: keep activations on the device, or offload them to the host "
            f"with TRL's hooks; {CHECKPOINT_OFFLOAD} is checkpointing=1&activations=offload",
            label="Activations",
            needs=of_replicas,
        ),
        read=read_activations,
    ),
    "optimizer_offload": _recipe(
        "optimizer_offload",
        read_switch,
        False,
        format_switch,
        allowed=f"{_SWITCH}: optimizer state and step on the host, with torchao's CPUOffloadOptimizer",
        label="Optimizer on the host",
        otherwise="0",
    ),
    "autocast": _recipe(
        "autocast",
        read_switch,
        False,
        format_switch,
        allowed=f"{_SWITCH}: train bfloat16 weights under autocast, as trainers do with bf16=True",
        label="Autocast of 16-bit weights",
        needs=of_autocast,
        otherwise="0",
        affects=MODULE,  # ORPO's trainer casts a quantized module by it
    ),
    "liger": _recipe(
        "liger",
        read_switch,
        False,
        format_switch,
        allowed=f"{_SWITCH}: Liger's norms, rotary embeddings and feed-forward layers, as with use_liger_kernel=True; for Liger's "
        "loss use loss=liger",
        label="Liger's layers",
        needs=of_language_models,
        otherwise="0",
    ),
    "fla": _recipe(
        "fla",
        read_switch,
        False,
        format_switch,
        allowed=f"{_SWITCH}: flash-linear-attention's kernels for linear attention, which transformers uses where the package is "
        "installed",
        label="flash-linear-attention",
        needs=unserved(of_transformers),
        otherwise="0",
    ),
    "parallel": Key(
        read=_read_parallel,
        write=lambda request: None if request.parallel == "none" else request.parallel,
        is_default=lambda request: request.parallel == "none",
        allowed=f"{', '.join(PARALLELS)}: parallelism across GPUs; every figure is that of one rank",
        otherwise="none",
        needs=unserved(of_ranks),
        affects=MODULE,
    ),
    "ranks": _field(
        "ranks",
        whole_number(MAX_WORLD, "ranks=8"),
        allowed="data-parallel size; for hsdp, the shard group size",
        needs=of_parallels("ranks"),
    ),
    "replicate": _field(
        "replicate",
        whole_number(MAX_WORLD, "replicate=2"),
        allowed="number of replica groups, each with a copy of the weights, with parallel=hsdp",
        needs=of_parallels("replicate"),
    ),
    "reshard": _field(
        "reshard",
        read_reshard,
        allowed="FSDP2's reshard_after_forward: 1, 0, or the size of a smaller group",
        needs=of_parallels("reshard"),
    ),
    "offload": Key(
        read=_read_offload,
        write=_write_offload,
        is_default=lambda request: not request.offload and request.offloading == OFFLOADS[0],
        allowed=f"{_SWITCH}: FSDP2's CPUOffloadPolicy, which keeps parameters, gradients and optimizer state on the host; for a "
        f"pipeline {', '.join(OFFLOADS)}, group-block:<1 to {MAX_BLOCKS} blocks>: diffusers' offloading",
        needs=of_offload,
    ),
    "tp": _field(
        "tp",
        whole_number(MAX_TP, "tp=8"),
        allowed=f"tensor-parallel size, by transformers' own plans, 1 to {MAX_TP}; without parallel it means parallel=tp",
        needs=served_or("tp", of_parallels("tp")),
    ),
    "sp": _field(
        "sp",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: sequence parallel, shard activations outside tensor-parallel layers along the sequence",
        needs=of_split("sp"),
    ),
    "lp": _field(
        "lp",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: loss parallel, keep logits split along the vocabulary across the tp ranks",
        needs=of_split("lp", trains=True),
    ),
    "cp": _field(
        "cp",
        whole_number(MAX_WORLD, "cp=4"),
        allowed="context-parallel size: GPUs that split each sequence, by PyTorch's context_parallel, with attention=sdpa",
        needs=of_context,
    ),
    "pp": _field(
        "pp",
        whole_number(MAX_PP, "pp=4"),
        allowed=f"number of pipeline stages, 1 to {MAX_PP}; without parallel it means parallel=pp",
        needs=served_or("pp", of_parallels("pp")),
    ),
    "schedule": _field(
        "schedule",
        choice(SCHEDULES),
        allowed=f"{', '.join(SCHEDULES)}: schedule of torch.distributed.pipelining",
        needs=of_pipelines,
    ),
    "microbatch": _field(
        "microbatch",
        whole_number(MAX_BATCH, "microbatch=1"),
        allowed="samples in each microbatch of a pipeline",
        needs=of_pipelines,
    ),
    "rank": _field(
        "rank",
        read_rank,
        allowed="rank to report, from 0 to world size − 1",
        otherwise="the rank with the highest peak",
        needs=of_parallels("rank"),
    ),
    "frames": _field(
        "frames",
        whole_number(MAX_FRAMES, "frames=49"),
        allowed=f"frames of a video, 1 to {MAX_FRAMES}, with arch=diffusers:",
        otherwise="the pipeline's default",
        needs=of_diffusion,
        affects=MODULE,
    ),
    "stream": _field(
        "stream",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: group offloading copies weights ahead of their use, on a separate CUDA stream",
        needs=of_group_offload,
    ),
    "vae": _field(
        "vae",
        lambda text: listed(choice(VAES))(",".join(VAES) if text == "both" else text),
        format_list,
        allowed=f"{', '.join(VAES)}, or both as {','.join(VAES)}: how a pipeline's VAE decodes",
        otherwise="whole images at once",
        needs=of_pipeline_calls,
    ),
    "guidance": _field(
        "guidance",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: classifier-free guidance, which also denoises a negative prompt",
        otherwise="the pipeline's default",
        needs=of_pipeline_calls,
    ),
    "output": _field(
        "output",
        choice(PIPELINE_OUTPUTS),
        allowed=f"{', '.join(PIPELINE_OUTPUTS)}: output of a pipeline; latents are not decoded",
        otherwise="the pipeline's default",
        needs=of_pipeline_calls,
    ),
    "without": _field(
        "without",
        listed(choice(OPTIONAL_PARTS)),
        format_list,
        allowed=f"parts of a pipeline to leave out: {', '.join(OPTIONAL_PARTS)}",
        otherwise="none",
        needs=of_pipeline_calls,
    ),
    "cached": _field(
        "cached",
        choice(CACHED),
        allowed=f"{', '.join(CACHED)}: inputs that are encoded before a pipeline's LoRA training. Without latents the VAE is on "
        "the device, without prompts the text encoders are",
        needs=of_denoiser_adapters,
        label="Encoded before training",
        affects=MODULE,
    ),
    "engine": _field("engine", read_engine, allowed=f"{', '.join(ENGINES)}, with mode=serve", needs=serving),
    "engine_version": _field(
        "engine_version",
        read_release,
        allowed="the server's version, such as 0.11.2, or llama.cpp's build, such as b9467, with mode=serve",
        otherwise="the newest known version",
        needs=of_engines("engine_version"),
    ),
    "util": _field(
        "util",
        read_util,
        lambda share: f"{share:g}",
        allowed="above 0, up to 1: share of the device's memory that the server uses, with mode=serve",
        otherwise="the server's default",
        needs=of_engines("util"),
    ),
    "max_model_len": _field(
        "max_model_len",
        read_length,
        allowed=f"tokens of the longest request, 8k for 8,192, or {AUTO} for the longest that fits, with mode=serve",
        otherwise="the config's",
        needs=serving,
    ),
    "max_num_seqs": _field(
        "max_num_seqs",
        whole_number(MAX_SEQS, "max_num_seqs=256"),
        allowed=f"requests that the server schedules at once, 1 to {MAX_SEQS}, with mode=serve",
        otherwise="the server's default",
        needs=of_engines("max_num_seqs"),
    ),
    "max_num_batched_tokens": _field(
        "max_num_batched_tokens",
        read_token_count,
        allowed=f"tokens in one step of the server, 1 to {MAX_TOKENS}, with mode=serve",
        otherwise="the server's default",
        needs=of_engines("max_num_batched_tokens"),
    ),
    "kv": _field(
        "kv",
        read_kv,
        allowed=f"{', '.join(KV_DTYPES)}; with llama.cpp {', '.join(CACHE_TYPES)}: dtype of the server's KV cache, with mode=serve",
        needs=of_engines("kv"),
    ),
    "dp": _field(
        "dp",
        whole_number(MAX_TP, "dp=2"),
        allowed=f"data-parallel size, copies of the attention layers, 1 to {MAX_TP}, with mode=serve",
        needs=of_engines("dp"),
    ),
    "ep": _field(
        "ep",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: expert parallel, whole experts on each GPU, with mode=serve",
        needs=of_engines("ep"),
    ),
    "enforce_eager": _field(
        "enforce_eager",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: no CUDA graphs, with mode=serve",
        needs=of_engines("enforce_eager"),
    ),
    "api": _field(
        "api",
        choice(APIS),
        allowed=f"{', '.join(APIS)}: vllm serve or the class LLM, which have different defaults, with mode=serve",
        needs=of_engines("api"),
    ),
    "sampler": _field(
        "sampler",
        choice(SAMPLERS),
        allowed=f"{', '.join(SAMPLERS)}: sampling kernel of the profile run, with mode=serve",
        needs=of_engines("sampler"),
    ),
    "prefix_caching": _field(
        "prefix_caching",
        choice(SWITCHES),
        allowed=f"{', '.join(SWITCHES)}: prefix caching, for which servers keep more states of a model, with mode=serve",
        needs=of_engines("prefix_caching"),
    ),
    "fa": _field(
        "fa",
        choice(SWITCHES),
        allowed=f"{', '.join(SWITCHES)}: flash attention, 0 keeps the products of all queries and keys, with engine=llama.cpp",
        needs=of_engines("fa"),
    ),
    "kv_bytes": _field(
        "kv_bytes",
        read_size,
        format_size,
        allowed="size of the KV cache, such as 8GiB, instead of a profile run, with mode=serve",
        otherwise="the memory that the profile run leaves",
        needs=of_engines("kv_bytes"),
    ),
    "used": _field(
        "used",
        read_size,
        format_size,
        allowed="device memory that other programs hold, such as 2GiB, with mode=serve",
        otherwise="nothing",
        needs=serving,
    ),
    "outside": _field(
        "outside",
        read_size,
        format_size,
        allowed="memory that the server holds outside PyTorch, such as 0.5GiB, with mode=serve",
        otherwise="fitted to published logs",
        needs=of_engines("outside"),
    ),
    "graphs": _field(
        "graphs",
        read_size,
        format_size,
        allowed="memory of the server's CUDA graphs, such as 1.2GiB, with mode=serve",
        otherwise="fitted to published logs",
        needs=of_engines("graphs"),
    ),
    "max_loras": _field(
        "max_loras",
        whole_number(MAX_LORAS, "max_loras=4"),
        allowed=f"slots of LoRA adapters, 1 to {MAX_LORAS}, as with --enable-lora --max-loras, with mode=serve",
        otherwise="none; 1 with max_lora_rank",
        needs=of_engines("max_loras"),
    ),
    "max_lora_rank": _field(
        "max_lora_rank",
        read_lora_rank,
        allowed=f"{', '.join(map(str, LORA_RANKS))}: largest rank of an adapter, with mode=serve",
        otherwise="none; 16 with max_loras",
        needs=of_engines("max_lora_rank"),
    ),
    "fully_sharded_loras": _field(
        "fully_sharded_loras",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: split both matrices of an adapter across the tensor-parallel ranks, with mode=serve",
        needs=of_engines("fully_sharded_loras"),
    ),
    "cpu_offload_gb": _field(
        "cpu_offload_gb",
        read_offload,
        lambda size: f"{size:g}",
        allowed="GiB of each GPU's weights that the server keeps on the host, with mode=serve",
        needs=of_engines("cpu_offload_gb"),
    ),
    "dcp": _field(
        "dcp",
        whole_number(MAX_TP, "dcp=2"),
        allowed=f"1 to {MAX_TP}: decode context parallel size, tp ranks that share a request's tokens, with mode=serve",
        needs=of_engines("dcp"),
    ),
    "gpu_layers": _field(
        "gpu_layers",
        read_layers,
        allowed=f"0 to {MAX_LAYERS}: layers on the device, counted from the last, the head is one, with engine=llama.cpp",
        otherwise="all",
        needs=of_engines("gpu_layers"),
    ),
    "cpu_moe": _field(
        "cpu_moe",
        read_layers,
        allowed=f"0 to {MAX_LAYERS}: first layers whose experts stay on the host, with engine=llama.cpp",
        needs=of_engines("cpu_moe"),
    ),
    "speculative": _field(
        "speculative",
        read_speculative,
        format_speculative,
        allowed=f"{', '.join(DRAFTS)}, a head, a draft model or its config, and drafted tokens, as in eagle3:3, with mode=serve",
        otherwise="none",
        needs=of_engines("speculative"),
    ),
    "attn_dp": _field(
        "attn_dp",
        whole_number(MAX_TP, "attn_dp=8"),
        allowed=f"1 to {MAX_TP}: data parallel size of attention within tp, as with --enable-dp-attention, with engine=sglang",
        needs=of_engines("attn_dp"),
    ),
    "pool": _field(
        "pool",
        read_pool,
        format_pool,
        allowed=f"flags of SGLang's pool with values, such as max_total_tokens:32768: {', '.join(POOL_FLAGS)}, with engine=sglang",
        otherwise="the server's own",
        needs=of_engines("pool"),
    ),
    "want": _field(
        "want",
        read_want,
        format_want,
        allowed="requests x tokens that the server must hold at once, such as 8x32k, with mode=serve",
        otherwise="nothing",
        needs=serving,
    ),
    "focus": _field(
        "focus",
        _read_focus,
        lambda cell: f"{cell[0]}:{cell[1]}",
        allowed="<dtype>:<batch>, the cell to show first",
        otherwise="the largest batch that fits",
        affects=NOTHING,
    ),
}
