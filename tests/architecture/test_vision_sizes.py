"""Both sides of every limit: what a rule allows runs on meta tensors, what it refuses fails in torchvision itself."""

from __future__ import annotations

import pytest
import torch

from sizer.architecture.torchvision_models import vision_blueprint
from sizer.base.errors import RequestError
from sizer.base.versions import installed_version
from sizer.device.trial.trial import one_thread
from tests.architecture.vision_facts import build_on_meta

TOO_SMALL = (RuntimeError, ValueError, AssertionError)
WORDS = (
    r"Kernel size can't be greater than|Output size is too small|smaller than kernel size|too small to be down-sampled|"
    r"is invalid for input of size|Wrong image (height|width)|should be divisible by 8|"
    r"Attempting to broadcast a dimension|must match the size of tensor b"
)


def in_torchvision(module, example, size):
    """Runs the module at another size. Up to PyTorch 2.14 meta's convolutions take kernels that are larger than the image."""
    device = "meta" if installed_version() >= (2, 15) else "cpu"
    module = module.to_empty(device=device)
    return module(*[torch.zeros((*tensor.shape[:-2], *size), device=device) for tensor in example.args])


def on_meta(example):
    return [tensor.to("meta") for tensor in example.args]


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("alexnet", (63, 80), (62, 80), "at least 63x63 pixels"),
        ("convnext_tiny", (32, 32), (31, 32), "at least 32x32 pixels"),
        ("densenet121", (29, 29), (29, 28), "at least 29x29 pixels"),
        ("googlenet", (15, 15), (14, 15), "at least 15x15 pixels"),
        ("inception_v3", (75, 75), (75, 74), "at least 75x75 pixels"),
        ("squeezenet1_0", (21, 21), (20, 20), "at least 21x21 pixels"),
        ("squeezenet1_1", (17, 17), (16, 16), "at least 17x17 pixels"),
        ("vgg11_bn", (32, 48), (31, 48), "at least 32x32 pixels"),
        ("swin_t", (4, 9), (3, 9), "at least 4x4 pixels"),
        ("swin_v2_t", (20, 33), (3, 33), "at least 4x4 pixels"),
        ("s3d", (209, 209), (208, 209), "at least 209x209 pixels"),
        ("mvit_v1_b", (221, 224), (220, 224), "221 to 224 pixels each way"),
        ("mvit_v2_s", (224, 224), (224, 225), "221 to 224 pixels each way"),
        ("raft_small", (128, 136), (120, 136), "at least 128x128 pixels, both divisible by 8"),
        ("raft_large", (136, 128), (128, 132), "at least 128x128 pixels, both divisible by 8"),
        ("efficientnet_v2_s", (16, 16), None, ""),
        ("resnet18", (16, 4096), None, ""),
        ("swin3d_t", (16, 30), None, ""),
        ("regnet_y_128gf", (384, 384), None, ""),
    ],
)
def test_limits_of_the_image(name, good, bad, allowed):
    module = build_on_meta(name).eval()
    blueprint = vision_blueprint(name, image_size=good, checkpointing=False)
    module(*on_meta(blueprint.example(2, False)))
    if bad is None:
        return
    with pytest.raises(RequestError, match=f"image for {name}: given {bad[0]}x{bad[1]}, allowed {allowed}; choose"):
        vision_blueprint(name, image_size=bad, checkpointing=False)
    with pytest.raises(TOO_SMALL, match=WORDS):
        in_torchvision(module, blueprint.example(2, False), bad)


