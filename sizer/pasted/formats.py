"""The formats of training configs: a row for each, with the lines that it reads and what it means by silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sizer.base.errors import ConfigError, quote
from sizer.pasted import lines
from sizer.pasted.lines import Reader, nothing, number, switch
from sizer.pasted.plain_text import ALLOWED, as_flag, as_number, as_text, read_mapping
from sizer.pasted.question import Draft, Question

Config = Mapping[str, Any]  # dotted names of lines with their values
RANKS = 8  # of a config that shards over all GPUs and does not say how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format. A config of it has all lines of one group of `signs`; `finish` reads what several lines mean together.

    `joint` are the lines that `finish` reads.
    """

    key: str
    title: str
    signs: tuple[tuple[str, ...], ...]
    lines: Mapping[str, Reader]
    finish: Callable[[Draft, Config], None]
    joint: tuple[str, ...] = ()


def read_config(text: str) -> Question:
    """Return the question that a training config asks. Raises ConfigError for a text of another kind."""
    config = dict(_flat(read_mapping(text)))
    form = next((row for row in FORMATS if any(all(_has(config, sign) for sign in group) for group in row.signs)), None)
    if form is None:
        raise ConfigError(
            "this config is of no format that is read here",
            given=quote(", ".join([*config][:6]), 120),
            allowed=ALLOWED,
            todo="paste the whole file",
        )
    draft = Draft(title=form.title, items={"mode": "training"})
    form.finish(draft, config)
    for name, value in config.items():
        if value is None or name in form.joint:
            continue
        reader = form.lines.get(name) or (nothing if lines.is_irrelevant(name.rpartition(".")[2]) else None)
        reader = reader or (nothing if lines.is_irrelevant(name) else None)
        if reader is None or not reader(draft, name, value):
            is_off = as_flag(value) is False  # what is switched off has no counterpart to miss
            if not is_off:
                draft.unmatched.append(f"{name}: {as_text(value)[:80]}")
    if "arch" not in draft.items:
        draft.assume("the config names no repository: the model of the form is kept")
    draft.assume("the config does not say it", batch=8 if "per_device" in text else 1)
    return draft.whole()


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


