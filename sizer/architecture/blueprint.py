"""A recipe for a model: everything that is needed to count, trace or measure an architecture.

A module without its own loss is trained with `stand_in_loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sizer.base.errors import BuildError, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The inputs of one step: real tensors on the CPU, nested in lists, tuples and dicts as the model expects them.

    Integer tensors hold sensible values (token ids inside the vocabulary, boxes inside the image), because control flow may
    read them; of floating-point tensors only shape and dtype (float32) matter.

    `args` and `kwargs` go to the module's forward; `targets` are further inputs of the blueprint's `loss`.
    """

    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    targets: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Instructions for building a module and running one step of it.

    - `build` is called under `torch.device("meta")` and returns a float32 module; it reads no weights and no network.
    - `example(batch, training)` returns the inputs of one step, deterministic, with `batch` samples.
    - `text_example(batch, training)` returns text-only inputs, for a model that reads images or sound within its text; else
      None.
    - `loss(module, example)` returns the scalar a user would train with; `predict(module, example)` runs inference.
    - `checkpoint(module)` switches gradient checkpointing on; None if the architecture does not support it.
    - `replace_layers(module, dtype)` puts layers for quantized weights in a module for a dtype of the contract, and
      `load_quantized(module, device)` loads them; None if weights are cast from those of `build`.
    - `limit(module)` returns the module with only a part trainable (frozen, or with an adapter around it); None if all of it is
      trained. `describe(module)` returns notes on the made module.
    - `sequence_length` (tokens, frames) and `image_size` (height, width) are the sizes of the examples; None if the
      architecture has no such size.
    - `positions` is the length of the decoder's table of position embeddings, which limits generation; None without such a
      table.
    - `one_by_one` is True if the model processes the samples of a batch one after the other.
    - `notes` are choices made on the user's behalf; `uncounted` is memory that an estimate from this blueprint leaves out.
    """

    name: str
    class_name: str
    build: Callable[[], nn.Module]
    example: Callable[[int, bool], Example]
    loss: Callable[[nn.Module, Example], Tensor]
    predict: Callable[[nn.Module, Example], object]
    text_example: Callable[[int, bool], Example] | None = None
    checkpoint: Callable[[nn.Module], None] | None = None
    replace_layers: Callable[[nn.Module, str], nn.Module] | None = None
    load_quantized: Callable[[nn.Module, str], nn.Module] | None = None
    limit: Callable[[nn.Module], nn.Module] | None = None
    describe: Callable[[nn.Module], tuple[str, ...]] = lambda module: ()
    sequence_length: int | None = None
    image_size: tuple[int, int] | None = None
    positions: int | None = None
    one_by_one: bool = False
    notes: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    def make(self, *, checkpointing: bool = False, dtype: str = "float32") -> nn.Module:
        """Return the module for its work: built, quantized if needed, for a dtype of the contract, and limited in training.

        Gradient checkpointing is on if requested. Raises BuildError if the architecture has no checkpointing, or cannot be
        limited like that.
        """
        return self.finish(self.load(self.prepare(dtype)), checkpointing=checkpointing)

    def prepare(self, dtype: str) -> nn.Module:
        """Return the module before it is loaded, for a dtype of the contract if its weights will be quantized."""
        module = self.build()
        return module if self.replace_layers is None else self.replace_layers(module, dtype)

    def load(self, module: nn.Module, device: str = "meta") -> nn.Module:
        """Return the module with its weights quantized on a device, if they are to be; any other module unchanged."""
        return module if self.load_quantized is None else self.load_quantized(module, device)

    def finish(self, module: nn.Module, *, checkpointing: bool) -> nn.Module:
        """Return the module with gradient checkpointing if requested, and limited in training.

        Raises BuildError as `make` does.
        """
        if checkpointing:
            self.switch_checkpointing_on(module)
        return module if self.limit is None else self.limit(module)

    def switch_checkpointing_on(self, module: nn.Module) -> None:
        """Switch gradient checkpointing on. Raises BuildError if the architecture does not support it."""
        if self.checkpoint is None:
            raise BuildError(
                f"{self.class_name} has no gradient checkpointing",
                given="checkpointing=1",
                allowed="0",
                todo="leave it out",
            )
        self.checkpoint(module)


# ------------------------------------------------------------------------------------------------------- stand in loss


def stand_in_loss(outputs: object, module: nn.Module) -> Tensor:
    """Return the sum of the means of every float tensor with a gradient in the module's outputs, a scalar.

    Raises TraceError if there is none.
    """
    means = [tensor.float().mean() for tensor in _tensors(outputs) if tensor.requires_grad]
    if not means:
        raise TraceError(no_gradient(module))
    return torch.stack(means).sum()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def no_gradient(module: nn.Module) -> str:
    """Return why no tensor in the outputs of a training run of a module has a gradient."""
    name = type(module).__name__
    frozen = [not parameter.requires_grad for parameter in module.parameters()]
    if frozen and all(frozen):
        return f"all weights of {name} are frozen, so it cannot be trained; mode=inference can be estimated"
    return f"the outputs of {name} have no tensor with a gradient, so it cannot be trained; mode=inference can be estimated"
