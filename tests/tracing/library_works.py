"""Steps with compiled models of libraries, as those of `tests.tracing.compiled_works`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Any]
HALVES = partial(torch.autocast, "cuda", dtype=torch.bfloat16)


def _whole(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model)


def _by_blocks(blocks: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return a function that compiles the blocks of a model one by one, as trainers do."""

    def compile_blocks(model: nn.Module) -> Callable[..., Any]:
        for block in blocks(model):
            block.compile()
        return model

    return compile_blocks


def _step(
    make: Callable[[], nn.Module],
    batch: Callable[[], tuple],
    loss_of: Callable[..., Tensor],
    *,
    compiled: Callable[[nn.Module], Callable[..., Any]] = _whole,
    cast: Callable[[], Any] = nullcontext,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    layout: torch.memory_format = torch.preserve_format,
) -> Step:
    """Return the training step of a model."""
    torch.manual_seed(0)
    model = make().to(dtype).cuda().to(memory_format=layout)
    called, inputs = compiled(model), batch()
    update = optimizer(model.parameters())

    def step() -> None:
        with cast():
            loss = loss_of(called, *inputs)
        loss.backward()
        del loss
        update.step()
        update.zero_grad(set_to_none=True)

    return step


def _images(count: int = 4, side: int = 128) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, 3, side, side, device="cuda"), torch.zeros(count, dtype=torch.long, device="cuda")


def _ids(length: int = 96) -> tuple[Tensor]:
    return (torch.ones(2, length, dtype=torch.long, device="cuda"),)


def _classify(called: Callable[..., Any], images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(called(images), labels)


def _language(called: Callable[..., Any], ids: Tensor) -> Tensor:
    return called(input_ids=ids, labels=ids).loss


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return make


def _transformers(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return make


def _backbone() -> nn.Module:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)


def _detection(called: Callable[..., Any], images: Tensor, _: Tensor) -> Tensor:
    return sum(level.mean() for level in called(images).values())


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    attended = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return UNet2DModel(sample_size=32, layers_per_block=1, block_out_channels=(64, 128), **attended)


def _noise(called: Callable[..., Any], images: Tensor, times: Tensor) -> Tensor:
    return F.mse_loss(called(images, times).sample, images)


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12), guidance_embeds=False,
    )  # fmt: skip


def _regional(model: Any) -> Any:
    model.compile_repeated_blocks(fullgraph=True)
    return model


def _latents() -> tuple[Tensor, ...]:
    halves = partial(torch.zeros, device="cuda", dtype=torch.bfloat16)
    return halves(2, 64, 16), halves(2, 32, 64), halves(2, 32), halves(2)


def _flow(called: Callable[..., Any], latents: Tensor, states: Tensor, pooled: Tensor, times: Tensor) -> Tensor:
    places = {"img_ids": torch.zeros(64, 3, device="cuda"), "txt_ids": torch.zeros(32, 3, device="cuda")}
    out = called(latents, encoder_hidden_states=states, pooled_projections=pooled, timestep=times, **places)
    return out.sample.float().square().mean()


_SMALL = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS = {**_SMALL, "intermediate_size": 256, "num_key_value_heads": 2, "use_cache": False}
_T5 = {"vocab_size": 2000, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4}
_WHISPER = {
    "vocab_size": 2000, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_source_positions": 200, "suppress_tokens": None,
}  # fmt: skip


def _sound() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 80, 400, device="cuda"), torch.ones(2, 32, dtype=torch.long, device="cuda")


LIBRARY_WORKS: dict[str, Callable[[], Step]] = {
    "timm ConvNeXt": partial(_step, _timm("convnext_atto"), _images, _classify, cast=HALVES),
    "timm EfficientNet, channels last": partial(
        _step, _timm("efficientnet_b0"), _images, _classify, layout=torch.channels_last,
        cast=HALVES, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "timm Swin": partial(
        _step, _timm("swin_tiny_patch4_window7_224", img_size=112, depths=(2, 2, 1, 1)), partial(_images, 2, 112), _classify,
        cast=HALVES,
    ),
    "timm ViT by blocks": partial(
        _step, _timm("vit_tiny_patch16_224", img_size=128), _images, _classify, cast=HALVES,
        compiled=_by_blocks(lambda model: model.blocks),
    ),
    "detection backbone": partial(_step, _backbone, partial(_images, 2, 160), _detection),
    "BERT": partial(
        _step, _transformers("BertConfig", "BertForMaskedLM", **_SMALL, intermediate_size=256), _ids, _language,
        dtype=torch.bfloat16,
    ),
    "T5": partial(
        _step, _transformers("T5Config", "T5ForConditionalGeneration", **_T5, decoder_start_token_id=0), _ids, _language
    ),
    "Whisper": partial(
        _step, _transformers("WhisperConfig", "WhisperForConditionalGeneration", **_WHISPER), _sound,
        lambda called, sound, labels: called(input_features=sound, labels=labels).loss, cast=HALVES,
    ),
    "Mixtral": partial(
        _step, _transformers("MixtralConfig", "MixtralForCausalLM", **_EXPERTS, num_local_experts=4), _ids, _language,
        dtype=torch.bfloat16,
    ),
    "Qwen3-MoE": partial(
        _step,
        _transformers("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_EXPERTS, num_experts=8, num_experts_per_tok=2,
                      moe_intermediate_size=64, head_dim=32),
        _ids, _language, dtype=torch.bfloat16,
    ),
    "Mamba": partial(
        _step,
        _transformers("MambaConfig", "MambaForCausalLM", vocab_size=2000, hidden_size=64, state_size=8, num_hidden_layers=2,
                      use_cache=False),
        partial(_ids, 16), _language,
    ),
    "Mamba-2 by blocks": partial(
        _step,
        _transformers("Mamba2Config", "Mamba2ForCausalLM", vocab_size=2000, hidden_size=64, state_size=16, num_hidden_layers=2,
                      num_heads=4, head_dim=32, n_groups=1, chunk_size=16, use_cache=False),
        partial(_ids, 64), _language, compiled=_by_blocks(lambda model: model.backbone.layers),
    ),
}  # fmt: skip
# Models of diffusers, which is no requirement.
DIFFUSERS_WORKS: dict[str, Callable[[], Step]] = {
    "diffusers UNet": partial(_step, _unet, partial(_images, 4, 32), _noise),
    "diffusers Flux by blocks": partial(_step, _flux, _latents, _flow, dtype=torch.bfloat16, compiled=_regional),
}
