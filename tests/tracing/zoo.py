"""Models for the comparison with the CPU, one of each kind: torchvision's and transformers' own classes, shallow and narrow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models as vision
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.segmentation import DeepLabV3
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.models.video.resnet import BasicBlock as VideoBlock
from torchvision.models.video.resnet import BasicStem, Conv3DSimple, VideoResNet

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.huggingface import huggingface_blueprint
from tests.architecture.rare_configs import RARE
from tests.architecture.tiny_configs import TINY, WIDTHS

Make = Callable[[str], Blueprint]


def _scores(output: object) -> Tensor:
    return output["out"] if isinstance(output, dict) else output


def network(name: str, factory: Callable[[], nn.Module], *shape: int, classes: int = 10) -> Make:
    """A network over inputs of `shape` per sample, trained by cross entropy on its scores [N, classes, ..]."""

    def loss(module: nn.Module, example: Example) -> Tensor:
        scores = _scores(module(*example.args))
        return F.cross_entropy(scores, torch.zeros(scores[:, 0].shape, dtype=torch.int64, device=scores.device))

    plan = Blueprint(
        name=name,
        class_name=name,
        build=factory,
        example=lambda batch, training: Example(args=(torch.zeros(batch, *shape),)),
        loss=loss,
        predict=lambda module, example: module(*example.args),
    )
    return lambda mode: plan


def transformer(name: str, length: int | None = 32, **config: object) -> Make:
    """A transformers model of a tiny config; parts that are dropped by chance are kept, since chance differs from run to run."""
    settled = {"layerdrop": 0.0, "apply_spec_augment": False} if name == "wav2vec2" else {}
    full = {**TINY.get(name, RARE.get(name, {})), "model_type": name, **config, **settled}
    return lambda mode: huggingface_blueprint(full, name=name, sequence_length=length, mode=mode)


def _vgg() -> nn.Module:
    features = vision.vgg11_bn(weights=None).features[:15]
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def _mobilenet_v3() -> nn.Module:
    block = partial(InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [
        block(16, 3, 16, 16, True, "RE", 2),
        block(16, 5, 72, 24, True, "HS", 2),
        block(24, 5, 96, 24, True, "HS", 1),
    ]
    return vision.MobileNetV3(blocks, last_channel=64, num_classes=10)


def _efficientnet() -> nn.Module:
    config = partial(vision.efficientnet.MBConvConfig, width_mult=1.0, depth_mult=1.0)
    blocks = [config(1, 3, 1, 16, 16, 1), config(6, 3, 2, 16, 24, 1), config(6, 5, 2, 24, 40, 1)]
    return vision.EfficientNet(blocks, dropout=0.2, last_channel=64, num_classes=10)


def _convnext() -> nn.Module:
    return vision.ConvNeXt([CNBlockConfig(24, 48, 2), CNBlockConfig(48, None, 1)], num_classes=10)


def _swin() -> nn.Module:
    return vision.SwinTransformer([4, 4], 24, [2, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=10)


def _deeplab() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.ReLU())
    backbone = vision._utils.IntermediateLayerGetter(body, {"1": "out"})
    return DeepLabV3(backbone, DeepLabHead(32, 10))


def _mvit() -> nn.Module:
    block = partial(MSBlockConfig, num_heads=2, kernel_kv=[3, 3, 3], stride_kv=[1, 2, 2])
    blocks = [
        block(input_channels=16, output_channels=16, kernel_q=[], stride_q=[]),
        block(input_channels=16, output_channels=32, kernel_q=[3, 3, 3], stride_q=[1, 2, 2]),
    ]
    return MViT((32, 32), 4, blocks, residual_pool=False, residual_with_cls_embed=True, rel_pos_embed=False,
                proj_after_attn=False, num_classes=10)  # fmt: skip


class UNet(nn.Module):
    """Down, up by a transposed convolution, and the two joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Conv2d(32, 10, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, 16), nn.GroupNorm(4, 32)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norms[0](self.first(x)))
        y = F.silu(self.norms[1](self.down(F.max_pool2d(x, 2))))
        return self.last(torch.cat([x, self.up(y)], 1))


