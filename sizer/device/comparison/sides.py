"""Both sides of a comparison: the estimate, the device's figures, the pairing of blocks, and the family of the network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from sizer.catalogue.gpus import Backend, Gpu
from sizer.catalogue.presets import find_preset
from sizer.catalogue.sources import SOURCES
from sizer.device.comparison.alignment import Alignment, Side
from sizer.device.record.measurement import Measurement
from sizer.query.request import Request
from sizer.report.estimate import Estimate
from sizer.tape.tape import Tape

Family = Literal["CNN", "transformer", "other"]

# Prefixes of names of networks with attention, in torchvision and in timm.
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
    """Return the family of a request's network, as the accuracy tables group them.

    It is derived from the package's name of the model or the config's `model_type`. Detection models and state-space models are
    "other".
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
    """Return the config's model_type; the repository's name if the config is not available."""
    if request.is_fetched:
        return request.name.rpartition("/")[2].lower()
    config = json.loads(request.config) if request.config is not None else find_preset(request.name).config
    return str(config.get("model_type", ""))


# ---------------------------------------------------------------------------------------------------------------- sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Inputs of every part of a comparison. The recording and the alignment are None if the device was not recorded."""

    estimate: Estimate
    tape: Tape
    gpu: Gpu
    measured: Measurement
    recording: Tape | None
    alignment: Alignment | None
    family: Family

    @property
    def kind(self) -> Backend:
        """Device type, which selects the allocator rules of both sides."""
        return self.gpu.backend

    @property
    def is_complete(self) -> bool:
        """Return True if the device completed the work."""
        return self.measured.out_of_memory is None and self.measured.failure is None

    @property
    def tapes(self) -> tuple[tuple[Side, Tape], ...]:
        """Return the tapes of both sides, the device's only if there is one."""
        if self.recording is None:
            return (("estimate", self.tape),)
        return ("estimate", self.tape), ("device", self.recording)


def bounds_of(tape: Tape, phase: str | None) -> tuple[int, int] | None:
    """Return (events done when a phase begins, when it ends), None if the tape has no such phase.

    Without a phase, return those of the whole tape up to its last mark.
    """
    if phase is None:
        return 0, tape.marks[-1][0] if tape.marks else len(tape.order)
    begins = [0, *(end for end, _ in tape.marks)]
    return next(((begin, end) for begin, (end, name) in zip(begins, tape.marks, strict=False) if name == phase), None)
