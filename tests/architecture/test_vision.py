from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torchvision.models import list_models

from sizer.architecture import make_blueprint
from sizer.architecture.blueprint import Example
from sizer.architecture.torchvision_models import resized, vision_blueprint
from sizer.architecture.vision_inputs import classification, detection, optical_flow, segmentation
from sizer.base.errors import RequestError
from sizer.device.trial.trial import one_thread
from sizer.query.text import parse_query
from sizer.tracing.steps import place

# Per name the smallest sensible image; what a backward pass on two real CPU cores can do in about a second.
SMALL = {
    "squeezenet1_1": (32, 32),
    "resnet18": (48, 48),
    "regnet_y_400mf": (48, 48),
    "mobilenet_v3_small": (48, 48),
    "googlenet": (64, 64),
    "quantized_shufflenet_v2_x0_5": (48, 48),
    "swin_t": (32, 32),
    "lraspp_mobilenet_v3_large": (48, 48),
    "fcn_resnet50": (32, 32),
    "r3d_18": (16, 16),
    "raft_small": (128, 128),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (96, 128),
    "ssdlite320_mobilenet_v3_large": (96, 128),
}


class Returns(nn.Module):
    """Returns what it was made with, whatever it is called with."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *inputs):
        self.inputs = inputs
        return self.output


@pytest.mark.parametrize("name", SMALL)
def test_a_real_training_step_reaches_every_parameter(name):
    blueprint = vision_blueprint(name, image_size=SMALL[name], checkpointing=False)
    example = place(blueprint.example(2, True), torch.float32, torch.Tensor.contiguous)
    for tensor in flatten(example.args):
        tensor.uniform_(generator=torch.Generator().manual_seed(1))
    with one_thread():
        torch.manual_seed(0)
        module = blueprint.build().train()
        if name.startswith("fasterrcnn"):
            module.transform.min_size, module.transform.max_size = (96,), 128
        loss = blueprint.loss(module, example)
        loss.backward()
    assert loss.shape == ()
    assert math.isfinite(loss.item())
    assert [path for path, parameter in module.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", list_models())
def test_every_example_has_the_batch_and_size_that_the_blueprint_says(name):
    blueprint = vision_blueprint(name, image_size=None, checkpointing=False)
    example = blueprint.example(3, False)
    assert example.targets is None
    tensors = flatten(example.args)
    assert all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    assert all(tensor.shape[-2:] == blueprint.image_size for tensor in tensors)
    if isinstance(example.args[0], list):
        assert [tensor.dim() for tensor in tensors] == [3, 3, 3]
    else:
        frames = () if blueprint.sequence_length is None else (blueprint.sequence_length,)
        assert all(tensor.shape == (3, 3, *frames, *blueprint.image_size) for tensor in tensors)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet50", (224, 224)),
        ("inception_v3", (299, 299)),
        ("efficientnet_b7", (600, 600)),
        ("regnet_y_128gf", (384, 384)),
        ("vit_h_14", (224, 224)),
        ("swin_v2_t", (256, 256)),
        ("fcn_resnet50", (520, 520)),
        ("r3d_18", (112, 112)),
        ("mvit_v2_s", (224, 224)),
        ("raft_large", (368, 496)),
        ("maskrcnn_resnet50_fpn", (480, 640)),
    ],
)
def test_usual_sizes(name, size):
    assert vision_blueprint(name, image_size=None, checkpointing=False).image_size == size


@pytest.mark.parametrize(("name", "frames"), [("r3d_18", 16), ("mvit_v1_b", 16), ("swin3d_t", 32), ("s3d", 64)])
def test_clips_have_the_frames_of_their_recipes(name, frames):
    assert vision_blueprint(name, image_size=None, checkpointing=False).sequence_length == frames


def test_a_misspelt_name_is_refused_with_close_ones():
    with pytest.raises(RequestError, match=r"given 'resnet5O', allowed the \d+ names .*did you mean .*resnet50"):
        vision_blueprint("resnet5O", image_size=None, checkpointing=False)


def test_a_name_like_nothing_else_is_refused_with_the_list():
    with pytest.raises(RequestError, match="python -m sizer models"):
        vision_blueprint("zzzz", image_size=None, checkpointing=False)


def test_classification_adds_the_auxiliary_losses():
    # Equal logits over 1000 classes: cross entropy ln 1000; with two auxiliary heads at 0.3: (1 + 2*0.3) * ln 1000.
    task = classification(classes=1000, auxiliary_weight=0.3)
    logits = torch.zeros(4, 1000)
    example = task.example(4, True, (8, 8))
    assert task.loss(Returns(logits), example).item() == pytest.approx(math.log(1000))
    assert task.loss(Returns((logits, logits, logits)), example).item() == pytest.approx(1.6 * math.log(1000))


@pytest.mark.parametrize(("name", "heads"), [("googlenet", 1.6), ("inception_v3", 1.4), ("quantized_googlenet", 1.6)])
def test_auxiliary_weights_of_the_architectures(name, heads):
    # GoogLeNet has two auxiliary heads at 0.3, Inception v3 one at 0.4.
    blueprint = vision_blueprint(name, image_size=None, checkpointing=False)
    outputs = (torch.zeros(2, 1000),) * (3 if "googlenet" in name else 2)
    loss = blueprint.loss(Returns(outputs), blueprint.example(2, True))
    assert loss.item() == pytest.approx(heads * math.log(1000))


def test_segmentation_counts_the_auxiliary_head_half():
    # 21 equal classes at every pixel: ln 21; with the auxiliary head 1.5 * ln 21.
    task = segmentation()
    example = task.example(2, True, (6, 8))
    scores = torch.zeros(2, 21, 6, 8)
    assert task.loss(Returns({"out": scores}), example).item() == pytest.approx(math.log(21))
    assert task.loss(Returns({"out": scores, "aux": scores}), example).item() == pytest.approx(1.5 * math.log(21))


def test_optical_flow_weighs_late_predictions_most():
    # Three predictions that are 1, 2 and 4 pixels off everywhere: 0.8**2 * 1 + 0.8 * 2 + 1 * 4 = 6.24.
    task = optical_flow()
    predictions = [torch.full((2, 2, 8, 8), error) for error in (1.0, 2.0, 4.0)]
    assert task.loss(Returns(predictions), task.example(2, True, (8, 8))).item() == pytest.approx(6.24)


def test_detection_sums_the_modules_losses_and_hands_it_the_targets():
    task = detection(classes=91)
    module = Returns({"boxes": torch.tensor(1.5), "labels": torch.tensor(2.0)})
    example = task.example(2, True, (40, 80))
    assert task.loss(module, example).item() == 3.5
    assert module.inputs == (*example.args, example.targets)


def test_detection_targets_tile_the_image():
    # A 4 x 2 grid on 40 x 80 pixels: boxes of 20 x 20, each mask 400 of the 3,200 pixels, together all of them once.
    targets = detection(classes=91, masks=True, keypoints=True).example(1, True, (40, 80)).targets[0]
    boxes = targets["boxes"]
    assert ((boxes[:, 2:] - boxes[:, :2]) == 20).all()
    assert targets["labels"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert targets["masks"].shape == (8, 40, 80)
    assert (targets["masks"].sum(dim=0) == 1).all()
    assert targets["keypoints"].shape == (8, 17, 3)
    assert targets["keypoints"][0, 0].tolist() == [10, 10, 1]


def test_person_keypoints_have_one_class():
    blueprint = vision_blueprint("keypointrcnn_resnet50_fpn", image_size=(64, 64), checkpointing=False)
    assert blueprint.example(1, True).targets[0]["labels"].tolist() == [1] * 8


@pytest.mark.parametrize("name", [name for name in list_models() if "rcnn" in name or "ssd" in name or "fcos" in name])
@pytest.mark.parametrize("size", [(480, 640), (333, 1000)])
def test_resized_is_what_the_transform_does(name, size):
    module = build_transform(name)
    images, _ = module([torch.zeros(3, *size)])
    assert images.image_sizes == [resized(name, size)]
    (note,) = [n for n in vision_blueprint(name, image_size=size, checkpointing=False).notes if "resizes each" in n]
    height, width = images.tensors.shape[-2:]
    assert f"to {height}x{width}." in note


def test_training_sizes_are_not_drawn_by_chance():
    transform = build_transform("keypointrcnn_resnet50_fpn").train()
    assert transform.min_size == (640, 672, 704, 736, 768, 800)
    assert transform.torch_choice(transform.min_size) == 800


def test_predict_runs_the_module_on_the_inputs():
    blueprint = vision_blueprint("squeezenet1_1", image_size=(32, 32), checkpointing=False)
    with one_thread(), torch.no_grad():
        output = blueprint.predict(blueprint.build().eval(), blueprint.example(2, False))
    assert output.shape == (2, 1000)


def build_transform(name):
    blueprint = vision_blueprint(name, image_size=None, checkpointing=False)
    with torch.device("meta"):
        return blueprint.build().transform.eval()


def flatten(values):
    return [tensor for value in values for tensor in (value if isinstance(value, list) else [value])]


def test_examples_are_the_same_every_time():
    blueprint = vision_blueprint("ssd300_vgg16", image_size=(32, 32), checkpointing=False)
    first, second = blueprint.example(2, True), blueprint.example(2, True)
    assert isinstance(first, Example)
    assert all(map(torch.equal, flatten(first.args), flatten(second.args)))


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("googlenet", "weight 0.3 in the loss; torchvision drops them when it loads published weights."),
        ("inception_v3", "weight 0.4 in the loss."),
        ("quantized_resnet18", "The float32 model that quantization starts from"),
        ("fcn_resnet50", "auxiliary head (aux_loss=True)"),
        ("vit_h_14", "published weights are for image=518"),
        ("keypointrcnn_resnet50_fpn", "from 640 to 800 pixels; this counts 800"),
        ("s3d", "Clips of 64 frames."),
        ("raft_small", "12 flow updates"),
    ],
)
def test_notes_say_what_was_chosen(name, note):
    assert any(note in text for text in vision_blueprint(name, image_size=None, checkpointing=False).notes)


def test_plain_models_need_no_notes():
    assert vision_blueprint("resnet50", image_size=None, checkpointing=False).notes == ()


@pytest.mark.parametrize(("arch", "parameters"), [
    ("torchvision:resnet50", 25_557_032 - 990 * (2048 + 1)),
    ("torchvision:vit_b_16", 86_567_656 - 990 * (768 + 1)),
    ("timm:resnet18", 11_689_512 - 990 * (512 + 1)),
    ("hf:vit-base-patch16-224", 86_567_656 - 990 * (768 + 1)),
])  # fmt: skip
def test_a_classifier_tells_as_many_classes_apart_as_asked(arch, parameters):
    module = make_blueprint(parse_query(f"arch={arch}&classes=10")).make()
    assert sum(p.numel() for p in module.parameters()) == parameters


@pytest.mark.parametrize("layers", range(6))
def test_a_detection_models_backbone_is_frozen_as_torchvision_freezes_it(layers):
    module = vision_blueprint("fasterrcnn_resnet50_fpn", image_size=None, checkpointing=False, trainable_layers=layers).build()
    frozen = {name for name, p in module.backbone.body.named_parameters() if not p.requires_grad}
    # torchvision.models.detection.backbone_utils._resnet_fpn_extractor: these train, from the last on
    order = ["layer4", "layer3", "layer2", "layer1", "conv1", "bn1"][: layers + (layers == 5)]
    every = {name for name, _ in module.backbone.body.named_parameters()}
    assert frozen == {name for name in every if not name.startswith(tuple(order) or ("nothing",))}
    norms = {type(part).__name__ for part in module.backbone.body.modules() if "BatchNorm" in type(part).__name__}
    assert norms == ({"FrozenBatchNorm2d"} if layers < 5 else {"BatchNorm2d"})


@pytest.mark.parametrize(("query", "refused"), [
    ("arch=torchvision:raft_small&classes=3", "classes for raft_small"),
    ("arch=torchvision:fasterrcnn_resnet50_fpn&classes=1", "classes for fasterrcnn_resnet50_fpn"),
    ("arch=torchvision:resnet50&trainable_layers=3", "trainable_layers for resnet50"),
    ("arch=hf:gpt2&classes=3", "classes: GPT2LMHeadModel"),
])  # fmt: skip
def test_options_of_other_models_are_refused_by_name(query, refused):
    with pytest.raises(RequestError, match=refused):
        make_blueprint(parse_query(query))