_BERT = {**WIDTHS, "vocab_size": 128, "max_position_embeddings": 64}
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 32}

ZOO: dict[str, Make] = {
    # pictures: convolutions
    "resnet": network("resnet", lambda: vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10), 3, 64, 64),
    "resnext": network("resnext", lambda: vision.ResNet(
        vision.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=32, width_per_group=4), 3, 64, 64),
    "vgg": network("vgg", _vgg, 3, 64, 64),
    "squeezenet": network("squeezenet", lambda: vision.SqueezeNet("1_1", num_classes=10), 3, 64, 64),
    "googlenet": network("googlenet", lambda: vision.GoogLeNet(10, aux_logits=False, init_weights=False), 3, 64, 64),
    "densenet": network("densenet", lambda: vision.DenseNet(12, (2, 2, 2, 2), 24, num_classes=10), 3, 64, 64),
    "shufflenet": network("shufflenet", lambda: vision.ShuffleNetV2([2, 2, 2], [24, 48, 96, 192, 64], num_classes=10), 3, 64, 64),
    "mobilenet_v2": network("mobilenet_v2", lambda: vision.MobileNetV2(num_classes=10, inverted_residual_setting=[
        [1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]]), 3, 64, 64),
    "mobilenet_v3": network("mobilenet_v3", _mobilenet_v3, 3, 64, 64),
    "efficientnet": network("efficientnet", _efficientnet, 3, 64, 64),
    "mnasnet": network("mnasnet", lambda: vision.MNASNet(0.35, num_classes=10), 3, 64, 64),
    "regnet": network("regnet", lambda: vision.RegNet(vision.regnet.BlockParams.from_init_params(
        depth=4, w_0=24, w_a=24.0, w_m=2.5, group_width=8, se_ratio=0.25), num_classes=10), 3, 64, 64),
    "convnext": network("convnext", _convnext, 3, 64, 64),
    # pictures: attention
    "vision_transformer": network("vision_transformer", lambda: vision.VisionTransformer(
        32, 8, 2, 2, 32, 64, num_classes=10), 3, 32, 32),
    "swin": network("swin", _swin, 3, 64, 64),
    "vit": transformer("vit", None),
    "dinov2": transformer("dinov2", None),
    "segformer": transformer("segformer", None),
    # every pixel, films
    "deeplab": network("deeplab", _deeplab, 3, 64, 64),
    "unet": network("unet", UNet, 3, 32, 32),
    "r3d": network("r3d", lambda: VideoResNet(
        VideoBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=10), 3, 4, 32, 32),
    "mvit": network("mvit", _mvit, 3, 4, 32, 32),
    # text
    "bert": transformer("bert"),
    "distilbert": transformer("distilbert", dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=128,
                              max_position_embeddings=64),
    "electra": transformer("electra", **_BERT, embedding_size=16),
    "albert": transformer("albert", **_BERT, embedding_size=16),
    "deberta-v2": transformer("deberta-v2", **_BERT, **_RELATIVE, position_buckets=16),
    "modernbert": transformer("modernbert"),
    "gpt2": transformer("gpt2"),
    "llama": transformer("llama"),
    "gemma2": transformer("gemma2", **_BERT, num_key_value_heads=2, head_dim=8),
    "mixtral": transformer("mixtral", **_BERT, num_key_value_heads=2, num_local_experts=4),
    "mamba": transformer("mamba", 16),
    "t5": transformer("t5"),
    "bart": transformer("bart"),
    # sound, pictures and text
    "whisper": transformer("whisper", None),
    "wav2vec2": transformer("wav2vec2", 1600, architectures=["Wav2Vec2ForSequenceClassification"]),
    "clip": transformer("clip", 16),
    "llava": transformer("llava", None),
    "step3p7": transformer("step3p7", None),
    "voxtral_realtime": transformer("voxtral_realtime", 16),
    # objects followed through a film: under inference_mode
    "sam2_video": transformer("sam2_video", None),
}  # fmt: skip
