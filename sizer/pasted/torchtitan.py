"""torchtitan's job config, a TOML file of the versions up to 0.2: torchtitan/config/job_config.py (0.2.2)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from sizer.pasted import lines, recipes
from sizer.pasted.plain_text import as_flag, as_number, as_text
from sizer.pasted.question import Draft

_REPOSITORIES = {"llama3": "meta-llama/Llama-3.1-{}", "qwen3": "Qwen/Qwen3-{}"}
_SIZE = re.compile(r"[0-9]{1,3}(?:\.[0-9])?B")
# Sections and lines that change no memory of a step
_ALIKE = (
    *("job.", "profiling.", "metrics.", "lr_scheduler.", "checkpoint.", "validation.", "comm.", "fault_tolerance."),
    *("memory_estimation.", "debug.", "model.name", "model.tokenizer_path", "model.print_after_conversion", "model.converters"),
    *("optimizer.lr", "optimizer.eps", "optimizer.beta", "optimizer.weight_decay", "optimizer.early_step_in_backward"),
    *("training.max_norm", "training.steps", "training.dataset", "training.gc_", "training.mixed_precision", "training.dtype"),
    *("training.data_parallel", "training.seed", "training.deterministic", "compile.", "activation_checkpoint."),
    *("parallelism.", "quantize."),
)


def read_job(draft: Draft, config: Mapping[str, Any]) -> Collection[str]:
    """Read the lines of a job that have a joint meaning, and return all lines that were read."""
    _take_model(draft, config)
    halves = as_text(config.get("training.dtype", "float32"))
    mixed = as_text(config.get("training.mixed_precision_param", "bfloat16"))
    if halves == "bfloat16":
        draft.take("training.dtype: bfloat16", dtype="bfloat16")
    else:
        why = "torchtitan keeps float32 weights, and FSDP2 casts them"
        draft.assume(why, dtype="amp-bfloat16" if mixed == "bfloat16" else "float32")
    draft.assume("torchtitan's default", batch=8, optimizer="adamw", optimizer_impl="fused")
    _take_degrees(draft, config)
    mode = as_text(config.get("activation_checkpoint.mode", "selective"))
    if mode == "full":
        draft.take("activation_checkpoint.mode: full", checkpointing=1)
    elif mode == "selective":
        between = "it takes less than no checkpointing, as counted here, and more than checkpointing=1"
        draft.unmatched.append(f"activation_checkpoint.mode: selective: {between}")
    if as_flag(config.get("compile.enable")) and "sp" in draft.items:
        draft.unmatched.append("compile.enable: with sequence parallel the step is counted as eager")
    elif as_flag(config.get("compile.enable")):
        recipes.take_compilation(draft, "compile.enable: true")
    if "float8" in as_text(config.get("model.converters", "")):
        draft.unmatched.append("model.converters: products in float8 are counted in 16 bits")
    if as_flag(config.get("optimizer.early_step_in_backward")):
        draft.take("optimizer.early_step_in_backward: true", step="in_backward")
    draft.assume("`sizer run -- torchrun -m torchtitan.train ...` runs the job itself")
    return [name for name in config if name.startswith(_ALIKE)]


def _take_model(draft: Draft, config: Mapping[str, Any]) -> None:
    name, flavor = (as_text(config.get(f"model.{line}", "")) for line in ("name", "flavor"))
    assets = as_text(config.get("model.hf_assets_path", ""))
    if assets and lines.model(draft, "model.hf_assets_path", assets):
        return
    known = _REPOSITORIES.get(name) if _SIZE.fullmatch(flavor) else None  # debug models are in no repository
    if known is None or not lines.model(draft, f"model.name: {name}, flavor", known.format(flavor)):
        draft.unmatched.append(f"model.name: {name}, flavor: {flavor}")


def _take_degrees(draft: Draft, config: Mapping[str, Any]) -> None:
    def degree(name: str) -> int:
        found = config.get(f"parallelism.{name}_degree", config.get(f"training.{name}_degree"))
        return as_number(found) or 1

    shards, copies = (degree(f"data_parallel_{name}") for name in ("shard", "replicate"))
    sizes = {key: degree(f"{name}_parallel") for key, name in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"))}
    split = {key: size for key, size in sizes.items() if size > 1}
    if "tp" in split:  # torchtitan/models/llama3/infra/parallelize.py: sequence parallel, and the loss unless it is switched off
        split |= {"sp": 1, "lp": int(not as_flag(config.get("parallelism.disable_loss_parallel")))}
    everything = config.get("parallelism.data_parallel_shard_degree", config.get("training.data_parallel_shard_degree", -1)) == -1
    ranks = lines.RANKS if everything else shards
    if everything:
        draft.assume("the launcher says how many GPUs there are", ranks=ranks)
    given = "parallelism"
    if everything or shards > 1:
        ways: dict[str, str | int] = {"parallel": "hsdp", "replicate": copies} if copies > 1 else {"parallel": "fsdp"}
        draft.take(given, **ways, ranks=ranks, **split)
        if as_text(config.get("parallelism.fsdp_reshard_after_forward", "default")) == "never":
            draft.take("parallelism.fsdp_reshard_after_forward: never", reshard=0)
        if as_flag(config.get("training.enable_cpu_offload")):
            draft.take("training.enable_cpu_offload: true", offload=1)
    elif copies > 1:
        draft.take(given, parallel="ddp", ranks=copies, **split)
    elif split:
        draft.take(given, **split)
    if degree("expert_parallel") > 1:
        draft.unmatched.append("parallelism.expert_parallel_degree: each rank is counted with all experts of its shard")
