"""Default lengths and sizes of a model's examples, and the lengths that its positions allow.

The rule of `usual_length`, in tokens, never more than the model has positions:
  a decoder (GPT, Llama)             2048
  an encoder-decoder (T5, BART)      1024, for the text it reads and for the text it writes
  an encoder (BERT)                   512
  a recurrence in plain PyTorch        64 (Mamba without its own kernels runs token by token)
  speech from a sentence (VITS)         64 phonemes
  a long-document encoder            4096 (BigBird, LED: shorter texts would not use their sparse attention)
  audio alone                        10 s: samples of `input_values` (160,000 at 16 kHz), mel frames of `input_features` (1000)
`usual_image` is the size in the config, else the size that the model's paper trains on, else 224 x 224; 448 x 448 for a model
that cuts images of any size into patches.
"""

from __future__ import annotations

import copy
import math

from transformers import PreTrainedConfig, PreTrainedModel

from sizer.architecture.examples.example_spec import forward_parameters, read, takes, text_config, transduces
from sizer.architecture.examples.token_inputs import is_causal

DECODER_TOKENS, ENCODER_DECODER_TOKENS, ENCODER_TOKENS, LONG_DOCUMENT_TOKENS = 2048, 1024, 512, 4096
RECURRENT_TOKENS, SPOKEN_TOKENS = 64, 64
# Recurrent layers that transformers runs token by token if their extra CUDA kernels are not installed.
RECURRENT_TYPES = frozenset({"mamba", "falcon_mamba", "jamba", "zamba", "xlstm", "recurrent_gemma", "rwkv"})
SPOKEN_TYPES = frozenset({"fastspeech2_conformer", "fastspeech2_conformer_with_hifigan", "vits"})
LONG_DOCUMENT_TYPES = frozenset({"longformer", "big_bird", "led", "bigbird_pegasus"})
SECONDS, SAMPLES_PER_SECOND, MEL_FRAMES_PER_SECOND = 10, 16_000, 100

POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_decoder_position_embeddings",
             "max_sequence_length", "max_seq_len", "max_text_positions")  # fmt: skip
POSITIONS_OF_PARTS = dict.fromkeys(("semantic", "coarse_acoustics", "fine_acoustics"), ("block_size",))  # Bark's
# Attributes of configs with rotary, biased or relative positions: any length runs.
UNBOUNDED = ("rope_parameters", "rope_theta", "rotary_pct", "partial_rotary_factor", "rotary_emb_base", "alibi",
             "relative_attention_num_buckets", "attn_config.alibi")  # fmt: skip
# Without position embeddings (recurrent layers, relative distances), or with a table that grows with the text.
UNBOUNDED_TYPES = frozenset({"glm5_next_text", "inkling_text", "inkling2_text", "jamba", "kimi_linear", "nemotron_h", "rwkv",
                             "xlnet", "zamba", "m2m_100", "nllb-moe", "fsmt", "xglm"})  # fmt: skip
# With a table of positions in spite of such an attribute.
BOUNDED_TYPES = frozenset({"mpnet", "gptj", "codegen", "roformer"})
# Positions of these count from the padding id on (`create_position_ids_from_input_ids`): the first ones are never used.
COUNTED_FROM_PADDING = frozenset(
    {"altclip_text_model", "bridgetower_text_model", "camembert", "clap_text_model", "data2vec-text", "esm", "ibert",
     "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet", "prophetnet", "roberta", "roberta-prelayernorm",
     "xlm-roberta", "xlm-roberta-xl", "xmod"}
)  # fmt: skip

IMAGE_PIXELS = 224
LINE_PIXELS, LINE_ROWS = 320, 3  # of a line of text: its width, and the number of rows that PP-OCR's recognisers pool into one
GRID_PIXELS = 448  # for a model that cuts images of any size into patches; 14, 16, 28 and 32 divide it
PATCH_GRIDS = (
    "image_grid_thw",
    "grid_thw",
    "target_sizes",
    "image_grid_hw",
    "image_position_ids",
    "pixel_position_ids",
)
OTHER_PICTURES = ("image", "flattened_patches", "inference_session")
IMAGE_PARTS = (
    "", "vision_config.", "vlm_config.vision_config.", "backbone_config.", "encoder.", "encoder.vision_config.",
    "prompt_encoder_config.", "vision_config.backbone_config.", "sam_config.",
)  # fmt: skip
IMAGE_PATHS = (*(f"{part}{name}" for name in ("image_size", "input_size") for part in IMAGE_PARTS), "max_img_size")
SIZES_OF_PICTURES = (*PATCH_GRIDS, "spatial_shapes", "pixel_attention_mask")
# (height, width) if the config has no size: the training size of the paper or the published checkpoint.
USUAL_IMAGES = {
    "conditional_detr": (800, 1066), "dab-detr": (800, 1066), "deformable_detr": (800, 1066), "detr": (800, 1066),
    "table-transformer": (800, 1066), "grounding-dino": (800, 1066), "mm-grounding-dino": (800, 1066),
    "d_fine": (640, 640), "rt_detr": (640, 640), "rt_detr_v2": (640, 640), "deimv2": (640, 640), "omdet-turbo": (640, 640),
    "rf_detr": (560, 560), "lw_detr": (640, 640), "segformer": (512, 512), "upernet": (512, 512), "mask2former": (384, 384),
    "maskformer": (384, 384), "oneformer": (512, 512), "glpn": (480, 640), "zoedepth": (384, 512), "superpoint": (480, 640),
    "superglue": (480, 640), "lightglue": (480, 640), "efficientloftr": (480, 640), "vitmatte": (512, 512), "uvdoc": (712, 488),
    "pp_ocrv5_server_rec": (48, 320), "pp_ocrv6_small_rec": (48, 320),
    "pp_ocrv6_tiny_rec": (48, 320), "depth_anything": (518, 518), "prompt_depth_anything": (518, 518),
    "pe_audio_video": (336, 336),
    "pe_audio_video_encoder": (336, 336),
    "pe_video": (336, 336), "pe_video_encoder": (336, 336), "depth_pro": (1536, 1536), "dpt": (384, 384),
}  # fmt: skip


