"""The encoder's dummy run in vLLM's profile, and experts on Marlin's kernel, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.base.units import GIB, MIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.estimating.server_profile import trace_encoder, trace_profile
from sizer.estimating.server_report import profiled_flags
from sizer.serving.architecture import CROSS, Layer, Tower, Weight
from sizer.serving.command import vllm_command
from sizer.serving.layout import tensors
from sizer.serving.plan import OTHER_BAND, VISION_BAND, Profile, encoder_items, make_plan
from tests.serving.logs import architecture_of
from tests.serving.models import decoder, flags

GPU = find_gpu("h100-80gb")
# 16,384 patches of 1,024 elements: a row of the encoder, 1,024 hidden elements of 2 bytes, takes 32 MiB for all patches
TOWER = Tower(
    tokens=4096, patches=16_384, patch_elements=1024, hidden=1024, width=1024, gated=False, interpolates=False, outputs=512
)
ROW = 32 * MIB


@pytest.mark.parametrize(
    ("changes", "version", "tp", "rows"),
    [
        # patches, states, norm, 3 of queries, keys and values, 3 copies, 2 joined, twice 4 in float32, 2 rotated
        ({}, (0, 11, 0), 1, 1 + 1 + 1 + 3 + 3 + 2 + 8 + 2),
        # patches, states, norm, 3, 2 copies, 2 rotated, attention, its projection
        ({}, (0, 14, 0), 1, 1 + 1 + 1 + 3 + 2 + 2 + 1 + 1),
        # of two ranks each has half between the projections
        ({}, (0, 14, 0), 2, 1 + 1 + 1 + 1.5 + 1 + 1 + 0.5 + 1),
        # a wide feed-forward part: patches, states, norm, twice 8, 8
        ({"width": 8192, "gated": True}, (0, 14, 0), 1, 1 + 1 + 1 + 16 + 8),
        # positions: patches, states, 4 rows of the table, 4 weighted, 2 sums; of all ranks
        ({"interpolates": True}, (0, 14, 0), 4, 1 + 1 + 4 + 4 + 2),
        # no rotation: patches, embeddings, input of the block, its sum with attention, norm, twice 4
        ({"rotates": False, "held": 1, "width": 4096}, (0, 14, 0), 1, 1 + 1 + 1 + 1 + 1 + 8),
        # complex numbers: patches, embeddings, input, norm, 3, twice 4 in float32, 2 rotated
        ({"as_floats": True, "held": 1}, (0, 33, 0), 1, 1 + 1 + 1 + 1 + 3 + 8 + 2),
        # Pixtral: patches, 2 held, input, its sum, attention, norm, twice 4, 4
        ({"keeps": True, "held": 2, "gated": True, "width": 4096}, (0, 33, 0), 1, 1 + 2 + 1 + 1 + 1 + 1 + 8 + 4),
    ],
)
def test_the_encoder_holds_what_its_source_says(changes: dict, version: tuple[int, int, int], tp: int, rows: float):
    tower = replace(TOWER, **changes)
    assert trace_encoder(tower, flags(release=version, tp=tp), 1, GPU) == rows * ROW
    assert trace_encoder(tower, flags(release=version, tp=tp), 3, GPU) == 3 * rows * ROW


@pytest.mark.parametrize(("release", "out"), [((0, 11, 0), 0), ((0, 33, 0), 1)])
def test_experts_on_marlin_have_caches_of_all_tokens_and_sums(release: tuple[int, int, int], out: int):
    """Expect caches of 40,960 tokens with two experts each, and 128 × 4 × 64 × 256 sums of 4 bytes."""
    tokens, width = 40_960, 512
    model = replace(decoder(), hidden=256, heads=1, kv_heads=1, head_size=64, experts=8, experts_per_token=2, expert_width=width)
    asked = flags(release=release, layout="awq", processors=128, max_num_batched_tokens=tokens, max_num_seqs=1, eager=True)
    row = 2 * tokens  # bytes of an element for each token
    caches = 2 * 3 * width * row
    held = (2 + out) * 256 * row  # the residual, what is fed, and the output
    sums = 128 * 4 * 64 * 256 * 4
    assert trace_profile(model, asked, GPU).forward_bytes == held + caches + sums
    assert trace_profile(model, profiled_flags(asked, model), GPU).forward_bytes == held + caches + sums, "as a query asks"


@pytest.mark.parametrize(
    ("changes", "items"),
    [
        ({"max_num_batched_tokens": 2048, "max_model_len": 1024}, 1),
        ({"max_num_batched_tokens": 8192, "max_num_seqs": 8}, 2),
        ({"max_num_batched_tokens": 32_768, "max_num_seqs": 3, "max_model_len": 4096}, 3),
        ({"max_num_batched_tokens": 32_768, "max_num_seqs": 1, "max_model_len": 20_000}, 4),
    ],
)
def test_items_follow_from_the_budget(changes: dict, items: int):
    seeing = replace(decoder(), tower=TOWER)
    assert encoder_items(seeing, flags(release=(0, 14, 0), **changes)) == items
    assert encoder_items(decoder(), flags(**changes)) == 0
    # with 0.11.0 the largest item of Qwen3-VL is a video
    assert encoder_items(replace(seeing, deepstack=3), flags(release=(0, 11, 0), **changes)) == 0


def test_outputs_stay_while_the_decoder_runs():
    seeing = replace(decoder(), tower=TOWER, encoder="visual")

    def peak(encoder: int) -> int:
        profile = Profile(sampler_bytes=GIB, forward_bytes=MIB, encoder_bytes=encoder, encoded_bytes=8 * MIB)
        return make_plan(seeing, flags(), lambda asked: profile, GPU).profile_peak_bytes

    hidden = (2048 + 512) * 2048  # of the decoder's step
    assert peak(0) == GIB + hidden + 8 * MIB
    assert peak(2 * GIB) == 2 * GIB


def test_the_range_is_narrower_if_the_encoder_is_counted():
    def band(**changes: object) -> int:
        profile = Profile(sampler_bytes=1, forward_bytes=1)
        return make_plan(replace(decoder(), **changes), flags(), lambda asked: profile, GPU).band_bytes

    assert band(encoder="vision") == VISION_BAND
    assert band(encoder="visual", tower=TOWER) == OTHER_BAND
    assert band(encoder="visual", tower=TOWER, deepstack=3) == VISION_BAND  # flags() are of 0.11.0


# pixels of the largest image by the processors: 3,584 and 4,096 squared, in features of 28 and 32 pixels; 896 and 336 squared, in
# patches of 14
TOWERS = {
    "qwen2-vl-7b": (16_384, 65_536, 1176, 1280, 5120, 3584),
    "qwen2.5-vl-3b": (16_384, 65_536, 1176, 1280, 3420, 2048),
    "qwen3-vl-8b": (16_384, 65_536, 1536, 1152, 4304, 4 * 4096),
    "qwen3.5-4b": (16_384, 65_536, 1536, 1024, 4096, 2560),
    "gemma-3-4b": (256, 4096, 588, 1152, 4304, 2560),
    "llava-1.5-7b": (576, 577, 588, 1024, 4096, 4096),
    # 1,540 squared in patches of 14, four to a token; 17 tiles of 336, 384 and 512 squared; 30 seconds of sound
    "mistral-small-3.2-24b-instruct-2506": (3025, 12_100, 588, 1024, 4096, 5120),
    "ministral-3-8b-instruct-2512": (3025, 12_100, 588, 1024, 4096, 4096),
    "llama-4-scout": (2448, 9809, 588, 1408, 5632, 5120),
    "smolvlm2-2.2b-instruct": (1377, 12_393, 2 * 588, 1152, 4304, 2048),
    "smolvlm2-256m-video-instruct": (1088, 17_408, 2 * 768, 768, 3072, 576),
    "voxtral-mini-3b-2507": (375, 1500, 256, 1280, 5120, 3072),
}


@pytest.mark.parametrize("preset", TOWERS)
def test_towers_are_read_from_configs(preset: str):
    tower = architecture_of(preset).tower
    found = (tower.tokens, tower.patches, tower.patch_elements, tower.hidden, tower.width, tower.outputs)
    assert found == TOWERS[preset]
    assert not any("encoder" in line for line in architecture_of(preset).uncounted)


# Peaks of vLLM 0.33's own towers on meta tensors, with the patches: images, bytes. Two blocks run. Attention and activations write
# into one tensor each, and norms with a residual in place, as their CUDA kernels do.
PEAKS = {
    "qwen2-vl-7b": (1, 2_010_120_200),
    "gemma-3-4b": (31, 3_505_553_408),
    "llava-1.5-7b": (14, 208_008_192),
    "mistral-small-3.2-24b-instruct-2506": (2, 909_146_816),
    "llama-4-scout": (2, 907_143_680),
    "smolvlm2-2.2b-instruct": (2, 715_331_072),
    "voxtral-mini-3b-2507": (2, 93_696_000),
}


@pytest.mark.parametrize("preset", PEAKS)
def test_an_encoder_takes_what_vllms_own_classes_take(preset: str):
    images, peak = PEAKS[preset]
    found = trace_encoder(architecture_of(preset).tower, flags(release=(0, 33, 0)), images, GPU)
    assert found == pytest.approx(peak, rel=0.02)  # the tables of rotations and the row of the class, which are small


def test_other_encoders_are_said_not_to_be_counted():
    found = architecture_of("gemma-4-31b")
    assert found.tower is None
    assert any("vision" in line for line in found.uncounted)


def test_a_sound_is_as_long_as_a_request():
    heard = replace(decoder(), tower=replace(TOWER, tokens=375, sound=True))
    # 32,768 tokens are 87.4 pieces of 375; a step of 8,192 has four requests of 2,048, each of 5.5 pieces
    assert encoder_items(heard, flags(release=(0, 33, 0), max_model_len=32_768, max_num_batched_tokens=2048)) == 88
    assert encoder_items(heard, flags(release=(0, 33, 0), max_model_len=2048, max_num_batched_tokens=8192)) == 4 * 6


def test_features_of_layers_have_buffers_with_the_weights():
    # a buffer for each layer, of each token of a step 1,024 elements of 2 bytes
    more = list(tensors(replace(decoder(), step_buffers=(1024,) * 3), flags(max_num_batched_tokens=4096)))
    fewer = list(tensors(decoder(), flags(max_num_batched_tokens=4096)))
    for _ in range(3):
        more.remove(4096 * 1024 * 2)
    assert sorted(more) == sorted(fewer)


def test_layers_of_gemma_4_share_caches():
    found = architecture_of("gemma-4-e4b-it")
    # of 42 layers the last 18 use the cache of others; 4 of the first 24 see all tokens
    held = [layer.kind for layer in found.layers if layer.elements]
    assert (len(found.layers), held.count("sliding"), held.count("full")) == (42, 20, 4)
    names = [weight.name for weight in found.weights if "language_model" in weight.name]
    made = [*names, *(weight.name for weight in found.idle_weights)]
    assert [sum(name.endswith("k_proj.weight") for name in one) for one in (names, made)] == [24, 42]
    # a row of full attention has 512 elements, of which a quarter is rotated; a token of a step has 256 for each layer
    assert sorted(found.rotary_widths) == [256, 512]
    assert found.step_buffers == (42 * 256,)


def test_rotations_of_images_have_four_times_the_rows():
    # the preset leaves the sections out, which its class has by default
    assert architecture_of("qwen3-vl-30b-a3b-instruct").rotary_rows == (4 * 262_144,)


def test_a_model_that_reads_text_alone_has_no_encoder():
    tower = Weight(name="model.visual.blocks.0.attn.qkv.weight", shape=(64, 64))
    seeing = replace(decoder(), weights=(*decoder().weights, tower), tower=TOWER, encoder="visual", vision=(1, 64))
    text = seeing.reading_text()
    assert (text.weights, text.encoder, text.tower) == (decoder().weights, None, None)
    assert encoder_items(text, flags()) == 0
    heard = replace(seeing, layers=(Layer(kind=CROSS, elements=64, kv_heads=1),))
    assert heard.reading_text() == heard
    command = vllm_command("m", flags(text_alone=True), quantizes=False)
    assert """--limit-mm-per-prompt '{"image": 0, "video": 0, "audio": 0}'""" in command
