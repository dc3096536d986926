"""Every torchvision name against what torchvision publishes with its weights."""

from __future__ import annotations

import pytest
from torchvision.models import get_model_weights, list_models

from sizer.architecture.torchvision_models import vision_blueprint
from tests.architecture.vision_facts import facts

# Frozen batch norm: published with frozen scale and shift (buffers, not parameters) in the backbone; from scratch they
# are parameters. ResNet-50 has 26,560 batch-norm channels, the scale and shift of each: 2 * 26560 = 53120.
# MobileNet-v3-large has 12,200 of them: 2 * 12200 = 24400.
RESNET50_BATCH_NORM, MOBILENET_BATCH_NORM = 2 * 26560, 2 * 12200

# GoogLeNet's published weights drop both auxiliary heads. Each: 1x1 convolution to 128 channels without bias, batch norm
# (2 * 128), linear 2048 -> 1024 and 1024 -> 1000 with bias; their inputs have 512 and 528 channels.
GOOGLENET_HEADS = sum(channels * 128 + 2 * 128 + (2048 * 1024 + 1024) + (1024 * 1000 + 1000) for channels in (512, 528))

# vit_h_14: published for 518 pixels, (518/14)**2 + 1 = 1370 positions of width 1280; built for 224: (224/14)**2 + 1 = 257.
VIT_POSITIONS = (257 - 1370) * 1280

DIFFERENCES = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": MOBILENET_BATCH_NORM,
    "fasterrcnn_mobilenet_v3_large_fpn": MOBILENET_BATCH_NORM,
    "fasterrcnn_resnet50_fpn": RESNET50_BATCH_NORM,
    "fcos_resnet50_fpn": RESNET50_BATCH_NORM,
    "googlenet": GOOGLENET_HEADS,
    "keypointrcnn_resnet50_fpn": RESNET50_BATCH_NORM,
    "maskrcnn_resnet50_fpn": RESNET50_BATCH_NORM,
    "quantized_googlenet": GOOGLENET_HEADS,
    "retinanet_resnet50_fpn": RESNET50_BATCH_NORM,
    "vit_h_14": VIT_POSITIONS,
}


@pytest.mark.parametrize("name", list_models())
def test_the_count_is_the_published_one_or_differs_for_a_known_reason(name):
    census, _ = facts(name)
    assert census.parameters == get_model_weights(name).DEFAULT.meta["num_params"] + DIFFERENCES.get(name, 0)
    assert census.class_name == vision_blueprint(name, image_size=None, checkpointing=False).class_name


@pytest.mark.parametrize("name", list_models())
def test_modules_and_dtypes_sum_to_the_totals(name):
    census, _ = facts(name)
    assert sum(row.parameters for row in census.modules) == census.parameters
    assert sum(row.buffer_bytes for row in census.modules) == census.buffer_bytes
    assert sum(row.bytes for row in census.by_dtype) == census.parameter_bytes + census.buffer_bytes
    assert census.trainable_parameters == census.parameters  # from scratch nothing is frozen
    assert {row.dtype for row in census.by_dtype if row.parameters} == {"float32"}


def test_resnet50_to_the_byte():
    census, _ = facts("resnet50")
    # 25,557,032 float32: 4 * 25557032 = 102,228,128 B.
    assert (census.parameters, census.parameter_bytes) == (25_557_032, 102_228_128)
    # 53 batch norms over 26,560 channels: running mean and variance float32, one int64 counter each:
    # elements 2 * 26560 + 53 = 53,173; bytes 2 * 26560 * 4 + 53 * 8 = 212,480 + 424 = 212,904.
    assert (census.buffers, census.buffer_bytes) == (53_173, 212_904)


def test_detection_keeps_its_anchors_on_the_cpu():
    census, _ = facts("fasterrcnn_resnet50_fpn")
    # five feature maps, each with one anchor size at three aspect ratios, 4 coordinates in float32: 3 * 4 * 4 = 48 B.
    expected = [(f"rpn.anchor_generator.cell_anchors[{index}]", (3, 4), "cpu", 48) for index in range(5)]
    assert [(row.name, row.shape, row.device, row.bytes) for row in census.unregistered_tensors] == expected
    assert [row.name for row in census.real_tensors] == [row[0] for row in expected]


@pytest.mark.parametrize("name", list_models())
def test_checkpointing_is_offered_exactly_where_blocks_repeat(name):
    _, blocks = facts(name)
    offered = vision_blueprint(name, image_size=None, checkpointing=False).checkpoint is not None
    assert offered == bool(blocks)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet50", {"Bottleneck": 16}),  # 3 + 4 + 6 + 3
        ("densenet121", {"_DenseLayer": 58}),  # 6 + 12 + 24 + 16
        ("vit_b_16", {"EncoderBlock": 12}),
        ("swin_t", {"SwinTransformerBlock": 12, "PatchMerging": 3}),  # 2 + 2 + 6 + 2, and one between stages
        ("maxvit_t", {"MaxVitLayer": 11}),  # 2 + 2 + 5 + 2
        ("googlenet", {"BasicConv2d": 3, "Inception": 9, "InceptionAux": 2}),
        ("ssdlite320_mobilenet_v3_large", {"InvertedResidual": 14}),  # 15, one of them cut in two by the feature taps
        ("raft_small", {"BottleneckBlock": 12}),  # two encoders of three layers of two
    ],
)
def test_blocks_are_those_of_the_architecture(name, blocks):
    assert facts(name)[1] == blocks
