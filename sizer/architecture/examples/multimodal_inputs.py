"""An image or audio inside a text: the tensors that carry it, and how many placeholder tokens it takes in the text."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from sizer.architecture.examples.example_spec import ExampleSpec, read
from sizer.base.errors import BuildError


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalInput:
    """Inputs that one sample's image or audio adds to a forward.

    `inputs` are keyword arguments for the whole batch. `token` is the id of the placeholder and `count` the number of
    placeholders in each text: one per feature of the encoder. `kind` names it in the notes. Without a token (cross-attention)
    the text has no placeholders. `marks` are the ids right before and after the placeholders, for models that search for them.
    """

    inputs: dict[str, Any]
    token: int | None
    count: int
    kind: str = "image"
    marks: tuple[int, int] | None = None


def placeholder_names(kind: str) -> tuple[str, ...]:
    """Return the config keys for the id of one feature of an "image", a "video" or an "audio" in the text."""
    return f"{kind}_token_id", f"{kind}_token_index", f"text_config.{kind}_token_id"


def placeholder(config: PreTrainedConfig, kind: str) -> int:
    """Return the placeholder id of one feature of an "image", a "video" or an "audio" in the text.

    Raises BuildError without one.
    """
    token = read(config, *placeholder_names(kind))
    if token is None:
        raise BuildError(f"the config names no {kind}_token_id", todo="use the config.json of a published checkpoint")
    return token


def count_features(spec: ExampleSpec, method: str, inputs: dict[str, Any]) -> int:
    """Return the number of features that the class's own `get_image_features` (or audio) yields for one sample on meta.

    `inputs` are those of a batch of one. Integer tensors stay real, because they only control the code. Raises BuildError if
    the encoder fails on them.
    """
    if spec.features is not None:
        return spec.features
    config = copy.deepcopy(spec.config)
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = spec.cls._from_config(config, dtype=torch.float32).eval()
            found = getattr(model, method, None) or getattr(model.model, method)
            output = found(**{name: _on_meta(value) for name, value in inputs.items()})
    except Exception as error:
        raise BuildError(
            f"the encoder of {spec.class_name} could not be run to count its features: {error}"
        ) from error
    return sum(tensor.shape[:-1].numel() for tensor in _features_in(output))


def counted_image_input(spec: ExampleSpec, inputs: dict[str, Any]) -> MultimodalInput:
    """Return an image input with the number of features that the encoder itself yields."""
    first = {name: value[: len(value) // spec.batch] for name, value in inputs.items()}
    return image_input(spec, inputs, count_features(spec, "get_image_features", first))


def image_input(spec: ExampleSpec, inputs: dict[str, Any], count: int) -> MultimodalInput:
    """Return an image of `count` features, which replace the config's image token."""
    return MultimodalInput(inputs=inputs, token=placeholder(spec.config, "image"), count=count)


def image_sizes(spec: ExampleSpec, height: int, width: int) -> Tensor:
    """Return the true size of every image, (batch, 2) as height and width."""
    return torch.tensor([[height, width]]).repeat(spec.batch, 1)


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


def _features_in(output: object) -> Iterator[Tensor]:
    """Yield the tensors of features: `pooler_output`, else `last_hidden_state` of a model's output, else the output itself."""
    if isinstance(output, ModelOutput):
        output = output.get("pooler_output", output.get("last_hidden_state"))
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _features_in(item)
