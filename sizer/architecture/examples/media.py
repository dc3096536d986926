"""A picture or a sound inside a text: the tensors that carry it, and how many placeholder tokens it takes in the text."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from sizer.architecture.examples.setting import Setting, read
from sizer.errors import BuildError


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What one sample's picture or sound adds to the inputs of a forward.

    `inputs` are keyword arguments for the whole batch; `token` is the id of the placeholder and `count` how many of them each
    text needs: as many as the encoder yields features. `kind` names it in the notes. Without a token (cross-attention) the text
    has no placeholders. `marks` are the ids right before and after the placeholders, where the model looks for them.
    """

    inputs: dict[str, object]
    token: int | None
    count: int
    kind: str = "picture"
    marks: tuple[int, int] | None = None


def placeholder_names(kind: str) -> tuple[str, ...]:
    """Where configs name the id that stands for one feature of an "image", a "video" or an "audio" in the text."""
    return f"{kind}_token_id", f"{kind}_token_index", f"text_config.{kind}_token_id"


def placeholder(config: PreTrainedConfig, kind: str) -> int:
    """The id that stands for one feature of an "image", a "video" or an "audio" in the text. Raises BuildError without one."""
    token = read(config, *placeholder_names(kind))
    if token is None:
        raise BuildError(f"the config names no {kind}_token_id", todo="use the config.json of a published checkpoint")
    return token


def count_features(setting: Setting, method: str, inputs: dict[str, object]) -> int:
    """How many features the class's own `get_image_features` (or audio) yields for one sample, found by running it on meta.

    `inputs` are those of a batch of one. Integer tensors stay real: they only steer the code. Raises BuildError where the
    encoder cannot run so.
    """
    if setting.features is not None:
        return setting.features
    config = copy.deepcopy(setting.config)
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = setting.cls._from_config(config, dtype=torch.float32).eval()
            found = getattr(model, method, None) or getattr(model.model, method)
            output = found(**{name: _on_meta(value) for name, value in inputs.items()})
    except Exception as error:
        raise BuildError(
            f"the encoder of {setting.class_name} could not be asked how many features it yields: {error}"
        ) from error
    return sum(tensor.shape[:-1].numel() for tensor in _features_in(output))


def asked_picture(setting: Setting, inputs: dict[str, object]) -> Medium:
    """A medium whose encoder says itself how many features it yields."""
    first = {name: value[: len(value) // setting.batch] for name, value in inputs.items()}
    return picture_medium(setting, inputs, count_features(setting, "get_image_features", first))


def picture_medium(setting: Setting, inputs: dict[str, object], count: int) -> Medium:
    """A picture of so many features, in the place of the config's token for one."""
    return Medium(inputs=inputs, token=placeholder(setting.config, "image"), count=count)


def sizes_of_pictures(setting: Setting, height: int, width: int) -> Tensor:
    """The true size of every picture, (batch, 2) as height and width."""
    return torch.tensor([[height, width]]).repeat(setting.batch, 1)


def _on_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


def _features_in(output: object) -> Iterator[Tensor]:
    """The tensors of features: `pooler_output`, else `last_hidden_state` of a model's output, else the output itself."""
    if isinstance(output, ModelOutput):
        output = output.get("pooler_output", output.get("last_hidden_state"))
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _features_in(item)
