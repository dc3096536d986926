"""Formats of training configs: a row for each, with the lines that it reads and its defaults for missing lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sizer.base.errors import ConfigError, quote
from sizer.pasted import lines, recipes, torchtitan
from sizer.pasted.code import CALL, PROCESSES, SCRIPT
from sizer.pasted.lines import RANKS, Reader, nothing, number, switch
from sizer.pasted.plain_text import ALLOWED, as_flag, as_number, as_text, read_mapping
from sizer.pasted.question import Draft, Question

Config = Mapping[str, Any]  # dotted names of lines with their values


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. A config of it has all lines of one group of `signs`; `finish` reads lines that have a joint meaning.

    `joint` are the lines that `finish` reads; it returns further lines that it has read.
    """

    key: str
    title: str
    signs: tuple[tuple[str, ...], ...]
    lines: Mapping[str, Reader]
    finish: Callable[[Draft, Config], Collection[str] | None]
    joint: tuple[str, ...] = ()


def read_config(text: str, gpu: str | None = None) -> Question:
    """Return the question of a training config, without values that a device does not support.

    Raises ConfigError for other text.
    """
    config = dict(_flat(read_mapping(text)))
    form = _format_of(config)
    if form is None:
        raise ConfigError(
            "this config is of no format that is read here",
            given=quote(", ".join([*config][:6]), 120),
            allowed=ALLOWED,
            todo="paste the complete file",
        )
    draft = Draft(title=form.title, items={"mode": "training"})
    done = {*form.joint, *(form.finish(draft, config) or ()), PROCESSES, SCRIPT}
    _processes(draft, config)
    for name, value in config.items():
        if value is None or name in done or name.startswith(CALL):
            continue
        alike = any(map(lines.is_irrelevant, (name, name.rpartition(".")[2])))
        reader = form.lines.get(name) or (nothing if alike else None)
        if reader is None or not reader(draft, name, value):
            is_off = as_flag(value) is False  # a feature that is off needs no counterpart
            if name in _PACKING and as_flag(value):
                _packed(draft, config, name)
            elif not is_off:
                draft.unmatched.append(f"{name}: {as_text(value)[:80]}")
    if "arch" not in draft.items:
        draft.assume("the config names no repository: the model of the form is kept")
    draft.assume("the config does not set it", batch=1)
    recipes.leave_out(draft, gpu)
    return draft.whole()


_PACKING = ("packing", "sample_packing", "neat_packing")


def _packed(draft: Draft, config: Config, name: str) -> None:
    """Read packed sequences: a row of batch × seq tokens, which flash attention takes as it takes the sequences (varlen_fwd)."""
    names = ("attn_implementation", "flash_attn", "attn_impl")
    attention = [as_text(config[line]).lower() for line in names if line in config]
    if as_flag(config.get("flash_attention")) or any("flash" in text or text == "fa2" for text in attention):
        draft.assume(f"{name}: with flash attention packed sequences take the memory of batch x seq tokens")
    else:
        draft.unmatched.append(f"{name}: without flash attention a packed row has a mask of all pairs of its tokens")


def _format_of(config: Config) -> Format | None:
    """Return the format of a config: by the class of code or a command, else the first format with its lines."""
    called = next((name for name in config if name.startswith(CALL)), None)
    groups = ((row, group) for row in FORMATS for group in row.signs)
    for row, group in groups:
        if group == (called,) if called else all(_has(config, sign) for sign in group):
            return row
    return None


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the lines of a config, nested ones with dots."""
    for key, part in value.items():
        if isinstance(part, dict) and part:
            yield from _flat(part, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", part


def _has(config: Config, sign: str) -> bool:
    return sign in config or (sign.endswith(".") and any(name.startswith(sign) for name in config))


# ------------------------------------------------------------------------------------------------------ lines that belong together


def _processes(draft: Draft, config: Config) -> None:
    """Read the number of processes of a launcher, for a sharding parallelism or else for DDP."""
    count = as_number(config.get(PROCESSES)) or 1
    if count > 1 and not config.keys().isdisjoint((f"{CALL}diffusers", f"{CALL}sd-scripts")):
        draft.unmatched.append(f"{count} processes: pipelines are counted on one GPU")
    elif count > 1:
        ways = {} if "parallel" in draft.items else {"parallel": "ddp"}
        draft.drop("ranks")
        draft.take(f"{count} processes", **ways, ranks=count)


def _sharded(draft: Draft, config: Config, given: str, prefix: str, why: str) -> tuple[str, ...]:
    """Read the options of FSDP, by accelerate's names after a prefix; return the lines that were read."""
    draft.take(given, parallel="fsdp")
    draft.assume(why, ranks=RANKS)
    done = []
    for name in config:
        option = name.removeprefix(prefix).removeprefix("fsdp_") if name.startswith(prefix) else ""
        on, text = as_flag(config[name]), as_text(config[name]).upper()
        halves = option == "sharding_strategy" and text in ("SHARD_GRAD_OP", "2")
        if option == "offload_params" and on:
            draft.take(f"{name}: true", offload=1)
        elif option == "activation_checkpointing" and on:
            draft.take(f"{name}: true", checkpointing=1)
        elif halves or (option == "reshard_after_forward" and on is False):
            draft.take(f"{name}: {as_text(config[name])}", reshard=0)
        elif option not in _FSDP_ALIKE and not (option == "sharding_strategy" and text in ("FULL_SHARD", "1")):
            continue
        done.append(name)
    return tuple(done)


