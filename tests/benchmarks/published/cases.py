"""The functions that repeat published runs, by the names that the rows of `tests/measured/published/runs/` give them."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks.published import adapters, language, operators, vision
from tests.benchmarks.published.language import Setup

CASES: dict[str, Callable[..., Setup]] = {
    "attention_benchmark": language.attention_benchmark,
    "vit_finetuning": language.vit_finetuning,
    "trainer": language.trainer,
    "forward_pass": language.forward_pass,
    "lora_training": adapters.lora_training,
    "qlora_training": adapters.qlora_training,
    "vision_training": vision.vision_training,
    "cross_entropy": operators.cross_entropy,
    "linear_cross_entropy": operators.linear_cross_entropy,
    "gated_mlp": operators.gated_mlp,
    "norm": operators.norm,
    "group_norm": operators.group_norm,
    "add_rms_norm": operators.add_rms_norm,
    "rope": operators.rope,
    "divergence": operators.divergence,
    "linear_divergence": operators.linear_divergence,
}
# Packages beyond Sizer's own that a case imports.
NEEDS = {"lora_training": ("peft",), "qlora_training": ("peft", "bitsandbytes")}