def _precision(draft: Draft, config: Config, *, casts: bool, why: str) -> None:
    """Read `bf16` and `fp16`: the whole model in that dtype if it `casts`, else float32 weights under autocast."""
    for name, half in (("bf16", "bfloat16"), ("fp16", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")):
        if as_flag(config.get(name)) or config.get(name) == "auto":
            draft.take(f"{name}: {as_text(config[name])}", dtype=half if casts else f"amp-{half}")
            draft.assume(why)
            return
    draft.assume("no half precision is switched on", dtype="float32")


def _quantized(draft: Draft, config: Config, *, four: str, eight: str, double: str = "", kind: str = "") -> None:
    """Read quantised weights."""
    if as_flag(config.get(four)):
        is_double = as_flag(config.get(double)) if double in config else None
        fp4 = as_text(config.get(kind, "nf4")).lower() == "fp4"
        weights = "fp4" if fp4 else "nf4-dq" if is_double else "nf4"
        draft.take(f"{four}: true", weights=weights)
    elif as_flag(config.get(eight)):
        draft.take(f"{eight}: true", weights="int8")


def _axolotl(draft: Draft, config: Config) -> None:
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
        draft.assume("Axolotl quantises with NF4 and double quantisation")
    elif as_flag(config.get("load_in_8bit")):
        draft.take("load_in_8bit: true", weights="int8")
    _precision(draft, config, casts=True, why="Axolotl loads the weights in the dtype that it trains in")
    if as_flag(config.get("lora_target_linear")):
        draft.take("lora_target_linear: true", targets="all-linear")
    _deepspeed_file(draft, config)
    if config.get("fsdp") or any(name.startswith("fsdp_config.") for name in config):
        draft.take("fsdp", parallel="fsdp")
        draft.assume("the config does not say how many GPUs there are", ranks=RANKS)
        if as_flag(config.get("fsdp_config.fsdp_offload_params") or config.get("fsdp_config.offload_params")):
            draft.take("fsdp_config.fsdp_offload_params: true", offload=1)
    draft.assume("the step's samples are those of one GPU")


def _deepspeed_file(draft: Draft, config: Config) -> None:
    """Read `deepspeed: zero3.json`: the stage by the file's name."""
    if (
        found := re.search(r"(?:zero|stage|z)_?-?([123])", as_text(config.get("deepspeed") or ""), re.IGNORECASE)
    ) is None:
        return
    _stage(draft, f"deepspeed: {as_text(config['deepspeed'])}", int(found[1]))
    draft.assume("the config does not say how many GPUs there are", ranks=RANKS)


def _stage(draft: Draft, given: str, stage: int) -> None:
    """Read a stage of ZeRO: the closest way of PyTorch's own."""
    if stage == 3:
        draft.take(given, parallel="fsdp")
        draft.assume("ZeRO-3 is counted as FSDP2, which shards the same tensors with other buffers")
    elif stage in (1, 2):
        draft.take(given, parallel="zero1")
        if stage == 2:
            draft.unmatched.append("ZeRO-2 shards gradients; PyTorch has no such way, so ZeRO-1 keeps them whole here")


def _factory(draft: Draft, config: Config) -> None:
    kind = as_text(config.get("finetuning_type", "lora")).lower()
    if kind in ("lora", "oft"):
        adapter = "dora" if as_flag(config.get("use_dora")) else "rslora" if as_flag(config.get("use_rslora")) else kind
        draft.take(f"finetuning_type: {kind}", train="adapter", adapter=adapter)
        draft.assume("LLaMA-Factory's default", r=as_number(config.get("lora_rank")) or 8)
    elif kind == "freeze":
        draft.unmatched.append("finetuning_type: freeze")
    bits = as_number(config.get("quantization_bit"))
    if bits in (4, 8):
        double = as_flag(config.get("double_quantization")) is not False
        draft.take(f"quantization_bit: {bits}", weights="int8" if bits == 8 else "nf4-dq" if double else "nf4")
    pure = as_flag(config.get("pure_bf16"))
    casts = kind == "lora" or bool(pure)
    why = "LLaMA-Factory loads frozen weights in 16 bits, and those that train in float32 unless pure_bf16 is set"
    _precision(draft, {**config, "bf16": True} if pure else config, casts=casts, why=why)
    if as_flag(config.get("disable_gradient_checkpointing")) is not True:
        draft.assume("LLaMA-Factory checkpoints unless it is switched off", checkpointing=1)
    _deepspeed_file(draft, config)


def _trl(draft: Draft, config: Config) -> None:
    if as_flag(config.get("use_peft")):
        draft.take("use_peft: true", train="adapter", adapter="dora" if as_flag(config.get("use_dora")) else "lora")
        draft.assume("TRL's default", r=as_number(config.get("lora_r")) or 16)
        draft.assume("TRL's default", alpha=as_number(config.get("lora_alpha")) or 32)
    _quantized(
        draft,
        config,
        four="load_in_4bit",
        eight="load_in_8bit",
        double="use_bnb_nested_quant",
        kind="bnb_4bit_quant_type",
    )
    name = next(
        (
            name
            for name in ("dtype", "torch_dtype", "model_init_kwargs.torch_dtype", "model_init_kwargs.dtype")
            if name in config
        ),
        "",
    )
    if not (name and lines.dtype(draft, name, config[name])):
        half = as_flag(config.get("bf16", True))
        quiet = {**config, "bf16": half, "fp16": config.get("fp16", False)}
        _precision(
            draft,
            quiet,
            casts=bool(as_flag(config.get("use_peft"))),
            why="TRL trains in bf16 unless it is switched off",
        )
    if as_flag(config.get("gradient_checkpointing", True)):
        draft.assume("TRL checkpoints unless it is switched off", checkpointing=1)


def _trainer(draft: Draft, config: Config) -> None:
    _precision(
        draft, config, casts=False, why="the weights are taken to be loaded in float32: the arguments do not say it"
    )
    if isinstance(config.get("fsdp"), (str, list)) and config["fsdp"]:
        draft.take(
            f"fsdp: {as_text(config['fsdp'])}", parallel="fsdp", offload=int("offload" in as_text(config["fsdp"]))
        )
        draft.assume("the arguments do not say how many GPUs there are", ranks=RANKS)
    _deepspeed_file(draft, config)


_TUNE_MODEL = re.compile(
    r"(lora|qlora|dora|qdora)?_?(llama3_1|llama3_2|llama3_3|llama3|llama2|qwen2_5|qwen2|qwen3|mistral|gemma2|gemma|phi3|phi4)_(.+)$"
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
    ("gemma", "7b"): "google/gemma-7b", ("phi3", "mini"): "microsoft/Phi-3-mini-4k-instruct", ("phi4", "14b"): "microsoft/phi-4",
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
            draft.assume("torchtune's NF4 by torchao is counted as that of bitsandbytes with double quantisation")
    elif name:
        draft.unmatched.append(f"model._component_: {name}")
    draft.assume(
        "torchtune's default", dtype=lines.DTYPES.get(as_text(config.get("dtype", "bf16")).lower(), "bfloat16")
    )
    if as_flag(config.get("fsdp_cpu_offload")):
        draft.take("fsdp_cpu_offload: true", parallel="fsdp", offload=1)
        draft.assume("the config does not say how many GPUs there are", ranks=RANKS)


def _tune_targets(draft: Draft, config: Config, attention: object) -> None:
    """Read which layers torchtune adapts: its names are those of transformers but for the MLP and the output."""
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
            draft.assume("the config does not say how many GPUs there are", ranks=RANKS)
        if stage == 3 and as_text(config.get("zero_optimization.offload_param.device", "none")) == "cpu":
            draft.take("zero_optimization.offload_param.device: cpu", offload=1)


def _accelerate(draft: Draft, config: Config) -> None:
    kind = as_text(config.get("distributed_type", "NO")).upper()
    count = as_number(config.get("num_processes")) or 1
    half = {"bf16": "amp-bfloat16", "fp16": "amp-float16"}.get(as_text(config.get("mixed_precision", "no")).lower())
    if half:
        draft.take(f"mixed_precision: {config['mixed_precision']}", dtype=half)
    else:
        draft.assume("no half precision is switched on", dtype="float32")
    if kind == "FSDP" or as_flag(config.get("use_fsdp")):
        draft.take(f"distributed_type: {kind}", parallel="fsdp", ranks=max(count, 2))
        if as_flag(config.get("fsdp_config.fsdp_offload_params")):
            draft.take("fsdp_config.fsdp_offload_params: true", offload=1)
    elif kind == "DEEPSPEED":
        _stage(
            draft,
            f"deepspeed_config.zero_stage: {config.get('deepspeed_config.zero_stage')}",
            as_number(config.get("deepspeed_config.zero_stage")) or 2,
        )
        draft.take(f"num_processes: {count}", ranks=max(count, 2))
    elif kind == "MULTI_GPU" and count > 1:
        draft.take(f"distributed_type: {kind}, num_processes: {count}", parallel="ddp", ranks=count)


# ---------------------------------------------------------------------------------------------------------------- the formats

_HUGGING_FACE: dict[str, Reader] = {
    "per_device_train_batch_size": number("batch"),
    "gradient_accumulation_steps": number("accumulate"),
    "gradient_checkpointing": switch(checkpointing=1),
    "optim": lines.optimizer,
    "attn_implementation": lines.attention,
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
            *("dtype", "fsdp_cpu_offload"),
        ),
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
            *("distributed_type", "num_processes", "mixed_precision", "use_fsdp", "fsdp_config.fsdp_offload_params"),
            "deepspeed_config.zero_stage",
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
            *("disable_gradient_checkpointing", "quantization_method", *_PRECISION),
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
            "gradient_checkpointing": switch(checkpointing=1),
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
            *("adapter", "load_in_4bit", "load_in_8bit", "peft_use_dora", "peft_use_rslora", "lora_target_linear"),
            *("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", *_PRECISION, "float16", "bfloat16"),
        ),
    ),
    Format(
        key="trl",
        title="TRL",
        signs=(
            ("model_name_or_path", "use_peft"),
            ("model_name_or_path", "max_length"),
            ("model_name_or_path", "max_seq_length"),
            ("model_name_or_path", "per_device_train_batch_size"),
            ("model_name_or_path", "dataset_name"),
        ),
        lines=_HUGGING_FACE
        | {
            "model_name_or_path": lines.model,
            "max_length": number("seq"),
            "max_seq_length": number("seq"),
            "lora_dropout": lines.dropout,
            "lora_target_modules": lines.targets,
            "lora_modules_to_save": lines.saved_modules,
        },
        finish=_trl,
        joint=(
            *("use_peft", "use_dora", "lora_r", "lora_alpha", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
            *(
                "bnb_4bit_quant_type",
                "dtype",
                "torch_dtype",
                "model_init_kwargs.torch_dtype",
                "model_init_kwargs.dtype",
                *_PRECISION,
            ),
        ),
    ),
    Format(
        key="trainer",
        title="a Trainer's arguments",
        signs=(("per_device_train_batch_size",), ("optim", "gradient_accumulation_steps"), ("output_dir", "bf16")),
        lines=_HUGGING_FACE | {"deepspeed": nothing, "max_length": number("seq"), "max_seq_length": number("seq")},
        finish=_trainer,
        joint=("fsdp", *_PRECISION),
    ),
)
