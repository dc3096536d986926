"""Why a transformers model has no step that could be traced, or none that trains it, and what can be done instead."""

from __future__ import annotations

import inspect
import re

from transformers import PreTrainedConfig, PreTrainedModel

from sizer.architecture.heads import choose_head, has_no_forward, parts_of

WITHOUT_GRADIENTS = re.compile(r"@torch\.(inference_mode|no_grad)\(\)")  # above a forward
# What such a model holds in memory depends on pixels and weights that nobody has here.
OPEN_ENDED = {
    "Sam3VideoModel": (
        "Sam3VideoModel follows as many objects as it finds in a video, which only real images and weights tell; estimate "
        "model_type sam3 for the finding and sam3_tracker_video for the following, one object for each sample of the batch"
    )
}


# transformers lays out positions (`col_shape` in modeling_tvp.py) for the samples of a batch, but from one sample's embeddings.
ONE_AT_A_TIME = frozenset({"TvpModel", "TvpForVideoGrounding"})


def no_batch(cls: type[PreTrainedModel], batch: int) -> str | None:
    """Why the class takes no batch of this size; None where it does."""
    if batch == 1 or cls.__name__ not in ONE_AT_A_TIME:
        return None
    return f"{cls.__name__} fails on more than one sample in this version of transformers; batch=1 can be estimated"


def no_step(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> str | None:
    """Why no step of the class can be traced; None where it has a forward that can be given inputs."""
    if not has_no_forward(cls):
        return OPEN_ENDED.get(cls.__name__)
    heads = [choose_head(part, None)[0].__name__ for part in parts_of(config)]
    if heads:
        return f"{cls.__name__} has no forward of its own; estimate one of its parts: head={' or '.join(heads)}"
    called = " and ".join(name for name in ("encode", "decode") if hasattr(cls, name))
    return f"{cls.__name__} has no forward of its own: others call its {called or 'parts'}; estimate the model that contains it"


def no_training(cls: type[PreTrainedModel]) -> str | None:
    """Why the class cannot be trained: its forward computes no gradients; None where it computes them."""
    found = WITHOUT_GRADIENTS.search(inspect.getsource(cls.forward).partition("def forward")[0])
    if found is None:
        return None
    return f"{cls.__name__} runs under torch.{found[1]}, so that no step can train it; mode=inference can be estimated"
