"""Meaning of the lines of training configs, line by line: shared by the formats that use the names of transformers.

Sources: transformers/training_args.py (5.24), trl/trainer/sft_config.py and model_config.py (1.0), axolotl/utils/schemas (0.13),
llamafactory/hparams (0.9.4), torchtune/recipes (0.6), deepspeed/runtime/config.py (0.18), accelerate/utils/dataclasses.py (1.12).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sizer.catalogue.optimizers import items_of_optimizer
from sizer.catalogue.pipelines import pipeline_preset_of
from sizer.catalogue.sources import REPO_ID, arch_of
from sizer.pasted.plain_text import as_flag, as_number, as_text
from sizer.pasted.question import Draft

Reader = Callable[[Draft, str, object], bool]
"""Takes a draft, the name of a line and its value; returns False if the line has no counterpart."""

RANKS = 8  # of a config that shards over all GPUs and does not say how many there are
DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "torch.bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
    "torch.float16": "float16", "half": "float16", "fp32": "float32", "float32": "float32", "torch.float32": "float32",
}  # fmt: skip

# Lines that change no memory of a step. A name that begins so is one of them.
_WORDS = """
    learning_rate lr warmup logging log_ save eval output_dir dataset data_ seed num_train_epochs num_epochs epochs max_steps
    max_train_steps weight_decay report_to run_name wandb push_to_hub hub_ val_ template chat_template prompt_template overwrite
    preprocessing dataloader do_ ddp_timeout ddp_find plot_loss load_best metric greater_is_better group_by_length remove_unused
    shuffle special_tokens tokenizer adam_ max_grad_norm max_samples resume strict train_on_inputs wall_clock steps_per_print
    gradient_clipping scheduler checkpointer profiler loss device log compute_environment debug downcast_bf16 machine_rank main_
    num_machines rdzv same_network tpu use_cpu enable_cpu_affinity early_stopping trust_remote_code model_type is_ hf_use_auth
    mlflow comet loraplus optim_args disable_tqdm stage max_new_tokens local_rank label_smoothing torch_compile_mode gc_
    prediction_loss_only
"""
IRRELEVANT = tuple(_WORDS.split())


def is_irrelevant(name: str) -> bool:
    """Return True for a line that changes no memory of a step."""
    return name.startswith(IRRELEVANT)


def model(draft: Draft, name: str, value: object) -> bool:
    """Read the model: a preset if a repository has one, else the repository."""
    text = as_text(value).strip()
    if (arch := arch_of(text)) is None:
        return False  # a folder
    draft.take(f"{name}: {text}", arch=arch)
    return True


def pipeline(draft: Draft, name: str, value: str) -> bool:
    """Read the repository of a diffusion pipeline: its preset, else the repository."""
    known = pipeline_preset_of(value)
    if known is None and REPO_ID.fullmatch(value) is None:
        return False  # a folder
    draft.take(f"{name}: {value}", arch=f"diffusers:{known or value}")
    return True


def number(key: str, *, least: int = 1) -> Reader:
    """Return the reader of a whole number."""

    def read(draft: Draft, name: str, value: object) -> bool:
        found = as_number(value)
        if found is None or found < least:
            return False
        draft.take(f"{name}: {found}", **{key: found})
        return True

    return read


def switch(**items: str | int) -> Reader:
    """Return the reader of a switch; a switch that is off changes nothing."""

    def read(draft: Draft, name: str, value: object) -> bool:
        on = as_flag(value)
        if on:
            draft.take(f"{name}: true", **items)
        return on is not None

    return read


def optimizer(draft: Draft, name: str, value: object) -> bool:
    """Read the name of an optimizer."""
    if (items := items_of_optimizer(as_text(value).strip())) is None:
        return False
    draft.take(f"{name}: {as_text(value)}", **items)
    return True


def dtype(draft: Draft, name: str, value: object) -> bool:
    """Read the dtype of the weights."""
    if (found := DTYPES.get(as_text(value).strip().lower())) is None:
        return False
    draft.take(f"{name}: {as_text(value)}", dtype=found)
    return True


def targets(draft: Draft, name: str, value: object) -> bool:
    """Read the layers that an adapter adapts."""
    names = value if isinstance(value, list) else as_text(value).split(",")
    texts = [as_text(one).strip() for one in names]
    if not texts or not all(re.fullmatch(r"[\w.-]+", one) for one in texts):
        return False
    words = "all-linear" if texts in (["all"], ["all-linear"]) else ",".join(texts)
    draft.take(f"{name}: {', '.join(texts)}", targets=words)
    return True


def saved_modules(draft: Draft, name: str, value: object) -> bool:
    """Read the modules that train as complete copies next to an adapter."""
    names = value if isinstance(value, list) else as_text(value).split(",")
    texts = [as_text(one).strip() for one in names]
    if not texts or not all(re.fullmatch(r"[\w.-]+", one) for one in texts):
        return False
    draft.take(f"{name}: {', '.join(texts)}", modules_to_save=",".join(texts))
    return True


def dropout(draft: Draft, name: str, value: object) -> bool:
    """Read the dropout of an adapter's input."""
    try:
        found = float(as_text(value))
    except ValueError:
        return False
    if not 0 <= found < 1:
        return False
    draft.take(f"{name}: {found:g}", adapter_dropout=f"{found:g}")
    return True


def compute(draft: Draft, name: str, value: object) -> bool:
    """Read the dtype of products with quantized weights."""
    found = DTYPES.get(as_text(value).strip().lower())
    if found is None or draft.items.get("weights", "").partition("-")[0] not in ("nf4", "fp4"):
        return False
    if found != draft.items.get("dtype"):
        draft.take(f"{name}: {as_text(value)}", compute=found)
    return True


def attention(draft: Draft, name: str, value: object) -> bool:
    """Read the implementation of attention: FlashAttention 2 allocates as SDPA's flash kernel does."""
    text = as_text(value).lower()
    if text == "eager":
        draft.take(f"{name}: eager", attention="eager")
        return True
    if text in ("sdpa", "fa2", "auto") or "flash" in text:  # also kernels-community/flash-attn2, as TRL names it
        draft.take(f"{name}: {text}", attention="sdpa")
        return True
    return False


_OTHER_HEAD = re.compile(r"\w{1,64}For(?:(?:Sequence|Token)Classification|QuestionAnswering|MultipleChoice)")


def head(draft: Draft, name: str, value: object) -> bool:
    """Read the class of a model that has another head than the usual one of its type, such as one that classifies."""
    text = as_text(value)
    if text == "AutoModel" or _OTHER_HEAD.fullmatch(text):
        draft.take(f"{name}: {text}", head=text)
    return True


def nothing(draft: Draft, name: str, value: object) -> bool:
    """Read a line that changes no memory."""
    draft.irrelevant += 1
    return True
