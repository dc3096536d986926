"""Contents of a module before it runs: plain rows, filled by sizer/architecture/module_census.py."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeRow:
    """Numbers of parameters and buffers (elements) of one dtype, and their bytes."""

    dtype: str
    parameters: int
    buffers: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor worth naming (not registered with its module, or not on meta), its bytes, and why it is listed."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One submodule's own elements and bytes, without its children's. The root's path is the empty text."""

    path: str
    class_name: str
    parameters: int
    trainable_parameters: int
    buffers: int
    parameter_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Elements and bytes of a module as it was built; a tensor that several names share is counted once.

    `parameters`, `trainable_parameters` and `buffers` are elements; `*_bytes` are at the dtype the module has now. `class_name` is
    that of the model inside where PEFT wraps it.
    `tied_parameters` groups the names that share one parameter.
    """

    name: str
    class_name: str = field(metadata={"json": "class"})
    parameters: int
    trainable_parameters: int
    buffers: int
    parameter_bytes: int
    buffer_bytes: int
    by_dtype: tuple[DtypeRow, ...] = ()
    tied_parameters: tuple[tuple[str, ...], ...] = ()
    unregistered_tensors: tuple[TensorRow, ...] = ()
    real_tensors: tuple[TensorRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureCounts:
    """Facts about an architecture before its steps are traced.

    `frames` are those of a pipeline's video. `smallest` is the smallest batch size that the architecture accepts, `refusal` the
    reason if that is not 1. `vocabulary` is the number of logits of a token, if the step is a training step and its loss can be
    computed without all logits (sizer.recipes.losses). With `changes_logits` the model scales or caps its logits, which only
    TRL's loss supports among these. With `has_liger` the step can have Liger's layers (sizer.recipes.liger), with
    `has_linear_attention` flash-linear-attention's kernels (sizer.recipes.linear_attention). The other fields are the Blueprint's.
    """

    census: Census
    sequence_length: int | None
    image_size: tuple[int, int] | None
    notes: tuple[str, ...]
    uncounted: tuple[str, ...]
    frames: int | None = None
    smallest: int = 1
    refusal: str = ""
    vocabulary: int | None = None
    changes_logits: bool = False
    has_liger: bool = False
    has_linear_attention: bool = False
