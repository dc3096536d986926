"""timm's models: counts that others know, sizes, classes, checkpointing, and what is refused."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from sizer.architecture import make_blueprint
from sizer.base.errors import RequestError
from sizer.query.text import format_query, parse_query

pytestmark = pytest.mark.skipif(not find_spec("timm") and not os.environ.get("CI"), reason="timm is not installed")


def blueprint(query: str):
    return make_blueprint(parse_query(f"arch=timm:{query}"))


def count(query: str) -> int:
    from sizer.architecture.module_census import take_census
    from sizer.tracing.trace import build

    plan = blueprint(query)
    return take_census(build(plan), name=plan.name).parameters


# ResNets and DenseNet as torchvision counts them; ViT-B/16 as in arXiv:2010.11929 with 1000 classes: 86,567,656. With the
# 21,843 classes of ImageNet-21k 20,843 * (768 + 1) more.
@pytest.mark.parametrize(
    ("query", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet50.a1_in1k", 25_557_032),
        ("densenet121", 7_978_856),
        ("vit_base_patch16_224", 86_567_656),
        ("vit_base_patch16_224.augreg_in21k", 86_567_656 + 20_843 * 769),
    ],
)
def test_parameters_are_those_that_others_count(query: str, parameters: int):
    assert count(query) == parameters


def test_inputs_are_those_of_its_own_config():
    plan = blueprint("test_resnet")
    assert (plan.image_size, plan.class_name) == ((160, 160), "ResNet")
    example = plan.example(3, True)
    assert (example.args[0].shape, example.targets.tolist()) == ((3, 3, 160, 160), [0, 1, 2])
    assert plan.example(3, False).targets is None


def test_a_model_of_a_fixed_size_is_built_for_another():
    # Positions of (240 / 16)^2 + 1 instead of (224 / 16)^2 + 1 tokens, 192 numbers each.
    assert count("vit_tiny_patch16_224&image=240") - count("vit_tiny_patch16_224") == (15**2 - 14**2) * 192


@pytest.mark.parametrize(("name", "size"), [("xcit_nano_12_p8_224", "230"), ("inception_v3", "32")])
def test_a_size_that_the_model_does_not_take_is_refused(name: str, size: str):
    refused = f"image for {name}: given {size}x{size}, allowed a size that this model takes"
    with pytest.raises(RequestError, match=refused):
        blueprint(f"{name}&image={size}")


def test_batch_norm_over_a_single_value_refuses_a_batch_of_one():
    plan = blueprint("resnet18&image=32")
    with pytest.raises(RequestError, match="batch for training resnet18 at 32x32 pixels: given 1, allowed at least 2"):
        plan.example(1, True)
    assert plan.example(1, False) and plan.example(2, True)
    assert blueprint("resnet18&image=33").example(1, True)


def test_a_model_without_classifier_has_a_stand_in_for_its_loss():
    (note,) = blueprint("eva02_tiny_patch14_224").notes
    assert note.startswith("eva02_tiny_patch14_224 has no classifier")


def test_checkpointing_is_timms_own_switch():
    module = blueprint("test_vit").build()
    blueprint("test_vit").switch_checkpointing_on(module)
    assert module.grad_checkpointing
    assert blueprint("darknet21").checkpoint is None
    with pytest.raises(RequestError, match="checkpointing for darknet21: given 1, allowed 0"):
        blueprint("darknet21&checkpointing=1")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("resnet5o", "arch: unknown timm model: given 'resnet5o', .*did you mean resnet50"),
        ("resnet50.nope", "arch: unknown tag of timm's resnet50: given 'nope', allowed a1_in1k"),
    ],
)
def test_unknown_names_and_tags_are_refused(name: str, why: str):
    with pytest.raises(RequestError, match=why):
        blueprint(name)


def test_every_name_is_listed_with_its_family():
    from sizer.architecture.timm_models import list_names

    rows = {row["name"]: row["family"] for row in list_names()}
    assert len(rows) > 1000
    assert (rows["resnet50"], rows["vit_base_patch16_224"]) == ("resnet", "vision_transformer")


def test_every_name_can_be_asked_for():
    import timm

    for name in (*timm.list_models(), *timm.list_pretrained()):
        assert format_query(parse_query(f"arch=timm:{name}")) == f"arch=timm:{name}"
