"""Names of models by source: which source has a name however it is written, and what is suggested for one that it lacks."""

from __future__ import annotations

import pytest
import timm
from torchvision.models import list_models

from sizer.architecture import make_blueprint
from sizer.base.errors import RequestError
from sizer.catalogue import sources
from sizer.catalogue.pipelines import preset_names
from sizer.catalogue.presets import list_presets
from sizer.catalogue.sources import close_name, resolve
from sizer.query.text import parse_query


@pytest.mark.parametrize(("source", "installed"), [("torchvision", list_models()), ("timm", timm.list_models())])
def test_the_names_of_packages_are_known(source, installed):
    """A newer release has names that the file lacks. If they are many, write `vision_names.csv` again."""
    missing = {name for name in installed if resolve(source, name) != name}
    assert len(missing) <= len(installed) // 20, missing


def test_every_name_of_the_file_is_its_own():
    for source, known in sources._by_letters().items():
        for name in (one for alike in known.values() for one in alike):
            assert resolve(source, name) == name
            assert close_name(source, name) is not None


@pytest.mark.parametrize(
    ("arch", "suggestion"),
    [
        ("hf:resnet-50", "did you mean torchvision:resnet50, timm:resnet50?"),
        ("hf:ViT-B-16", r"did you mean torchvision:vit_b_16\?"),
        ("hf:mobilenet-v2", r"did you mean torchvision:mobilenet_v2\?"),
        ("hf:resnet50.a1_in1k", r"did you mean timm:resnet50\.a1_in1k\?"),
        ("hf:flux.1-dev", r"did you mean diffusers:flux\.1-dev\?"),
        ("hf:sdxl", r"did you mean diffusers:sdxl\?"),
        ("hf:mask-rcnn", "did you mean torchvision:maskrcnn_resnet50_fpn, "),
        ("hf:convnext-tiny", "did you mean torchvision:convnext_tiny, timm:convnext_tiny, hf:convnext-tiny-224"),
        ("hub:gpt2", r"did you mean hf:gpt2\?"),
        ("torchvision:gpt2", r"did you mean hf:gpt2\?"),
        ("torchvision:Qwen3-8B", r"did you mean hf:qwen3-8b\?"),
        ("torchvision:sdxl", r"did you mean diffusers:sdxl\?"),
        ("torchvision:mixnet_l", r"did you mean timm:mixnet_l\?"),
        ("torchvision:efficientnet_b0.ra_in1k", r"did you mean timm:efficientnet_b0\.ra_in1k, "),
        ("torchvision:regnetx16gf", "did you mean regnet_x_16gf, regnet_x_1_6gf"),
        ("timm:bert-base-uncased", r"did you mean hf:bert-base-uncased\?"),
        ("timm:vit_b_16", r"did you mean torchvision:vit_b_16\?"),
        ("diffusers:resnet-50", "did you mean torchvision:resnet50, timm:resnet50"),
        ("hf:mimo", "see `python -m sizer models`"),
        ("torchvision:no_such_model", "`python -m sizer models` lists them"),
    ],
)
def test_a_name_of_another_source_is_suggested_with_it(arch, suggestion):
    with pytest.raises(RequestError, match=suggestion):
        make_blueprint(parse_query(f"arch={arch}"))


@pytest.mark.parametrize(
    ("arch", "found"),
    [
        ("mixnet-l", ("timm", "mixnet_l")),
        ("vit-b-16", ("torchvision", "vit_b_16")),
        ("FLUX.1_dev", ("diffusers", "flux.1-dev")),
        ("timm:ResNet-50.a1_in1k", ("timm", "resnet50.a1_in1k")),
        ("diffusers:SD-XL", ("diffusers", "sdxl")),
        ("torchvision:regnet_x_16gf", ("torchvision", "regnet_x_16gf")),
    ],
)
def test_case_and_separators_do_not_count(arch, found):
    request = parse_query(f"arch={arch}")
    assert (request.source, request.name) == found


def test_a_preset_comes_before_packages():
    both = {preset.key for preset in list_presets() if resolve("timm", preset.key) or preset.key in preset_names()}
    assert "vit-base-patch16-224" in both
    assert {parse_query(f"arch={key}").source for key in both} == {"hf"}