def usual_length(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> int | None:
    """Return the tokens (samples, mel frames) of an example by the rule above.

    None for a class that reads neither text nor audio.
    """
    if takes(cls, "input_ids", "decoder_input_ids", "inputs") and not transduces(cls):
        return min(_usual_tokens(config, cls), position_limit(config) or DECODER_TOKENS)
    if takes(cls, "input_values"):
        return SECONDS * read(config, "sampling_rate", "sample_rate", default=SAMPLES_PER_SECOND)
    return SECONDS * MEL_FRAMES_PER_SECOND if takes(cls, "input_features") else None


def _usual_tokens(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> int:
    if text_config(config).model_type in RECURRENT_TYPES:
        return RECURRENT_TOKENS
    if config.model_type in SPOKEN_TYPES:
        return SPOKEN_TOKENS
    if config.model_type in LONG_DOCUMENT_TYPES:
        return LONG_DOCUMENT_TOKENS
    if takes(cls, "decoder_input_ids"):
        return ENCODER_DECODER_TOKENS
    return DECODER_TOKENS if is_causal(config, cls) else ENCODER_TOKENS


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest text, in tokens, for which the config was made; None if it names no limit."""
    text = text_config(config)
    names = (*POSITIONS, *POSITIONS_OF_PARTS.get(text.model_type, ()))
    named = [*(read(text, name) for name in names), read(config, "max_text_len")]
    found = [value for value in named if isinstance(value, int) and value > 0]
    if not found:
        return None
    unused = (read(text, "pad_token_id", default=1) + 1) if text.model_type in COUNTED_FROM_PADDING else 0
    return max(1, min(found) - unused - (text.model_type == "prophetnet"))  # its decoder looks one n-gram ahead


def has_position_table(config: PreTrainedConfig) -> bool:
    """Return True if positions are looked up in a table of `position_limit` rows: a longer text fails on any device."""
    text = text_config(config)
    if text.model_type in UNBOUNDED_TYPES:
        return False
    return text.model_type in BOUNDED_TYPES or all(read(text, name) in (None, False) for name in UNBOUNDED)


def usual_image(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> tuple[int, int] | None:
    """Return (height, width) of an example's images in pixels; None for a class without images."""
    if takes(cls, *PATCH_GRIDS):
        return (GRID_PIXELS, GRID_PIXELS)
    names = forward_parameters(cls)  # type: ignore[arg-type]  # as in example_spec.takes
    if not any("pixel" in name or name in OTHER_PICTURES for name in names):
        return None
    return (
        line_of_text(config)
        or USUAL_IMAGES.get(config.model_type)
        or config_image(config)
        or (IMAGE_PIXELS, IMAGE_PIXELS)
    )


def line_of_text(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Return the size of a line of text that PP-LCNet reduces to `LINE_ROWS` rows, 320 pixels wide; None for another backbone.

    The recogniser pools those rows into one. The published backbone halves the height four times, the default one five times.
    """
    backbone = read(config, "backbone_config")
    if getattr(backbone, "model_type", None) != "pp_lcnet_v3" or "_rec" not in config.model_type:
        return None
    strides = [block[3] for stage in backbone.block_configs for block in stage]
    folded = math.prod(stride if isinstance(stride, int) else stride[0] for stride in (backbone.stem_stride, *strides))
    return LINE_ROWS * folded, LINE_PIXELS


def config_image(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Return (height, width) in the config itself or its vision part; None if there is none."""
    size = read(config, *IMAGE_PATHS)
    if isinstance(size, dict):
        size = (size.get("height"), size.get("width"))
    if isinstance(size, int):
        return (size, size)
    return tuple(size) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def takes_any_image(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> bool:
    """Return True if images come with their own size (grids of patches, tiles), so that the config's size is no limit.

    A model of timm itself refuses sizes that it does not support.
    """
    if config.model_type == "timm_wrapper":
        return True
    tiled = read(config, "image_grid_pinpoints") is not None or read(config, "vision_config.model_type") == "pixtral"
    return tiled or takes(cls, *SIZES_OF_PICTURES)


def resized(config: PreTrainedConfig, size: tuple[int, int]) -> PreTrainedConfig:
    """Return a copy of the config with another image size, which also sets the number of position embeddings."""
    config = copy.deepcopy(config)
    path = next(path for path in IMAGE_PATHS if read(config, path) is not None).split(".")
    part = read(config, ".".join(path[:-1])) if path[:-1] else config
    setattr(part, path[-1], size[0] if size[0] == size[1] else list(size))
    return config
