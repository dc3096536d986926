"""Training recipes of configs: objective, loss, offloading and compiled code, and their parts that no query can state.

Sources as in sizer.pasted.lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from sizer.base.errors import RequestError
from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.recipes import GRPO, LM, LOSSES, OBJECTIVES, RECIPE_KEYS
from sizer.pasted.plain_text import as_flag, as_number, as_text
from sizer.pasted.question import Draft
from sizer.query.text import parse_query

Config = Mapping[str, Any]  # dotted names of lines with their values
_OF_GRPO = ("reference", "group", "rollout", "new")  # keys of a question with objective=grpo
# The module and the package that the values of a key need; those of `loss` are in the catalogue.
_PACKAGES = {
    "activations": ("trl", "trl"),
    "liger": ("liger_kernel", "liger-kernel"),
    "optimizer_offload": ("torchao", "torchao"),
    "compile": ("triton", "triton"),
}


def take_objective(draft: Draft, given: str, name: str) -> bool:
    """Note the objective, by the trainer's name of it; return False if it is not supported."""
    objective = {"rloo": GRPO, "rm": "reward"}.get(name, name)
    if objective not in OBJECTIVES or objective == LM:
        return name in ("sft", "pt", LM)
    draft.take(given, objective=objective)
    return True


def take_groups(draft: Draft, config: Config, prefix: str = "") -> tuple[str, ...]:
    """Read the options of GRPO's trainer for completions, by TRL's names; return the lines that were read."""
    names = ("num_generations", "max_completion_length", "max_prompt_length", "beta", "use_vllm", "vllm_mode")
    lines = tuple(f"{prefix}{name}" for name in (*names, "vllm_gpu_memory_utilization"))
    group, new, prompt, beta, server, mode, share = (config.get(line) for line in lines)
    draft.take_or_assume(lines[0], as_number(group), "group", 8, "TRL's default")
    draft.take_or_assume(lines[1], as_number(new), "new", 512, "TRL's default")
    if prompt is not None:
        draft.take_or_assume(lines[2], as_number(prompt), "seq", 512, "TRL's default")
    if not _as_float(beta):
        draft.assume("TRL has no reference unless beta is set", reference="none")
    if as_flag(server):
        if as_text(mode or "colocate") == "server":
            draft.unmatched.append(f"{lines[5]}: server: the completions are made by the model that trains here")
        else:
            draft.take(f"{lines[4]}: true", rollout=f"colocated:{_as_float(share) or 0.3:g}")
    return lines


def take_compilation(draft: Draft, given: str) -> None:
    """Note that the step is compiled."""
    draft.take(given, compile="default")
    draft.assume("each block is compiled; a completely compiled model needs compile_scope=model")


def take_liger(draft: Draft, given: str, *, loss: bool) -> None:
    """Note that the layers are Liger's, and its `loss` if the trainer calls it."""
    draft.take(given, liger=1, **({"loss": "liger"} if loss else {}))


def _as_float(value: object) -> float:
    try:
        return float(as_text(value))
    except ValueError:
        return 0.0


def leave_out(draft: Draft, gpu: str | None) -> None:
    """Leave out unsupported parts of a question: missing packages, and parts that exclude each other or a device.

    The reasons join the lines that are not counted. A loss, an objective and offloading are dropped before the parallelism and
    the other keys, since without those the question would be another.
    """
    shards = PARALLELS[draft.items.get("parallel", "none")].shards
    if draft.items.get("autocast") == "1" and shards and draft.items.get("train") != "adapter":
        draft.drop("autocast")
        draft.drop("dtype")
        draft.assume(
            "Accelerate makes the weights that FSDP2 trains float32 (fsdp2_prepare_model, accelerate 1.15)", dtype="amp-bfloat16"
        )
    for key in ("compile", *RECIPE_KEYS):
        if key in draft.items and (package := _missing(key, draft.items[key])):
            _remove(draft, key, f"{package} is not installed here")
    while key_and_reason := _refused(({"gpu": gpu} if gpu else {}) | draft.items):
        _remove(draft, *key_and_reason)


def _missing(key: str, value: str) -> str | None:
    """Return the package that a value needs if it is not installed."""
    module, package = _PACKAGES.get(key, (None, None))
    if key == "loss" and value in LOSSES:
        module, package = LOSSES[value].module, LOSSES[value].package
    return package if module and find_spec(module) is None else None


def _refused(items: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a part of a recipe that a query refuses, and why; None if it takes all, or refuses something else alone."""
    try:
        parse_query("&".join(f"{key}={value}" for key, value in {"arch": "hf:gpt2", **items}.items()))
    except RequestError as error:
        for refusal in error.refusals:
            if refusal.key == "gpu":  # the form says so
                continue
            of_recipe = "compile" if "compile" in items and refusal.key in RECIPE_KEYS else refusal.key
            key = of_recipe if of_recipe in (*RECIPE_KEYS, "compile") else "objective" if "objective" in items else None
            if key is not None and key in items:
                return key, f"given {refusal.given}, allowed {refusal.allowed}"
    return None


def _remove(draft: Draft, key: str, why: str) -> None:
    removed = (key, *(_OF_GRPO if key == "objective" else ()))
    draft.unmatched.append(f"{key}={draft.items[key]}: {why}")
    draft.drop(*removed)
