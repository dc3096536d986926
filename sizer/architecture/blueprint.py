"""Requirements on an architecture before it can be counted, traced or measured: a recipe, not a model.

A module without a loss of its own is trained with `stand_in_loss`.
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
    `args` and `kwargs` go to the module's forward; `targets` is whatever the blueprint's `loss` needs beside its output.
    """

    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    targets: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """Instructions for building a module and running one step of it.

    `build` is called under `torch.device("meta")` and returns a float32 module; it reads no weights and no network.
    `example(batch, training)` returns the inputs of one step, deterministic, with `batch` samples.
    `text_example(batch, training)` returns inputs of text alone, for a model that reads images or sound within its text; else None.
    `loss(module, example)` returns the scalar a user would train with; `predict(module, example)` runs inference.
    `checkpoint(module)` switches gradient checkpointing on; None where the architecture does not support it.
    `replace_layers(module, dtype)` puts layers that hold quantised weights in a module for a dtype of the contract, and
    `load_quantized(module, device)` loads them; None where weights are as `build` makes them, to be cast.
    `limit(module)` returns the module of which a part alone is trained (frozen, or with an adapter around it); None where all of it
    is. `describe(module)` says of that module what was made.
    `sequence_length` (tokens, frames) and `image_size` (height, width) are what the examples really use; None where the
    architecture has no such size.
    `positions` is the length of the table in which the decoder looks up where a token stands, up to which it generates; None where
    it has no such table.
    `one_by_one` is True if the model processes the samples of a batch one after the other.
    `notes` say what was chosen on the user's behalf; `uncounted` what an estimate made from this blueprint leaves out.
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
        """The module as its work needs it: built, quantised where it is to be, for a dtype of the contract, with gradient
        checkpointing where asked, then limited in what is trained.

        Raises BuildError where the architecture has no checkpointing, or cannot be limited so.
        """
        return self.finish(self.load(self.prepare(dtype)), checkpointing=checkpointing)

    def prepare(self, dtype: str) -> nn.Module:
        """The module before it is loaded, for a dtype of the contract where its weights will be quantised."""
        module = self.build()
        return module if self.replace_layers is None else self.replace_layers(module, dtype)

    def load(self, module: nn.Module, device: str = "meta") -> nn.Module:
        """The module with its weights quantised on a device, where they are to be; any other as it is."""
        return module if self.load_quantized is None else self.load_quantized(module, device)

    def finish(self, module: nn.Module, *, checkpointing: bool) -> nn.Module:
        """The module with gradient checkpointing where asked, then limited in what is trained. Raises BuildError as `make` does."""
        if checkpointing:
            self.switch_checkpointing_on(module)
        return module if self.limit is None else self.limit(module)

    def switch_checkpointing_on(self, module: nn.Module) -> None:
        """Switch gradient checkpointing on. Raises BuildError where the architecture does not support it."""
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
    """The sum of the means of every float tensor in the module's outputs that has a gradient, a scalar.

    Raises TraceError where there is none.
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
    """Why the outputs of a module that was run for training hold no tensor with a gradient."""
    name = type(module).__name__
    frozen = [not parameter.requires_grad for parameter in module.parameters()]
    if frozen and all(frozen):
        return f"all weights of {name} are frozen, so that no step can train it; mode=inference can be estimated"
    return f"the outputs of {name} hold no tensor with a gradient, so that nothing trains it; mode=inference can be estimated"
