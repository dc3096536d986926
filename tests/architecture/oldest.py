"""What the oldest supported transformers (5.17) lacks or has wrong: tests that need it are skipped there, and say why."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from sizer.architecture.heads import choose_head
from sizer.base.errors import BuildError

# 5.17, models/sam2_video/configuration_sam2_video.py: the dict of a mask decoder becomes the config of a prompt encoder, so that
# no model can be built from any config.json.
_decoder = AutoConfig.for_model("sam2_video", mask_decoder_config={}).mask_decoder_config
needs_sam2_video = pytest.mark.skipif(
    not hasattr(_decoder, "num_multimask_outputs"), reason="this transformers mistakes the mask decoder's config"
)


def has_model(model_type: str) -> bool:
    """Whether transformers has a model class of its own for a type; 5.17 has none for DeepSeek-OCR 2's vision tower."""
    try:
        choose_head(AutoConfig.for_model(model_type), None)
    except BuildError:
        return False
    return True
