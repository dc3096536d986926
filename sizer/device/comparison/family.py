"""The kinds of networks, as the accuracy tables group them."""

from __future__ import annotations

import json
from typing import Literal

from sizer.catalogue.presets import find_preset
from sizer.catalogue.sources import SOURCES
from sizer.query.request import Request

Family = Literal["CNN", "transformer", "other"]

# How the names of networks with attention begin, in torchvision and in timm.
_ATTENDING = (
    *("vit", "swin", "maxvit", "mvit"),
    *("aimv2", "beit", "cait", "coat_", "convit", "crossvit", "davit", "deit", "efficientformer", "eva", "fastvit_ma"),
    *("flexivit", "focalnet", "gcvit", "hiera", "levit", "maxxvit", "naflexvit", "nest", "nextvit"),
    *("pit_", "pvt", "samvit", "sequencer", "shvit", "tiny_vit", "tnt", "twins", "visformer", "volo", "xcit"),
)
_DETECTING = ("fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd", "raft")
_CONVOLUTIONAL_TYPES = ("convnext", "resnet", "regnet", "mobilenet", "efficientnet", "cvt", "levit", "timm")
_OTHER_TYPES = ("mamba", "rwkv", "xlstm", "jamba", "detr")


def family_of(request: Request) -> Family:
    """The kind of network a request asks for, as the accuracy tables group them.

    By the name that its package gave it or the config's `model_type`; what counts boxes or scans a state is "other".
    """
    if SOURCES[request.source].entry == "names":
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
    if request.is_fetched:
        return request.name.rpartition("/")[2].lower()
    config = json.loads(request.config) if request.config is not None else find_preset(request.name).config
    return str(config.get("model_type", ""))