@pytest.mark.parametrize(
    ("name", "good", "bad", "allowed"),
    [
        ("vit_b_16", (384, 384), (40, 40), "squares of a multiple of 16 pixels"),
        ("vit_h_14", (518, 518), (512, 512), "squares of a multiple of 14 pixels"),
        ("vit_l_32", (224, 224), (224, 256), "squares of a multiple of 32 pixels"),
        ("maxvit_t", (448, 448), (256, 256), "squares of a multiple of 224 pixels, or up to 3 pixels less"),
        ("maxvit_t", (221, 221), (220, 220), "squares of a multiple of 224 pixels"),
        ("maxvit_t", (224, 224), (224, 448), "squares of a multiple of 224 pixels"),
    ],
)
def test_models_built_for_one_size_are_built_for_the_size_asked(name, good, bad, allowed):
    blueprint = vision_blueprint(name, image_size=good, checkpointing=False)
    with torch.device("meta"):
        module = blueprint.build().eval()
    module(*on_meta(blueprint.example(2, False)))
    with pytest.raises(RequestError, match=f"given {bad[0]}x{bad[1]}, allowed {allowed}"):
        vision_blueprint(name, image_size=bad, checkpointing=False)
    with pytest.raises(TOO_SMALL, match=WORDS):
        module(torch.empty(2, 3, *bad, device="meta"))


def test_vit_at_its_published_size_has_its_published_parameters():
    with torch.device("meta"):
        module = vision_blueprint("vit_h_14", image_size=(518, 518), checkpointing=False).build()
    # ViT-H/14 at 518 pixels: 633,470,440 (ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1.meta["num_params"])
    assert sum(parameter.numel() for parameter in module.parameters()) == 633_470_440


def test_inception_trains_from_299_pixels_on():
    with pytest.raises(
        RequestError, match="training inception_v3: given 298x310, allowed at least 299x299 pixels, which its"
    ):
        vision_blueprint("inception_v3", image_size=(298, 310), checkpointing=False).example(2, True)
    blueprint = vision_blueprint("inception_v3", image_size=(299, 299), checkpointing=False)
    module = build_on_meta("inception_v3").train()
    module(*on_meta(blueprint.example(2, True)))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        in_torchvision(module, blueprint.example(2, True), (298, 310))


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("resnet18", 32),
        ("regnet_y_400mf", 32),
        ("efficientnet_b0", 32),
        ("mnasnet0_5", 32),
        ("quantized_mobilenet_v2", 32),
        ("mobilenet_v3_small", 32),
        ("shufflenet_v2_x0_5", 32),
        ("googlenet", 46),
        ("densenet121", 60),
        ("inception_v3", 346),
        ("lraspp_mobilenet_v3_large", 16),
    ],
)
def test_a_single_sample_cannot_train_where_batch_norm_sees_one_value(name, largest):
    small = vision_blueprint(name, image_size=(largest, largest), checkpointing=False)
    larger = vision_blueprint(name, image_size=(largest, largest + 1), checkpointing=False)
    module = build_on_meta(name).train()
    module(*on_meta(larger.example(1, True)))
    module(*on_meta(small.example(2, True)))
    with pytest.raises(RequestError, match=f"batch for training {name} .*: given 1, allowed at least 2"):
        small.example(1, True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        module(*on_meta(small.example(1, False)))
    assert any("cannot be trained on a batch of 1" in note for note in small.notes)
    assert not any("cannot be trained on a batch of 1" in note for note in larger.notes)


@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large"])
def test_some_never_train_on_a_single_sample(name):
    blueprint = vision_blueprint(name, image_size=None, checkpointing=False)
    with pytest.raises(
        RequestError, match=rf"batch for training {name} at \d+x\d+ pixels: given 1, allowed at least 2"
    ):
        blueprint.example(1, True)
    assert any("cannot be trained on a batch of 1" in note for note in blueprint.notes)


def test_deeplab_fails_on_a_single_sample_in_torchvision():
    example = vision_blueprint("deeplabv3_mobilenet_v3_large", image_size=(64, 64), checkpointing=False).example(
        1, False
    )
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        build_on_meta("deeplabv3_mobilenet_v3_large").train()(*on_meta(example))


def test_ssdlite_fails_on_a_single_sample_in_torchvision():
    blueprint = vision_blueprint("ssdlite320_mobilenet_v3_large", image_size=(64, 64), checkpointing=False)
    example = blueprint.example(2, True)
    with one_thread(), pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        blueprint.build().train()([example.args[0][0]], example.targets[:1])
