"""Every torchvision model traces a training step on meta, and its tape keeps every promise."""

from __future__ import annotations

import re

import pytest
import torchvision

from sizer.allocator.allocator import replay
from sizer.architecture.torchvision_models import vision_blueprint
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace

# resnet for resnet18, resnet50, …: of every other family one in every run
FAMILIES: dict[str, list[str]] = {}
for _name in torchvision.models.list_models():
    FAMILIES.setdefault(re.split(r"[\d_]", _name)[0], []).append(_name)
NAMES = [
    pytest.param(name, marks=pytest.mark.exhaustive if number % 2 or name != names[0] else ())
    for number, names in enumerate(FAMILIES.values())
    for name in names
]


@pytest.mark.parametrize("name", NAMES)
def test_training_step(name: str) -> None:
    blueprint = vision_blueprint(name, image_size=None, checkpointing=False)
    module = build(blueprint)
    weights = sum(p.numel() * p.itemsize for p in module.parameters())
    tape = trace(blueprint, module, Work(mode="training", dtype="float32"), batch=2, device=Device("cuda", (8, 0)))
    timeline = replay(tape.validate(), backend="cuda")

    live = dict.fromkeys(range(8), 0)
    for event in tape.order:
        block = event if event >= 0 else ~event
        live[tape.categories[block]] += tape.sizes[block] if event >= 0 else -tape.sizes[block]
        assert live[tape.categories[block]] >= 0
    # weights, gradients and AdamW's two moments are all alive in the optimizer's step
    assert timeline.peak_allocated_bytes >= 4 * weights
    assert [use.phase for use in timeline.phases] == ["load", "forward", "backward", "optimizer", "step2"]
    assert sum(timeline.at_peak.values()) == timeline.peak_allocated_bytes
