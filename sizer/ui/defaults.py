"""Dtypes, batch sizes and task that the page chooses for a model on a device.

A link without `dtype` and `batch` keeps the query's defaults, five dtypes and eight batch sizes. The page chooses for the empty
address, and for fields that the reader has not changed. These fields follow the model, the device and the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from sizer.catalogue.adapters import ATTENTION
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.linear_attention import calls_package, is_installed
from sizer.catalogue.modes import MODES, Task
from sizer.catalogue.presets import PRESETS
from sizer.catalogue.sources import Source
from sizer.query.request import Request
from sizer.query.values import DTYPES

# Names of torchvision's detection models (torchvision.models.list_models(module=torchvision.models.detection), torchvision 0.29).
DETECTION = ("rcnn_", "retinanet_", "fcos_", "ssd300_", "ssdlite320_")

BFLOAT16_SINCE = (8, 0)  # compute capability of the first devices that multiply matrices in bfloat16
# Bytes for each parameter that AdamW trains, in a 16-bit dtype and under autocast: the parameter, its gradient and two moments.
TRAINED_BYTES = 8
TRAINED_BYTES_UNDER_AUTOCAST = 16
# Model types for which PEFT does not adapt all linear layers: those with Mamba layers (peft/tuners/tuners_utils.py, 0.21,
# _check_lora_target_modules_mamba), with layers that multiply groups of features, and with routers that are linear layers.
ATTENTION_ALONE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h", "deepseek_v4", "llama4")
# Model types whose forward pass runs under torch.inference_mode.
INFERENCE_ALONE = ("sam2_video",)
# Model types whose layers loop over patches of a series, or over chunks of a text. Their traces take long.
LOOPING = ("granitemoehybrid", "timesfm2_5")
# Session state: the page's choice for the last state of the form
TASK, SIZES, TARGETS, FLA = "default_task", "default_sizes", "default_targets", "default_fla"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One or two dtypes, and three or four batch sizes."""

    dtypes: tuple[str, ...]
    batches: tuple[int, ...]


def sizes_for(source: Source, name: str, gpu: Gpu, task: Task) -> Sizes:
    """Return the dtypes and batch sizes that suit a model, a device and a task.

    Args:
        source: The source of the architecture.
        name: The name of the model within its source.
        gpu: The device. Before compute capability 8.0 float16 replaces bfloat16.
        task: The task. Training of all parameters is also shown under autocast, unless the parameters alone do not fit, or a trace
            of the model takes long. *Known limitation*: size and model type are known for presets only.
    """
    trains = MODES[task.mode].trains
    half = "bfloat16" if gpu.capability is None or gpu.capability >= BFLOAT16_SINCE else "float16"
    if source.package == "transformers":
        preset = PRESETS.get(name) if source.entry == "presets" else None
        parts = _parts_of(preset.config) if preset is not None else []
        if trains and (parts or (preset is not None and preset.config["model_type"] in LOOPING)):  # a trace takes long
            # models of images or sound: the code of some, such as RT-DETR, fails if all weights are cast
            return Sizes(dtypes=(half if not parts or "text_config" in parts else f"amp-{half}",), batches=(1, 2, 4))
        trained = TRAINED_BYTES_UNDER_AUTOCAST * preset.expected_parameters if preset is not None else 0
        dtypes = (half, f"amp-{half}") if "all" in task.trains and trained <= gpu.total_bytes else (half,)
        return Sizes(dtypes=dtypes, batches=(1, 2, 4, 8) if trains else (1, 8, 32))
    if name and any(part in name for part in DETECTION):
        return Sizes(dtypes=("float32", f"amp-{half}"), batches=(1, 2, 4))
    return Sizes(dtypes=("float32", f"amp-{half}" if trains else half), batches=(1, 8, 32, 128))


def _parts_of(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of a config that describe parts of a model, such as a vision tower."""
    return [name for name in config if name.endswith("_config") and name != "quantization_config"]


def task_for(source: Source, name: str, gpu: Gpu) -> str:
    """Return the task that suits a model and a device.

    It is inference for models that cannot be trained, fine-tuning if training does not fit, else training.

    *Known limitation*: the size of a model is known for presets only.
    """
    preset = PRESETS.get(name) if source.entry == "presets" else None
    if preset is not None and preset.config["model_type"] in INFERENCE_ALONE:
        return "inference"
    if preset is None or TRAINED_BYTES * preset.expected_parameters <= gpu.total_bytes:
        return "training"
    return "fine-tuning"


def targets_for(source: Source, name: str) -> str:
    """Return the layers that the page adapts by default, as text of the form's field; empty for all linear layers."""
    preset = PRESETS.get(name) if source.entry == "presets" else None
    return ATTENTION if preset is not None and preset.config.get("model_type") in ATTENTION_ALONE else ""


def fla_for(source: Source, name: str, gpu: Gpu) -> bool:
    """Return True if the page runs linear attention by flash-linear-attention by default: where the package is installed."""
    preset = PRESETS.get(name) if source.entry == "presets" else None
    return preset is not None and gpu.backend == "cuda" and is_installed() and calls_package(preset.config["model_type"])


def with_default_sizes(request: Request, sizes: Sizes) -> Request:
    """Return the request with the page's dtypes and batch sizes, in the query's order."""
    return replace(request, dtypes=tuple(one for one in DTYPES if one in sizes.dtypes), batches=sizes.batches)


def forget() -> None:
    """Note that a link has filled the form. Its values stay until the reader chooses another model, device or task."""
    for key in (TASK, SIZES, TARGETS, FLA):
        st.session_state.pop(key, None)


def follow_task(source: Source, name: str, gpu: Gpu) -> None:
    """Adapt the form's task, adapted layers and kernels to the model and the device, if the page chose the current values.

    Call it before the widgets.
    """
    state = st.session_state
    for key, chosen, now in (
        ("mode", TASK, task_for(source, name, gpu)),
        ("targets", TARGETS, targets_for(source, name)),
        ("fla", FLA, fla_for(source, name, gpu)),
    ):
        before = state.get(chosen, now)
        if before != now and state[key] == before:
            state[key] = now
        state[chosen] = now


def follow_sizes(sizes: Sizes) -> None:
    """Set the form's dtypes and batch sizes, if the page chose the current values. Call it before the widgets."""
    state, before = st.session_state, st.session_state.get(SIZES, sizes)
    if before != sizes:
        if set(state["dtype"]) == {*before.dtypes}:
            state["dtype"] = list(sizes.dtypes)
        if state["batch"] == batch_text(before.batches):
            state["batch"] = batch_text(sizes.batches)
    state[SIZES] = sizes


def batch_text(batches: tuple[int, ...]) -> str:
    """Return batch sizes as text of the form's field."""
    return ", ".join(map(str, batches))


def chosen_by_page(request: Request) -> bool:
    """Return True if the page chose the dtypes and batch sizes of the question."""
    sizes = st.session_state.get(SIZES)
    return sizes is not None and (set(request.dtypes), request.batches) == ({*sizes.dtypes}, sizes.batches)
