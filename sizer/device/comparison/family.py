"""The kinds of networks, as the accuracy tables group them."""

from __future__ import annotations

import json
from typing import Literal

from sizer.request import Request

Family = Literal["CNN", "transformer", "other"]

_ATTENDING = ("vit", "swin", "maxvit", "mvit")  # how torchvision's names with attention begin
_DETECTING = ("fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd", "raft")
_CONVOLUTIONAL_TYPES = ("convnext", "resnet", "regnet", "mobilenet", "efficientnet", "cvt", "levit", "timm")
_OTHER_TYPES = ("mamba", "rwkv", "xlstm", "jamba", "detr")


def family_of(request: Request) -> Family:
    """The kind of network a request asks for, as the accuracy tables group them.

    By torchvision's name or the config's `model_type`; what counts boxes or scans a state is "other".
    """
    if request.source == "torchvision":
        name = request.name
        if name.startswith(_DETECTING):
            return "other"
        return "transformer" if name.startswith(_ATTENDING) else "CNN"
    kind = _model_type(request)
    if any(word in kind for word in _OTHER_TYPES):
        return "other"
    return "CNN" if kind.startswith(_CONVOLUTIONAL_TYPES) else "transformer"


def _model_type(request: Request) -> str:
    """The config's model_type; the repository's name where the config is not at hand."""
    from sizer.catalogue.presets import find_preset

    if request.source == "hub":
        return request.name.rpartition("/")[2].lower()
    config = find_preset(request.name).config if request.source == "hf" else json.loads(request.config or "{}")
    return str(config.get("model_type", ""))