# Options of FSDP that change no memory of a step, or that FSDP2 has always.
_FSDP_ALIKE = (
    *("offload_params", "activation_checkpointing", "reshard_after_forward", "version", "state_dict_type", "auto_wrap_policy"),
    *("transformer_layer_cls_to_wrap", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params", "forward_prefetch"),
    *("backward_prefetch", "backward_prefetch_policy", "min_num_params", "limit_all_gathers", "final_state_dict_type"),
)


def _compiled(draft: Draft, config: Config, name: str = "torch_compile") -> None:
    if as_flag(config.get(name)) or config.get(name) == "auto":
        recipes.take_compilation(draft, f"{name}: {as_text(config[name])}")


def _silent(draft: Draft, config: Config, optimizer: str = "optim", batch: int = 8) -> None:
    """Assume transformers' Trainer's defaults for a missing optimizer and batch."""
    if config.get(optimizer) is None:
        draft.assume("transformers' default", optimizer="adamw")
        draft.assume("transformers' default", optimizer_impl="fused")
    draft.assume("the default", batch=batch)


def _autocast(draft: Draft, config: Config) -> None:
    """Note that weights in bfloat16 train under autocast, as a Trainer with bf16=True has it."""
    if draft.items.get("dtype") == "bfloat16" and as_flag(config.get("bf16")) is not False:
        draft.assume("transformers' Trainer with bf16 runs the step under autocast", autocast=1)


def _precision(draft: Draft, config: Config, *, casts: bool, why: str) -> None:
    """Read `bf16` and `fp16`: the whole model in that dtype if it `casts`, else float32 weights under autocast."""
    for name, half in (("bf16", "bfloat16"), ("fp16", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")):
        if as_flag(config.get(name)) or config.get(name) == "auto":
            draft.take(f"{name}: {as_text(config[name])}", dtype=half if casts else f"amp-{half}")
            draft.assume(why)
            return
    draft.assume("no half precision is switched on", dtype="float32")


def _quantized(draft: Draft, config: Config, *, four: str, eight: str, double: str = "", kind: str = "") -> None:
    """Read quantized weights."""
    if as_flag(config.get(four)):
        is_double = as_flag(config.get(double)) if double in config else None
        fp4 = as_text(config.get(kind, "nf4")).lower() == "fp4"
        weights = "fp4" if fp4 else "nf4-dq" if is_double else "nf4"
        draft.take(f"{four}: true", weights=weights)
    elif as_flag(config.get(eight)):
        draft.take(f"{eight}: true", weights="int8")


def _axolotl(draft: Draft, config: Config) -> Collection[str]:
    kind = as_text(config.get("adapter") or "").lower()
    dora = as_flag(config.get("peft_use_dora"))
    if kind in ("lora", "qlora"):
        draft.take(
            f"adapter: {kind}",
            train="adapter",
            adapter="dora" if dora else "rslora" if as_flag(config.get("peft_use_rslora")) else "lora",
        )
    if kind == "qlora" or as_flag(config.get("load_in_4bit")):
        draft.take("load_in_4bit", weights="nf4-dq")
        draft.assume("Axolotl quantizes with NF4 and double quantization")
    elif as_flag(config.get("load_in_8bit")):
        draft.take("load_in_8bit: true", weights="int8")
    _precision(draft, config, casts=True, why="Axolotl loads the weights in the dtype that it trains in")
    if as_flag(config.get("bf16")) or config.get("bf16") == "auto":
        _autocast(draft, config)
    if as_flag(config.get("lora_target_linear")):
        draft.take("lora_target_linear: true", targets="all-linear")
    _deepspeed_file(draft, config)
    done: list[str] = []
    if config.get("fsdp") or any(name.startswith("fsdp_config.") for name in config):
        done += _sharded(draft, config, "fsdp", "fsdp_config.", "the config does not give the number of GPUs")
    draft.assume("the samples of a step are those of one GPU")
    _silent(draft, config, "optimizer", batch=1)
    _compiled(draft, config)
    way = as_text(config.get("gradient_checkpointing") or "")
    if way in ("offload", "unsloth"):
        draft.take(f"gradient_checkpointing: {way}", checkpointing=1, activations="offload")
    elif as_flag(way):
        draft.take("gradient_checkpointing: true", checkpointing=1)
    if as_flag(config.get("activation_offloading")):
        draft.take("activation_offloading: true", activations="offload")
    if fused := [name for name in _LIGER_OF_AXOLOTL if as_flag(config.get(name))]:
        recipes.take_liger(draft, ", ".join(fused), loss=False)
    if as_flag(config.get("liger_fused_linear_cross_entropy")):
        draft.take("liger_fused_linear_cross_entropy: true", loss="liger")
    elif as_flag(config.get("cut_cross_entropy")) or "CutCrossEntropy" in as_text(config.get("plugins") or ""):
        draft.take("cut_cross_entropy", loss="cce")
    if (wanted := config.get("rl")) is not None:
        if not recipes.take_objective(draft, f"rl: {as_text(wanted)}", as_text(wanted)):
            draft.unmatched.append(f"rl: {as_text(wanted)}")
        if draft.items.get("objective") == "grpo":
            done += recipes.take_groups(draft, config, "trl.")
    return done


_LIGER_OF_AXOLOTL = (
    *("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_swiglu", "liger_glu_activation"),
    *("liger_cross_entropy", "liger_use_token_scaling"),
)


def _deepspeed_file(draft: Draft, config: Config) -> None:
    """Read `deepspeed: zero3.json`: the stage by the file's name."""
    if (
        found := re.search(r"(?:zero|stage|z)_?-?([123])", as_text(config.get("deepspeed") or ""), re.IGNORECASE)
    ) is None:
        return
    _stage(draft, f"deepspeed: {as_text(config['deepspeed'])}", int(found[1]))
    draft.assume("the config does not give the number of GPUs", ranks=RANKS)


def _stage(draft: Draft, given: str, stage: int) -> None:
    """Read a stage of ZeRO: the closest way of PyTorch's own."""
    if stage == 3:
        draft.take(given, parallel="fsdp")
        draft.assume("ZeRO-3 is counted as FSDP2, which shards the same tensors with other buffers")
    elif stage in (1, 2):
        draft.take(given, parallel="zero1")
        if stage == 2:
            draft.unmatched.append("ZeRO-2 shards gradients; PyTorch has no equivalent, so ZeRO-1 keeps them unsharded here")


def _factory(draft: Draft, config: Config) -> None:
    kind = as_text(config.get("finetuning_type", "lora")).lower()
    if kind in ("lora", "oft"):
        adapter = "dora" if as_flag(config.get("use_dora")) else "rslora" if as_flag(config.get("use_rslora")) else kind
        draft.take(f"finetuning_type: {kind}", train="adapter", adapter=adapter)
        draft.take_or_assume("lora_rank", as_number(config.get("lora_rank")), "r", 8, "LLaMA-Factory's default")
    elif kind == "freeze":
        draft.unmatched.append("finetuning_type: freeze")
    bits = as_number(config.get("quantization_bit"))
    if bits in (4, 8):
        double = as_flag(config.get("double_quantization")) is not False
        draft.take(f"quantization_bit: {bits}", weights="int8" if bits == 8 else "nf4-dq" if double else "nf4")
    pure = as_flag(config.get("pure_bf16"))
    casts = kind == "lora" or bool(pure)
    why = "LLaMA-Factory loads frozen weights in 16 bits, and trained ones in float32 unless pure_bf16 is set"
    _precision(draft, {**config, "bf16": True} if pure else config, casts=casts, why=why)
    if as_flag(config.get("bf16")) and not pure:
        _autocast(draft, config)
    stage = as_text(config.get("stage", "sft"))
    named = as_text(config.get("pref_loss", "")) if config.get("pref_loss") in ("orpo", "simpo") else stage
    if not recipes.take_objective(draft, f"stage: {named}", named):
        draft.unmatched.append(f"stage: {named}")
    elif named not in ("sft", "pt"):
        draft.assume("LLaMA-Factory's loss is counted as that of TRL's trainer")
    if as_flag(config.get("enable_liger_kernel")):
        recipes.take_liger(draft, "enable_liger_kernel: true", loss=named in ("sft", "pt"))
    if as_flag(config.get("use_unsloth_gc")):
        draft.take("use_unsloth_gc: true", checkpointing=1, activations="offload")
    _silent(draft, config)
    _compiled(draft, config)
    draft.assume("LLaMA-Factory's default", seq=2048)
    if as_flag(config.get("disable_gradient_checkpointing")) is not True:
        draft.assume("LLaMA-Factory checkpoints unless it is switched off", checkpointing=1)
    _deepspeed_file(draft, config)


def _adapted(draft: Draft, config: Config, rank: int, alpha: int, whose: str) -> None:
    """Read an adapter and quantized weights, by TRL's names; `rank` and `alpha` are the defaults of `whose` classes."""
    if as_flag(config.get("use_peft")):
        kind = "dora" if as_flag(config.get("use_dora")) else "rslora" if as_flag(config.get("use_rslora")) else "lora"
        draft.take("use_peft: true", train="adapter", adapter=kind)
        draft.take_or_assume("lora_r", as_number(config.get("lora_r")), "r", rank, f"{whose} default")
        draft.take_or_assume("lora_alpha", as_number(config.get("lora_alpha")), "alpha", alpha, f"{whose} default")
    names = {"double": "use_bnb_nested_quant", "kind": "bnb_4bit_quant_type"}
    _quantized(draft, config, four="load_in_4bit", eight="load_in_8bit", **names)


def _trl(draft: Draft, config: Config) -> Collection[str]:
    _adapted(draft, config, 16, 32, "TRL's")
    name = next((name for name in _DTYPES if name in config), "")
    half = as_flag(config.get("bf16")) is not False and not as_flag(config.get("fp16"))
    if as_text(config.get(name) or "") == "auto":
        draft.assume(f"{name}: auto is the checkpoint's dtype, assumed to be bfloat16", dtype="bfloat16")
    elif not (name and lines.dtype(draft, name, config[name])) or draft.items["dtype"] == "float32":
        draft.drop("dtype")
        quiet = {**config, "bf16": half, "fp16": config.get("fp16", False)}
        why = "TRL loads weights in float32 and trains under autocast with bf16 unless they are switched"
        _precision(draft, quiet, casts=False, why=why)
    if half:
        _autocast(draft, config)
    if as_flag(config.get("gradient_checkpointing", True)):
        draft.assume("TRL checkpoints unless it is switched off", checkpointing=1)
    kind, given = _trainer_of(config)
    recipes.take_objective(draft, given, kind)
    _silent(draft, config)
    _compiled(draft, config)
    if as_flag(config.get("use_liger_kernel")):
        recipes.take_liger(draft, "use_liger_kernel: true", loss=False)
    if as_flag(config.get("activation_offloading")):
        draft.take("activation_offloading: true", activations="offload")
    if as_flag(config.get("precompute_ref_log_probs")):
        draft.take("precompute_ref_log_probs: true", reference="precomputed")
    if kind == "sft" and as_text(config.get("loss_type") or "nll") in ("nll", "chunked_nll"):
        draft.assume("the loss of TRL's SFTTrainer, without all logits", loss="trl")
    if kind != "grpo":
        draft.assume("TRL's default", seq=1024)
        return ("beta", "max_prompt_length", "loss_type") if kind != "sft" else ()
    return recipes.take_groups(draft, config)


_DTYPES = ("dtype", "torch_dtype", "model_init_kwargs.torch_dtype", "model_init_kwargs.dtype")
# Lines that only one of TRL's trainers has; DPO's last, since other trainers also have `beta`.
_SIGNS_OF_TRAINERS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "vllm_mode", "num_iterations"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("precompute_ref_log_probs", "rpo_alpha", "beta", "label_smoothing"),
}


def _trainer_of(config: Config) -> tuple[str, str]:
    """Return which of TRL's trainers has a config, and the line that says so."""
    called = (name.removeprefix(CALL) for name in config if name.startswith(CALL))
    if (name := next(called, None)) is not None:
        return name.removesuffix("Config").lower().replace("rloo", "grpo"), name
    for kind, signs in _SIGNS_OF_TRAINERS.items():
        if (sign := next((sign for sign in signs if sign in config), None)) is not None:
            return kind, f"{sign}, a line of {kind.upper()}Config"
    return "sft", ""


def _trainer(draft: Draft, config: Config) -> Collection[str]:
    _adapted(draft, config, 8, 8, "PEFT's")
    name = next((name for name in _DTYPES if name in config), "")
    if name and lines.dtype(draft, name, config[name]) and draft.items["dtype"] != "float32":
        if as_flag(config.get("bf16")):
            _autocast(draft, config)
    else:
        draft.drop("dtype")
        why = "weights are assumed to be loaded in float32: the arguments do not set the dtype"
        _precision(draft, config, casts=False, why=why)
    done: tuple[str, ...] = ()
    if isinstance(config.get("fsdp"), (str, list)) and config["fsdp"]:
        given = f"fsdp: {as_text(config['fsdp'])}"
        done = _sharded(draft, config, given, "fsdp_config.", "the arguments do not give the number of GPUs")
        draft.take(given, offload=int("offload" in as_text(config["fsdp"])))
    _deepspeed_file(draft, config)
    _silent(draft, config)
    _compiled(draft, config)
    if as_flag(config.get("use_liger_kernel")):
        recipes.take_liger(draft, "use_liger_kernel: true", loss=True)
    if "weights" in draft.items and config.get("prepare_model_for_kbit_training") is False:
        draft.assume("the code does not call prepare_model_for_kbit_training", prepare=0)
    return done


_TUNE_MODEL = re.compile(
    r"(lora|qlora|dora|qdora)?_?(llama3_1|llama3_2_vision|llama3_2|llama3_3|llama3|llama2|qwen2_5|qwen2|qwen3|mistral|gemma2|gemma|phi3|phi4)_(.+)$"
)
_TUNE_REPOSITORIES = {
    ("llama3_1", "8b"): "meta-llama/Llama-3.1-8B", ("llama3_1", "70b"): "meta-llama/Llama-3.1-70B",
    ("llama3_2", "1b"): "meta-llama/Llama-3.2-1B", ("llama3_2", "3b"): "meta-llama/Llama-3.2-3B",
    ("llama3_3", "70b"): "meta-llama/Llama-3.3-70B-Instruct", ("llama3", "8b"): "meta-llama/Meta-Llama-3-8B",
    ("llama3", "70b"): "meta-llama/Meta-Llama-3-70B", ("llama2", "7b"): "meta-llama/Llama-2-7b-hf",
    ("llama2", "13b"): "meta-llama/Llama-2-13b-hf", ("llama2", "70b"): "meta-llama/Llama-2-70b-hf",
    ("mistral", "7b"): "mistralai/Mistral-7B-v0.1", ("qwen2", "7b"): "Qwen/Qwen2-7B", ("qwen2", "1_5b"): "Qwen/Qwen2-1.5B",
    ("qwen2", "0_5b"): "Qwen/Qwen2-0.5B", ("qwen2_5", "7b"): "Qwen/Qwen2.5-7B", ("qwen2_5", "0_5b"): "Qwen/Qwen2.5-0.5B",
    ("qwen3", "8b"): "Qwen/Qwen3-8B", ("gemma2", "9b"): "google/gemma-2-9b", ("gemma", "2b"): "google/gemma-2b",
    ("gemma", "7b"): "google/gemma-7b", ("gemma2", "2b"): "google/gemma-2-2b", ("gemma2", "27b"): "google/gemma-2-27b",
    ("llama3_1", "405b"): "meta-llama/Llama-3.1-405B", ("qwen2_5", "1_5b"): "Qwen/Qwen2.5-1.5B",
    ("qwen2_5", "3b"): "Qwen/Qwen2.5-3B", ("qwen2_5", "14b"): "Qwen/Qwen2.5-14B", ("qwen2_5", "32b"): "Qwen/Qwen2.5-32B",
    ("qwen2_5", "72b"): "Qwen/Qwen2.5-72B", ("llama3_2_vision", "11b"): "meta-llama/Llama-3.2-11B-Vision",
    ("phi3", "mini"): "microsoft/Phi-3-mini-4k-instruct", ("phi4", "14b"): "microsoft/phi-4",
}  # fmt: skip


def _torchtune(draft: Draft, config: Config) -> None:
    name = as_text(config.get("model._component_", "")).rpartition(".")[2]
    if (found := _TUNE_MODEL.search(name)) is not None:
        kind, family, size = found[1], found[2], re.sub(r"_(instruct|base|classifier)$", "", found[3])
        if (repository := _TUNE_REPOSITORIES.get((family, size))) is not None:
            lines.model(draft, f"model._component_ ({name})", repository)
        else:
            draft.unmatched.append(f"model._component_: {name}")
        if kind or any(line.startswith("model.lora_") for line in config):
            dora = bool(kind and "dora" in kind) or bool(as_flag(config.get("model.use_dora")))
            draft.take(f"model._component_: {name}", train="adapter", adapter="dora" if dora else "lora")
            if attention := config.get("model.lora_attn_modules"):
                _tune_targets(draft, config, attention)
        if (kind or "").startswith("q") or as_flag(config.get("model.quantize_base")):
            draft.take("quantize_base", weights="nf4-dq")
            draft.assume("torchtune's NF4 by torchao is counted as that of bitsandbytes with double quantization")
    elif name:
        draft.unmatched.append(f"model._component_: {name}")
    draft.assume(
        "torchtune's default", dtype=lines.DTYPES.get(as_text(config.get("dtype", "bf16")).lower(), "bfloat16")
    )
    if as_flag(config.get("fsdp_cpu_offload")):
        draft.take("fsdp_cpu_offload: true", parallel="fsdp", offload=1)
    elif any(name in config for name in ("fsdp_cpu_offload", "custom_sharded_layers")):
        draft.take("fsdp_cpu_offload, custom_sharded_layers: a recipe for several GPUs", parallel="fsdp")
    if (split := as_number(config.get("tensor_parallel_dim")) or 1) > 1:
        draft.take(f"tensor_parallel_dim: {split}", parallel="fsdp", tp=split)
    if "parallel" in draft.items:
        draft.assume("the config does not give the number of GPUs", ranks=RANKS)
    if as_flag(config.get("compile")):
        draft.take("compile: true", compile="default")
    loss = as_text(config.get("loss._component_", "")).rpartition(".")[2]
    if loss == "DPOLoss":
        draft.take(f"loss._component_: {loss}", objective="dpo")
        draft.assume("torchtune's loss is counted as that of TRL's trainer")
    elif loss in ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss"):
        draft.take(f"loss._component_: {loss}", loss=f"chunked:{as_number(config.get('loss.num_output_chunks')) or 8}")
    for name in ("kd_loss._component_", "teacher_model._component_"):
        if name in config:
            draft.unmatched.append(f"{name}: {as_text(config[name])}: no teacher is counted")


def _tune_targets(draft: Draft, config: Config, attention: object) -> None:
    """Read the layers that torchtune adapts: its names are transformers', except for the MLP and the output."""
    names = [
        {"output_proj": "o_proj"}.get(as_text(one), as_text(one))
        for one in (attention if isinstance(attention, list) else [attention])
    ]
    if as_flag(config.get("model.apply_lora_to_mlp")):
        names += ["gate_proj", "up_proj", "down_proj"]
    lines.targets(draft, "model.lora_attn_modules", names)


def _deepspeed(draft: Draft, config: Config) -> None:
    for name, half in (("bf16.enabled", "bfloat16"), ("fp16.enabled", "float16")):
        if as_flag(config.get(name)):
            draft.take(f"{name}: true", dtype=f"amp-{half}")
            draft.assume(
                "DeepSpeed keeps 16-bit weights and a float32 copy; float32 weights under autocast are the closest"
            )
            break
    else:
        draft.assume("no half precision is switched on", dtype="float32")
    if (stage := as_number(config.get("zero_optimization.stage"))) is not None:
        _stage(draft, f"zero_optimization.stage: {stage}", stage)
        if stage:
            draft.assume("the config does not give the number of GPUs", ranks=RANKS)
        if stage == 3 and as_text(config.get("zero_optimization.offload_param.device", "none")) == "cpu":
            draft.take("zero_optimization.offload_param.device: cpu", offload=1)


def _accelerate(draft: Draft, config: Config) -> Collection[str]:
    kind = as_text(config.get("distributed_type", "NO")).upper()
    count = as_number(config.get("num_processes")) or 1
    half = {"bf16": "amp-bfloat16", "fp16": "amp-float16"}.get(as_text(config.get("mixed_precision", "no")).lower())
    if half:
        draft.take(f"mixed_precision: {config['mixed_precision']}", dtype=half)
    else:
        draft.assume("no half precision is switched on", dtype="float32")
    if kind == "FSDP" or as_flag(config.get("use_fsdp")):
        done = [*_sharded(draft, config, f"distributed_type: {kind}", "fsdp_config.", "")]
        done += _meshed(draft, config, max(count, 2))
        _compiled_by_accelerate(draft, config)
        return done
    elif kind == "DEEPSPEED":
        _stage(
            draft,
            f"deepspeed_config.zero_stage: {config.get('deepspeed_config.zero_stage')}",
            as_number(config.get("deepspeed_config.zero_stage")) or 2,
        )
        draft.take(f"num_processes: {count}", ranks=max(count, 2))
    elif kind == "MULTI_GPU" and count > 1:
        draft.take(f"distributed_type: {kind}, num_processes: {count}", parallel="ddp", ranks=count)
    _compiled_by_accelerate(draft, config)
    return ()


def _compiled_by_accelerate(draft: Draft, config: Config) -> None:
    if as_text(config.get("dynamo_config.dynamo_backend", "NO")).upper() == "INDUCTOR":
        recipes.take_compilation(draft, "dynamo_config.dynamo_backend: INDUCTOR")


def _meshed(draft: Draft, config: Config, count: int) -> tuple[str, ...]:
    """Read how processes are laid out as a mesh; return the lines that are read."""
    names = {key: f"parallelism_config.parallelism_config_{key}_size" for key in ("dp_shard", "dp_replicate", "tp", "cp")}
    size = {key: as_number(config.get(name)) or 1 for key, name in names.items()}
    draft.drop("ranks")
    split = {key: size[key] for key in ("tp", "cp") if size[key] > 1}
    ranks = max(1, count // (size["dp_replicate"] * size["tp"] * size["cp"]))
    given = f"num_processes: {count}" + (", parallelism_config" if any(value > 1 for value in size.values()) else "")
    if size["dp_replicate"] > 1:
        draft.take(given, parallel="hsdp", replicate=size["dp_replicate"], ranks=ranks, **split)
    else:
        draft.take(given, ranks=ranks, **split)
    return tuple(names.values())


def _diffusers(draft: Draft, config: Config) -> None:
    """Read the flags of diffusers' example scripts (examples/dreambooth and examples/text_to_image, 0.42)."""
    script = as_text(config.get(SCRIPT) or "")
    adapts = "lora" in script or "rank" in config
    draft.take(script or "rank", train="adapter" if adapts else "all")
    if adapts:
        draft.take_or_assume("rank", as_number(config.get("rank")), "r", 4, "the scripts' default")
    repository = as_text(config["pretrained_model_name_or_path"])
    if not lines.pipeline(draft, "pretrained_model_name_or_path", repository):
        draft.unmatched.append(f"pretrained_model_name_or_path: {repository}")
    _precision(draft, config, casts=adapts, why="the scripts cast frozen weights, and train float32 weights under autocast")
    if as_flag(config.get("use_8bit_adam")):
        draft.take("use_8bit_adam: true", optimizer="adamw-8bit")
    side = as_number(config.get("resolution"))
    draft.take_or_assume("resolution", side, "image", 512, "the scripts' default")
    if adapts:
        # the scripts of SDXL and FLUX.1 encode prompts first, too, but a variable keeps the text encoders (docs/diffusion.md)
        frees = "dreambooth" in script and not re.search(r"sdxl|flux(?!_?2)", script)
        cached = as_flag(config.get("cache_latents"))
        kept = ("all" if cached else "prompts") if frees else ("latents" if cached else "none")
        draft.assume("the script frees these parts before training", cached=kept)
    draft.assume("the scripts' default", batch=4 if "dreambooth" in script else 16)
    draft.assume("the scripts' default", optimizer="adamw")


def _kohya(draft: Draft, config: Config) -> None:
    """Read the flags of kohya's train_network.py and sdxl_train_network.py (networks/lora.py, library/train_util.py, 2026)."""
    script = as_text(config[SCRIPT])
    draft.take(script, train="adapter")
    repository = as_text(config["pretrained_model_name_or_path"])
    if not lines.pipeline(draft, "pretrained_model_name_or_path", repository):
        preset = "sdxl" if script.startswith("sdxl") else "sd1.5"
        draft.assume(f"{repository}: the file is taken to be {preset}", arch=f"diffusers:{preset}")
    if (module := as_text(config.get("network_module", "networks.lora"))) != "networks.lora":
        draft.unmatched.append(f"network_module: {module}, counted as networks.lora")
    draft.take_or_assume("network_dim", as_number(config.get("network_dim")), "r", 4, "the script's default")
    draft.take_or_assume("network_alpha", as_number(config.get("network_alpha")), "alpha", 1, "the script's default")
    draft.assume("networks.lora adapts the layers of the transformer blocks", targets=_LAYERS_OF_KOHYA)
    if not as_flag(config.get("network_train_unet_only")):
        draft.unmatched.append("the adapters of the text encoders, without network_train_unet_only")
    _precision(draft, config, casts=True, why="the script casts frozen weights, and trains float32 adapters under autocast")
    sides = re.findall(r"[0-9]+", " ".join(map(as_text, [config.get("resolution", "")])))
    size = {"image": "x".join(reversed(sides[:2]))} if len(set(sides)) == 2 else {"image": sides[0]} if sides else {}
    if size:
        draft.take(f"resolution: {','.join(sides)}", **size)
    else:
        draft.assume("the resolution is in another file", image=1024 if script.startswith("sdxl") else 512)
    kinds = {"latents": "cache_latents", "prompts": "cache_text_encoder_outputs"}
    cached = [key for key, name in kinds.items() if as_flag(config.get(name)) or as_flag(config.get(f"{name}_to_disk"))]
    draft.assume("what is encoded before training", cached="all" if len(cached) == 2 else cached[0] if cached else "none")
    if as_flag(config.get("use_8bit_adam")):
        draft.take("use_8bit_adam: true", optimizer="adamw-8bit")
    draft.assume("the script's default", optimizer="adamw")
    draft.assume("the batch size is in dataset_config" if "dataset_config" in config else "the script's default", batch=1)
    if not any(as_flag(config.get(name)) for name in ("sdpa", "xformers")):
        draft.unmatched.append("attention without --sdpa or --xformers, which computes whole matrices")


def _swift(draft: Draft, config: Config) -> Collection[str]:
    """Read the flags of ms-swift (swift/arguments and swift/trainers/arguments.py, 4.6)."""
    kind = as_text(config.get("tuner_type") or config.get("train_type") or "lora")
    if kind == "lora":
        adapter = "dora" if as_flag(config.get("use_dora")) else "rslora" if as_flag(config.get("use_rslora")) else "lora"
        draft.take("tuner_type: lora", train="adapter", adapter=adapter)
        draft.take_or_assume("lora_rank", as_number(config.get("lora_rank")), "r", 8, "ms-swift's default")
        draft.take_or_assume("lora_alpha", as_number(config.get("lora_alpha")), "alpha", 32, "ms-swift's default")
        draft.assume("ms-swift's default", adapter_dropout="0.05")
    elif kind != "full":
        draft.unmatched.append(f"tuner_type: {kind}")
    if (bits := as_number(config.get("quant_bits"))) in (4, 8) and config.get("quant_method", "bnb") == "bnb":
        double = as_flag(config.get("bnb_4bit_use_double_quant")) is not False
        draft.take(f"quant_bits: {bits}", weights="int8" if bits == 8 else "nf4-dq" if double else "nf4")
    elif bits is not None:
        draft.unmatched.append(f"quant_bits: {bits}, quant_method: {config.get('quant_method')}")
    if not ("torch_dtype" in config and lines.dtype(draft, "torch_dtype", config["torch_dtype"])):
        draft.assume("the checkpoint's dtype, mostly this one", dtype="bfloat16")
    if draft.items["dtype"] == "bfloat16":
        draft.assume("transformers' Trainer with bf16 runs the step under autocast", autocast=1)
    if as_flag(config.get("gradient_checkpointing", True)):
        draft.assume("ms-swift checkpoints unless it is switched off", checkpointing=1)
    kind = as_text(config.get("rlhf_type", "dpo")) if config.get(SCRIPT) == "rlhf" else "sft"
    if not recipes.take_objective(draft, f"rlhf_type: {kind}", kind):
        draft.unmatched.append(f"rlhf_type: {kind}")
    if as_flag(config.get("use_liger_kernel")):
        recipes.take_liger(draft, "use_liger_kernel: true", loss=kind == "sft")
    _silent(draft, config, batch=1)
    _deepspeed_file(draft, config)
    return recipes.take_groups(draft, config) if draft.items.get("objective") == "grpo" else ()


# Linear layers and 1 x 1 convolutions of Transformer2DModel.
_LAYERS_OF_KOHYA = "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2"


# ---------------------------------------------------------------------------------------------------------------- the formats

_HUGGING_FACE: dict[str, Reader] = {
    "per_device_train_batch_size": number("batch"),
    "gradient_accumulation_steps": number("accumulate"),
    "gradient_checkpointing": switch(checkpointing=1),
    "optim": lines.optimizer,
    "attn_implementation": lines.attention,
}
_ADAPTERS: dict[str, Reader] = {
    "model_class": lines.head,
    "num_labels": number("classes"),
    "model_name_or_path": lines.model,
    "max_length": number("seq"),
    "max_seq_length": number("seq"),
    "model_max_length": number("seq"),
    "lora_dropout": lines.dropout,
    "lora_target_modules": lines.targets,
    "lora_modules_to_save": lines.saved_modules,
    "bnb_4bit_compute_dtype": lines.compute,
}
_PRECISION = ("bf16", "fp16", "tf32", "fp16_full_eval", "bf16_full_eval")

FORMATS = (
    Format(
        key="torchtune",
        title="torchtune",
        signs=(("model._component_",),),
        lines={
            "batch_size": number("batch"),
            "gradient_accumulation_steps": number("accumulate"),
            "enable_activation_checkpointing": switch(checkpointing=1),
            "optimizer._component_": lines.optimizer,
            "tokenizer.max_seq_len": number("seq"),
            "model.lora_rank": number("r"),
            "model.lora_alpha": number("alpha"),
            "model.lora_dropout": lines.dropout,
            "optimizer.fused": switch(optimizer_impl="fused"),
            "optimizer_in_bwd": switch(step="in_backward"),
            "enable_activation_offloading": switch(activations="offload"),
            "enable_kv_cache": nothing,
            "clip_grad_norm": nothing,
        },
        finish=_torchtune,
        joint=(
            *(
                "model._component_",
                "model.lora_attn_modules",
                "model.apply_lora_to_mlp",
                "model.use_dora",
                "model.quantize_base",
            ),
            *("dtype", "fsdp_cpu_offload", "custom_sharded_layers", "tensor_parallel_dim", "compile", "loss._component_"),
            *("loss.num_output_chunks", "kd_loss._component_", "teacher_model._component_"),
        ),
    ),
    Format(
        key="torchtitan",
        title="torchtitan",
        signs=(("model.flavor", "training.seq_len"),),
        lines={
            **dict.fromkeys(("training.local_batch_size", "training.batch_size"), number("batch")),
            "training.seq_len": number("seq"),
            "optimizer.name": lines.optimizer,
            "training.enable_cpu_offload": nothing,
        },
        finish=torchtitan.read_job,
        joint=("model.flavor", "model.hf_assets_path"),
    ),
    Format(
        key="deepspeed",
        title="DeepSpeed",
        signs=(("zero_optimization.",), ("train_micro_batch_size_per_gpu",), ("bf16.enabled", "optimizer.type")),
        lines={
            "train_micro_batch_size_per_gpu": number("batch"),
            "gradient_accumulation_steps": number("accumulate"),
            "optimizer.type": lines.optimizer,
            "train_batch_size": nothing,
            "zero_optimization.overlap_comm": nothing,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": nothing,
        },
        finish=_deepspeed,
        joint=("bf16.enabled", "fp16.enabled", "zero_optimization.stage", "zero_optimization.offload_param.device"),
    ),
    Format(
        key="accelerate",
        title="accelerate",
        signs=(("compute_environment",), ("distributed_type", "mixed_precision")),
        lines={
            "deepspeed_config.gradient_accumulation_steps": number("accumulate"),
            "gradient_accumulation_steps": number("accumulate"),
        },
        finish=_accelerate,
        joint=(
            *("distributed_type", "num_processes", "mixed_precision", "use_fsdp", "deepspeed_config.zero_stage"),
            *("dynamo_config.dynamo_backend", "dynamo_config.dynamo_mode"),
        ),
    ),
    Format(
        key="llama-factory",
        title="LLaMA-Factory",
        signs=(("finetuning_type",), ("cutoff_len", "model_name_or_path")),
        lines=_HUGGING_FACE
        | {
            "model_name_or_path": lines.model,
            "cutoff_len": number("seq"),
            "lora_alpha": number("alpha"),
            "lora_dropout": lines.dropout,
            "lora_target": lines.targets,
            "additional_target": lines.saved_modules,
            "flash_attn": lines.attention,
            "deepspeed": nothing,
        },
        finish=_factory,
        joint=(
            *(
                "finetuning_type",
                "lora_rank",
                "use_dora",
                "use_rslora",
                "quantization_bit",
                "double_quantization",
                "pure_bf16",
            ),
            *("disable_gradient_checkpointing", "quantization_method", *_PRECISION, "stage", "pref_loss", "pref_beta"),
            *("enable_liger_kernel", "use_unsloth_gc", "torch_compile"),
        ),
    ),
    Format(
        key="axolotl",
        title="Axolotl",
        signs=(("base_model",),),
        lines={
            "base_model": lines.model,
            "micro_batch_size": number("batch"),
            "gradient_accumulation_steps": number("accumulate"),
            "sequence_len": number("seq"),
            "optimizer": lines.optimizer,
            "lora_r": number("r"),
            "lora_alpha": number("alpha"),
            "lora_dropout": lines.dropout,
            "lora_target_modules": lines.targets,
            "lora_modules_to_save": lines.saved_modules,
            "attn_implementation": lines.attention,
            "flash_attention": switch(attention="sdpa"),
            "sdp_attention": switch(attention="sdpa"),
            "eager_attention": switch(attention="eager"),
            "deepspeed": nothing,
            "fsdp": nothing,
        },
        finish=_axolotl,
        joint=(
            *("adapter", "load_in_4bit", "load_in_8bit", "peft_use_dora", "peft_use_rslora", "lora_target_linear", "rl", "plugins"),
            *("gradient_checkpointing", "activation_offloading", "torch_compile", "cut_cross_entropy", *_LIGER_OF_AXOLOTL),
            *("liger_fused_linear_cross_entropy", *_PRECISION, "float16", "bfloat16"),
        ),
    ),
    Format(
        key="trl",
        title="TRL",
        signs=(
            *((f"{CALL}{name}Config",) for name in ("SFT", "DPO", "KTO", "ORPO", "GRPO", "RLOO", "Reward")),
            *(("model_name_or_path", sign) for sign in ("use_peft", "max_length", "max_seq_length")),
            *(("model_name_or_path", sign) for sign in ("per_device_train_batch_size", "dataset_name")),
        ),
        lines=_HUGGING_FACE | _ADAPTERS,
        finish=_trl,
        joint=(
            *("use_peft", "use_dora", "use_rslora", "lora_r", "lora_alpha", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
            *("bnb_4bit_quant_type", *_DTYPES, *_PRECISION, "torch_compile", "use_liger_kernel", "activation_offloading"),
            *("precompute_ref_log_probs", "gradient_checkpointing_kwargs.use_reentrant", "prepare_model_for_kbit_training"),
        ),
    ),
    Format(
        key="diffusers",
        title="diffusers' training scripts",
        signs=((f"{CALL}diffusers",), ("pretrained_model_name_or_path", "train_batch_size")),
        lines={
            "train_batch_size": number("batch"),
            "gradient_accumulation_steps": number("accumulate"),
            "gradient_checkpointing": switch(checkpointing=1),
            "max_sequence_length": number("seq"),
            "lora_dropout": lines.dropout,
            **dict.fromkeys(("variant", "revision", "instance_prompt", "class_prompt", "center_crop", "random_flip"), nothing),
            **dict.fromkeys(("instance_data_dir", "class_data_dir", "train_data_dir", "guidance_scale"), nothing),
            **dict.fromkeys(("image_column", "caption_column", "max_train_steps", "snr_gamma", "weighting_scheme"), nothing),
            **dict.fromkeys(("allow_tf32", "checkpointing_steps", "checkpoints_total_limit", "repeats"), nothing),
        },
        finish=_diffusers,
        joint=(
            *("pretrained_model_name_or_path", "rank", "use_8bit_adam", "resolution", "cache_latents", "optimizer"),
            *_PRECISION,
        ),
    ),
    Format(
        key="ms-swift",
        title="ms-swift",
        signs=((f"{CALL}swift",),),
        lines=_HUGGING_FACE
        | {
            "model": lines.model,
            "max_length": number("seq"),
            "lora_dropout": lines.dropout,
            "target_modules": lines.targets,
            "modules_to_save": lines.saved_modules,
            "attn_impl": lines.attention,
            "bnb_4bit_compute_dtype": lines.compute,
            "deepspeed": nothing,
            **dict.fromkeys(("dataset", "val_dataset", "split_dataset_ratio", "load_from_cache_file", "system"), nothing),
            **dict.fromkeys(("model_author", "model_name", "dataset_num_proc", "dataloader_num_workers", "use_hf"), nothing),
        },
        finish=_swift,
        joint=(
            *("tuner_type", "train_type", "use_dora", "use_rslora", "lora_rank", "lora_alpha", "quant_bits", "quant_method"),
            *("bnb_4bit_use_double_quant", "torch_dtype", "rlhf_type", "use_liger_kernel", *_PRECISION),
        ),
    ),
    Format(
        key="sd-scripts",
        title="kohya's sd-scripts",
        signs=((f"{CALL}sd-scripts",),),
        lines={
            "train_batch_size": number("batch"),
            "gradient_accumulation_steps": number("accumulate"),
            "gradient_checkpointing": switch(checkpointing=1),
            "optimizer_type": lines.optimizer,
            **dict.fromkeys(("sdpa", "xformers", "network_train_unet_only", "no_half_vae", "num_cpu_threads_per_process"), nothing),
            **dict.fromkeys(("train_data_dir", "output_name", "save_model_as", "save_every_n_epochs"), nothing),
            **dict.fromkeys(("max_train_steps", "max_train_epochs", "min_snr_gamma", "noise_offset", "clip_skip"), nothing),
            **dict.fromkeys(("shuffle_caption", "keep_tokens", "prior_loss_weight", "save_precision", "unet_lr"), nothing),
            **dict.fromkeys(("text_encoder_lr", "optimizer_args", "dataset_config", "caption_extension"), nothing),
        },
        finish=_kohya,
        joint=(
            *("pretrained_model_name_or_path", "network_module", "network_dim", "network_alpha", "resolution", *_PRECISION),
            *("cache_latents", "cache_latents_to_disk", "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"),
            *("use_8bit_adam",),
        ),
    ),
    Format(
        key="trainer",
        title="a Trainer's arguments",
        signs=(
            (f"{CALL}TrainingArguments",),
            ("per_device_train_batch_size",),
            ("optim", "gradient_accumulation_steps"),
            ("output_dir", "bf16"),
        ),
        lines=_HUGGING_FACE | _ADAPTERS | {"deepspeed": nothing, "block_size": number("seq"), "max_seq_length": number("seq")},
        finish=_trainer,
        joint=(
            *("use_peft", "use_dora", "use_rslora", "lora_r", "lora_alpha", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
            *("bnb_4bit_quant_type", *_DTYPES, *_PRECISION, "torch_compile", "use_liger_kernel", "fsdp"),
            *("gradient_checkpointing_kwargs.use_reentrant", "prepare_model_for_kbit_training"),
        ),
    ),
)
