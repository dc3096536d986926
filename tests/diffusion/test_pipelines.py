"""Pipelines by diffusers' own code: their bytes over the null driver, their parts, and published memory.

`.ci/full` runs all of them, `.ci/run` those whose name begins with "sample".
"""

from __future__ import annotations

import csv
import json
import os
import re
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sizer.allocator.timeline import PhaseUse
from sizer.architecture import quantizers
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, ConfigError, RequestError
from sizer.catalogue.pipelines import CAST, preset_names
from sizer.decision import peak
from sizer.diffusion import work
from sizer.diffusion.building import as_loaded, build_pipeline, diffusers_installed, reads_images
from sizer.diffusion.bundle import INDEX, read_bundle, read_preset
from sizer.diffusion.placing import BITSANDBYTES, _quantized
from sizer.diffusion.script import write_script
from sizer.diffusion.work import count
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.estimate import Estimate
from tests.diffusion.small import save_pipeline, small_files
from tests.diffusion.test_bundle import files_of
from tests.null_driver.conftest import Run, run_on_null  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]  # diffusers warns of its own deprecations

FOLDER = Path(__file__).parent
GPU = "h100-80gb"


def with_layers(name: str, layers: int) -> str:
    """Return the query of a preset's files with few layers of its transformer."""
    files = files_of(name)
    files["transformer/config.json"]["num_layers"] = layers
    return f"arch=config:{encode_config(json.dumps(files))}"


# A row of each way to hold weights, and of each kind of part. `sample-` begins what `.ci/run` repeats.
CASES = {
    "sample-sd1.5": "arch=diffusers:sd1.5&dtype=float16",
    "sample-sequential": "arch=diffusers:flux.1-dev&offload=sequential",
    "nf4": "arch=diffusers:flux.1-dev&weights=nf4&offload=model",
    "flux": "arch=diffusers:flux.1-dev",
    "model-offload": "arch=diffusers:flux.1-dev&offload=model",
    "stream": "arch=diffusers:sd1.5&dtype=float16&offload=group-leaf&stream=1",
    "group-leaf": "arch=diffusers:flux.1-dev&offload=group-leaf",
    CAST: "arch=diffusers:flux.1-dev&weights=fp8-cast",
    "sdxl": "arch=diffusers:sdxl&dtype=float16",
    "pixart": "arch=diffusers:pixart-sigma&dtype=float16&batch=2",
    "ltx": "arch=diffusers:ltx-video&frames=25",
    "wan": "arch=diffusers:wan2.1-t2v-1.3b&frames=13",
    "image-sd1.5": "arch=diffusers:sd1.5-img2img&dtype=float16&batch=2",
    "image": "arch=diffusers:sdxl-img2img&dtype=float16&image=512x768&offload=model",
    "mask": "arch=diffusers:sdxl-inpaint&dtype=float16",
    "fill": "arch=diffusers:flux.1-fill-dev&offload=model",
    "kontext": "arch=diffusers:flux.1-kontext-dev",
    "control": "arch=diffusers:flux.1-canny-dev&image=512x512",
    "controlnet": "arch=diffusers:sdxl-controlnet&dtype=float16",
    "controlnet-offload": "arch=diffusers:sd1.5-controlnet&dtype=float16&batch=2&offload=model",
    "edit": f"{with_layers('qwen-image-edit', 2)}&guidance=1",
    "image-to-video": f"{with_layers('wan2.1-i2v-14b', 4)}&frames=13&offload=model",
    "image-to-video-a14b": "arch=diffusers:wan2.2-i2v-a14b&frames=9&offload=sequential",
    "image-to-video-cogvideox": "arch=diffusers:cogvideox-5b-i2v&frames=9&vae=tiling",
    "tiling-hunyuan": f"{with_layers('hunyuan-video', 2)}&frames=21&image=320x512&vae=tiling",
    "tiling-nf4": f"{with_layers('hunyuan-video', 2)}&frames=9&image=320x512&vae=tiling&weights=nf4&offload=model",
    "tiling": "arch=diffusers:cogvideox-2b&frames=9&vae=tiling&dtype=float16",
}
# Those whose code splits what a mask selects
FOLLOWED = dict.fromkeys(("edit", "HiDreamImagePipeline", "HunyuanImagePipeline", "HunyuanVideo15Pipeline"), ("--values",))
# Parameters in billions, as model cards and papers give them, and to which part of a billion
PUBLISHED = {
    ("flux.1-dev", "transformer"): (12, 0.2),
    ("flux.2-dev", "transformer"): (32, 0.5),
    ("sd1.5", "unet"): (0.86, 0.005),
    ("sdxl", "unet"): (2.6, 0.05),
    ("sd3-medium", "transformer"): (2, 0.05),
    ("sd3.5-large", "transformer"): (8.1, 0.1),
    ("pixart-sigma", "transformer"): (0.6, 0.05),
    ("qwen-image", "transformer"): (20, 0.5),
    ("z-image-turbo", "transformer"): (6, 0.2),
    ("wan2.1-t2v-1.3b", "transformer"): (1.3, 0.15),
    ("wan2.1-t2v-14b", "transformer"): (14, 0.4),
    ("wan2.2-ti2v-5b", "transformer"): (5, 0.1),
    ("hunyuan-video", "transformer"): (13, 0.3),
    ("mochi", "transformer"): (10, 0.1),
    ("cogvideox-5b", "transformer"): (5, 0.6),
    ("flux.1-fill-dev", "transformer"): (12, 0.2),
    ("sdxl-controlnet", "controlnet"): (1.25, 0.005),
    ("sd1.5-controlnet", "controlnet"): (0.361, 0.0005),
    ("qwen-image-edit", "transformer"): (20, 0.5),
    ("wan2.1-i2v-14b", "transformer"): (16.4, 0.05),
    ("wan2.1-i2v-14b", "image_encoder"): (0.632, 0.002),
    ("wan2.2-i2v-a14b", "transformer_2"): (14, 0.4),
    ("ltx-video", "transformer"): (2, 0.1),
    ("latte", "transformer"): (1, 0.1),
}
QUANTITIES = {
    "load allocated": lambda row: row.phases[0].allocated_bytes,
    "load reserved": lambda row: row.phases[0].reserved_bytes,
    "after allocated": lambda row: row.phases[-1].allocated_bytes,
    "peak allocated": lambda row: row.peak_allocated_bytes,
    "peak reserved": lambda row: row.peak_reserved_bytes,
}


def estimated(query: str) -> Estimate:
    report = estimate(parse_query(query))
    assert not report.failures
    return report.estimates[0]


@pytest.mark.parametrize("name", CASES)
def test_a_call_takes_what_it_takes_on_cuda(run_on_null: Run, name: str) -> None:  # noqa: F811
    query = f"{CASES[name]}&gpu={GPU}"
    row = estimated(query)
    found = [row.phases[0].allocated_bytes, row.peak_allocated_bytes, row.peak_reserved_bytes]
    assert found == run_on_null("tests.diffusion.on_null", query, *FOLLOWED.get(name, ()), gpu=GPU)


# Small pipelines of classes that no preset has, and what is asked of them. What masks select is counted over the null driver.
SMALL_CASES = {
    "StableVideoDiffusionPipeline": "&image=64x64&frames=4",
    "MotifVideoPipeline": "&image=64x64&frames=5",
    "ChromaPipeline": "&image=128x128&seq=64",
    "CogView4Pipeline": "&image=128x128&seq=64",
    "AuraFlowPipeline": "&image=128x128",
    "HiDreamImagePipeline": "&image=128x128",
    "HunyuanImagePipeline": "&image=128x128",
    "HunyuanVideo15Pipeline": "&image=64x64&frames=5",
    "Kandinsky3Pipeline": "&image=128x128",
    "Kandinsky5T2VPipeline": "&image=128x128&frames=5",
    "CosmosTextToWorldPipeline": "&image=128x128&frames=9",
    "Cosmos2TextToImagePipeline": "&image=128x128",
    "StableDiffusionPAGPipeline": "&dtype=float16",
    "LatentConsistencyModelPipeline": "&offload=model",
}


OF_CI = ("MotifVideoPipeline", "AuraFlowPipeline", "Cosmos2TextToImagePipeline", "LatentConsistencyModelPipeline")


@pytest.mark.parametrize("kind", SMALL_CASES, ids=lambda kind: f"sample-{kind}" if kind in OF_CI else kind)
def test_a_small_pipeline_takes_what_it_takes_on_cuda(run_on_null: Run, kind: str) -> None:  # noqa: F811
    query = f"arch=config:{encode_config(json.dumps(small_files(kind)))}{SMALL_CASES[kind]}&gpu={GPU}"
    row = estimated(query)
    found = [row.phases[0].allocated_bytes, row.peak_allocated_bytes, row.peak_reserved_bytes]
    assert found == run_on_null("tests.diffusion.on_null", query, *FOLLOWED.get(kind, ()), gpu=GPU)


def test_sample_a_prompt_is_as_long_as_its_encoder_reads_also_if_files_leave_defaults_out() -> None:
    files = files_of("sd1.5")
    query = f"arch=config:{encode_config(json.dumps(files))}&dtype=float16&gpu={GPU}"
    for path in [one for one in files if one.startswith("tokenizer")]:
        del files[path]
    config = files["text_encoder/config.json"]
    assert config.pop("max_position_embeddings") == 77
    fewer = f"arch=config:{encode_config(json.dumps(files))}&dtype=float16&gpu={GPU}"
    assert estimated(fewer).phases == estimated(query).phases


@pytest.mark.parametrize("tokens", [10, 40, 144])
def test_sample_a_prompt_has_the_asked_tokens_behind_its_template(tokens: int) -> None:
    with torch.device("meta"):
        pipe = build_pipeline(read_preset("qwen-image"), torch.bfloat16, tokens=tokens)
    assert pipe.tokenizer.words == pipe.prompt_template_encode_start_idx + tokens


def test_a_safety_checker_in_a_package_of_its_own_is_left_out_with_a_note() -> None:
    query = f"arch=config:{encode_config(json.dumps(small_files('Cosmos2TextToImagePipeline')))}&image=128x128"
    _, notes, _ = count(parse_query(query))
    assert [note for note in notes if "cosmos_guardrail" in note]


def test_two_blended_rows_take_the_memory_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    query = f"{with_layers('hunyuan-video', 1)}&frames=5&image=320x512&vae=tiling&gpu={GPU}"
    twice = estimated(query)
    monkeypatch.setattr(work, "_BLENDED_ROWS", 2**20)
    assert estimated(query).phases == twice.phases


@pytest.mark.parametrize("name", preset_names())
def test_the_parts_of_a_preset_have_their_published_size(name: str) -> None:
    census, _, _ = count(parse_query(f"arch=diffusers:{name}"))
    sizes: dict[str, int] = {}
    for row in census.modules:
        part = row.path.partition(".")[0]
        sizes[part] = sizes.get(part, 0) + row.parameters
    for (preset, part), (billions, within) in PUBLISHED.items():
        if preset == name:
            assert sizes[part] / 1e9 == pytest.approx(billions, abs=within)


def test_every_family_has_a_published_size() -> None:
    assert {preset for preset, _ in PUBLISHED} <= set(preset_names())


def test_phases_are_the_parts_in_the_order_of_their_use() -> None:
    row = estimated(f"{CASES['sample-sd1.5']}&gpu={GPU}")
    assert [use.phase for use in row.phases] == ["load", "text_encoder", "unet", "vae", "after"]
    assert row.peak_phase == "vae"
    assert row.phases[-1].allocated_bytes < row.phases[0].allocated_bytes + 2**20


def test_sample_the_phase_of_a_part_begins_when_the_part_before_it_has_left_the_device() -> None:
    row = estimated(f"{CASES['image-sd1.5']}&offload=model&gpu={GPU}")
    peaks = {use.phase: use.peak_allocated_bytes for use in row.phases}
    assert list(peaks) == ["load", "text_encoder", "vae_encode", "unet", "vae", "after"]
    weights = 1_719_041_416  # bytes of the UNet
    assert max(peaks["text_encoder"], peaks["vae_encode"], peaks["vae"]) < weights < peaks["unet"]


def test_a_value_without_a_part_is_of_both_denoisers() -> None:
    parts = dict.fromkeys(("text_encoder", "transformer", "transformer_2"))
    held = [work.weights_of(parse_query(f"arch=diffusers:wan2.2-t2v-a14b&weights={value}"), parts) for value in ("nf4", CAST)]
    assert held == [dict.fromkeys(("transformer", "transformer_2"), how) for how in ("nf4", CAST)]


@pytest.mark.parametrize("value", ["int8", "unet:int8"])
def test_weights_in_int8_are_said_to_be_a_lower_bound(value: str) -> None:
    _, notes, _ = count(parse_query(f"arch=diffusers:sd1.5&weights={value}"))
    assert [note for note in notes if note.startswith("int8 is a lower bound")]


def test_a_call_that_starts_from_an_image_encodes_it_and_denoises_two_steps() -> None:
    query = f"{CASES['image-sd1.5']}&gpu={GPU}"
    row = estimated(query)
    assert [use.phase for use in row.phases] == ["load", "text_encoder", "vae_encode", "unet", "vae", "after"]
    _, notes, sizes = count(parse_query(query))
    assert sizes == {"image_size": (512, 512), "frames": None}
    assert "num_inference_steps=3, image=512x512" in notes[0]  # 0.8 of the steps: two of three


def test_the_image_that_a_call_starts_from_has_the_asked_size() -> None:
    _, notes, sizes = count(parse_query("arch=diffusers:sdxl-inpaint&image=512x768"))
    assert sizes["image_size"] == (512, 768)
    assert "image=512x768, mask_image=512x768" in notes[0]


def test_what_is_offloaded_is_in_the_memory_of_the_host() -> None:
    row = estimated(f"{CASES['sample-sequential']}&gpu={GPU}")
    weights = 33_741_198_278  # bytes on the device without offloading
    assert row.phases[0].allocated_bytes < 2**20
    assert weights <= row.host_bytes < weights * 1.01


@pytest.mark.parametrize(
    ("asked", "copied"),
    [
        ("", [False, False]),
        ("&offload=model", [True, False]),
        ("&offload=sequential", [True, True]),
        ("&offload=group-leaf&stream=1", [True, True]),
    ],
)
def test_sample_offloading_copies_the_weights_once_or_at_each_step(asked: str, copied: list[bool]) -> None:
    row = estimated(f"{CASES['image-sd1.5']}{asked}&gpu={GPU}")
    assert [row.copied_bytes > 0, row.step_copied_bytes > 0] == copied
    if row.step_copied_bytes:
        assert row.step_copied_bytes == pytest.approx(1_719_041_416, abs=1024)  # the UNet
    elif row.copied_bytes:
        assert row.copied_bytes == pytest.approx(row.host_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("arch=diffusers:flux.1-dev&frames=9", "frames"),
        ("arch=diffusers:sd1.5&image=514x512", "image"),
        ("arch=diffusers:sd1.5&weights=transformer:nf4", "weights"),
        ("arch=diffusers:flux.1-dev&weights=int8&offload=model", "offload"),
        ("arch=diffusers:flux.1-dev&weights=nf4&offload=group-leaf", "offload"),
        ("arch=diffusers:flux.1-dev&weights=text_encoder_2:nf4-dq&offload=group-block:2", "offload"),
        ("arch=diffusers:latte&frames=9", "frames"),
        ("arch=diffusers:sd1.5-img2img&image=514x512", "image"),
        ("arch=diffusers:sdxl-inpaint&frames=9", "frames"),
        ("arch=diffusers:flux.1-kontext-dev&mode=training&train=adapter", "mode"),
        ("arch=diffusers:flux.1-dev&without=text_encoder_3", "without"),
        ("arch=diffusers:sd1.5&without=text_encoder", "without"),
        ("arch=diffusers:flux.1-dev&output=video", "output"),
        ("arch=diffusers:flux.1-dev&seq=513", "seq"),
        ("arch=diffusers:sdxl&seq=300", "seq"),
        ("arch=diffusers:cogvideox-2b&seq=64", "seq"),
        ("arch=diffusers:hunyuan-video&image=328x512", "image"),
        ("arch=diffusers:mochi&image=240x424", "image"),
        ("arch=diffusers:flux.1-dev&offload=group-block:0", "offload"),
        ("arch=diffusers:sd1.5&dtype=float16&weights=text_encoder:fp8-cast", "weights"),
        ("arch=diffusers:cogvideox-5b-i2v&image=256x256&frames=9", "image"),
    ],
)
def test_what_a_pipeline_does_not_take_is_refused_by_its_key(query: str, key: str) -> None:
    with pytest.raises(RequestError) as refused:
        estimate(parse_query(query))
    assert str(refused.value).startswith(f"{key}: given")


def test_a_length_that_a_call_refuses_is_told_in_its_own_words() -> None:
    with pytest.raises(RequestError, match=r"seq: given 513, .*cannot be greater than 512"):
        count(parse_query("arch=diffusers:flux.1-dev&seq=513"))


@pytest.mark.parametrize("how", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_t5_keeps_in_float32_what_transformers_does_not_quantize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, dtype: torch.dtype
) -> None:
    from transformers import BitsAndBytesConfig, T5Config, T5EncoderModel

    sizes = {"vocab_size": 100, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu")
    T5EncoderModel(config).to(dtype).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(**BITSANDBYTES[how])
    loaded = T5EncoderModel.from_pretrained(tmp_path, dtype=dtype, device_map={"": "cpu"}, quantization_config=options)
    monkeypatch.setattr(quantizers, "load_quantized", lambda module, device: module)
    with torch.device("meta"):
        made = _quantized(as_loaded(T5EncoderModel(config), dtype), how, dtype)
    plain = [
        {path: one.weight.dtype for path, one in model.named_modules() if type(one) is torch.nn.Linear}
        for model in (loaded, made)
    ]
    assert plain[0] == plain[1]
    assert [path for path in plain[0] if path.endswith(".wo")]


@pytest.mark.parametrize(
    ("path", "key", "value", "error"),
    [
        ("model_index.json", "scheduler", ["diffusers", "DDIMSchedular"], "did you mean DDIMScheduler"),
        ("model_index.json", "scheduler", [None, None], "part 'scheduler' is null"),
        ("model_index.json", "unet", [None, None], "part 'unet' is null"),
        ("model_index.json", "tokenizer", [None, None], "part 'tokenizer' is null"),
        ("model_index.json", "tokenizer", None, "part 'tokenizer' is missing"),
        ("model_index.json", "vae", None, "part 'vae' is missing"),
        ("model_index.json", "unet", ["transformers", "pipeline"], "pipeline of unet is not a model"),
        ("model_index.json", "unet", ["diffusers", "DiffusionPipeline"], "is not a model"),
        ("model_index.json", "_class_name", "FluxTransformer2DModel", "is not a pipeline"),
        ("model_index.json", "_class_name", "AutoPipelineForText2Image", "is not a pipeline"),
        ("model_index.json", "_class_name", "StableDifusionPipeline", "did you mean .*StableDiffusionPipeline"),
        ("text_encoder/config.json", "hidden_size", 7, "CLIPTextModel refuses the config of text_encoder"),
        ("scheduler/scheduler_config.json", "num_train_timesteps", 0, "refuses the config of scheduler"),
        ("scheduler/scheduler_config.json", "beta_schedule", "none", "refuses the config of scheduler"),
    ],
)
def test_files_with_a_fault_are_refused_by_the_name_of_the_part(path: str, key: str, value: object, error: str) -> None:
    files = files_of("sd1.5")
    files[path] = {name: one for name, one in {**files[path], key: value}.items() if one is not None}
    with pytest.raises((BuildError, ConfigError), match=error):
        count(parse_query(f"arch=config:{encode_config(json.dumps(files))}"))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sdxl", "tokenizer"),
        ("sdxl", "tokenizer_2"),
        ("sdxl", "text_encoder"),
        ("sdxl", "text_encoder_2"),
        ("sd3-medium", "tokenizer_3"),
        ("flux.1-dev", "text_encoder"),
        ("sd1.5-controlnet", "controlnet"),
        ("wan2.1-t2v-1.3b", "transformer"),
        ("wan2.1-i2v-14b", "image_encoder"),
        ("qwen-image-edit", "processor"),
    ],
)
def test_a_null_part_that_the_call_needs_is_refused_by_its_name(name: str, part: str) -> None:
    files = files_of(name)
    files["model_index.json"][part] = [None, None]
    small = "&image=256x256" + ("&frames=5" if name.startswith("wan") else "")
    with pytest.raises(ConfigError, match=rf"\b{part}\b.* null"):
        estimate(parse_query(f"arch=config:{encode_config(json.dumps(files))}{small}"))


def test_a_part_that_the_class_calls_optional_may_be_missing() -> None:
    files = files_of("sd1.5")
    for part in ("safety_checker", "feature_extractor", "image_encoder"):
        files["model_index.json"].pop(part)
    query = f"arch=config:{encode_config(json.dumps(files))}&dtype=float16&gpu={GPU}"
    assert estimated(query).phases == estimated(f"{CASES['sample-sd1.5']}&gpu={GPU}").phases


@pytest.mark.parametrize(
    ("query", "asked", "taken", "note"),
    [
        ("wan2.1-t2v-1.3b&image=256x256", "&frames=50", "&frames=49", "frames=50 is traced as frames=49"),
        ("wan2.1-t2v-1.3b&image=256x256", "&frames=12", "&frames=13", "frames=12 is traced as frames=13"),
        ("ltx-video&image=256x256", "&frames=12", "&frames=9", "frames=12 is traced as frames=9"),
        ("mochi&image=256x256", "&frames=12", "&frames=7", "frames=12 is traced as frames=7"),
        ("cogvideox-2b&image=256x256", "&frames=12", "&frames=9", "frames=12 is traced as frames=9"),
        ("flux.1-schnell", "&image=264x256", "&image=256x256", "image=264x256 is traced as image=256x256"),
        ("pixart-sigma", "&image=264x256", "&image=1024x1024", "image=264x256 is traced as image=1024x1024"),
    ],
)
def test_what_a_call_rounds_is_told_with_both_numbers(query: str, asked: str, taken: str, note: str) -> None:
    given, rounded = (estimate(parse_query(f"arch=diffusers:{query}{size}&gpu={GPU}")) for size in (asked, taken))
    assert [one for one in given.notes if note in one]
    assert not [one for one in rounded.notes if one.startswith(("frames=", "image="))]
    assert given.estimates[0].phases == rounded.estimates[0].phases
    assert [given.request[key] for key in ("image_size", "frames")] == [rounded.request[key] for key in ("image_size", "frames")]


def test_pasted_files_and_their_preset_take_the_same_bytes() -> None:
    files = files_of("sd1.5")
    pasted = f"arch=config:{encode_config(json.dumps(files))}&dtype=float16&gpu={GPU}"
    row, preset = estimated(pasted), estimated(f"{CASES['sample-sd1.5']}&gpu={GPU}")
    assert row.phases == preset.phases


def test_files_without_a_tokenizers_config_take_the_same_bytes() -> None:
    files = {path: content for path, content in files_of("sd1.5").items() if not path.startswith("tokenizer")}
    query = f"arch=config:{encode_config(json.dumps(files))}&dtype=float16&gpu={GPU}"
    assert estimated(query).phases == estimated(f"{CASES['sample-sd1.5']}&gpu={GPU}").phases  # CLIP reads 77 tokens


@pytest.mark.parametrize("query", ["cogvideox-5b-i2v&frames=9", "wan2.1-i2v-14b&frames=5&image=256x256"])
def test_a_batch_of_videos_that_start_from_an_image_takes_more_than_one(query: str) -> None:
    one, two = (estimated(f"arch=diffusers:{query}&batch={batch}&gpu={GPU}") for batch in (1, 2))
    assert two.peak_allocated_bytes > one.peak_allocated_bytes


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("MarigoldDepthPipeline", True),
        ("Kandinsky5I2IPipeline", True),
        ("StableDiffusionAdapterPipeline", True),
        ("FluxPipeline", False),
        ("Flux2Pipeline", False),  # which takes one, and needs none
    ],
)
def test_a_call_that_requires_an_image_is_given_one(name: str, reads: bool) -> None:
    assert reads_images(read_bundle({INDEX: {"_class_name": name}})) == reads


@pytest.mark.parametrize(("name", "needs"), [("DiTPipeline", "class_labels"), ("LucyEditPipeline", "video")])
def test_a_call_that_requires_other_inputs_is_refused_by_their_names(name: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs {needs}"):
        build_pipeline(read_bundle({INDEX: {"_class_name": name}}), torch.bfloat16)


class _Lacking:
    """A pipeline without a package that it needs, as diffusers' placeholder of it is (diffusers/utils/dummy_*_objects.py)."""

    _backends = ("sentencepiece",)

    def __init__(self, **parts: object) -> None:
        raise ImportError("KolorsPipeline requires the sentencepiece library")

    def __call__(self, prompt: str = "") -> None:
        """Take what the pipeline takes."""


def test_a_package_that_a_pipeline_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers_installed(), "KolorsPipeline", _Lacking)
    with pytest.raises(BuildError, match="sentencepiece"):
        build_pipeline(read_bundle({INDEX: {"_class_name": "KolorsPipeline"}}), torch.bfloat16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small pipeline in a folder, and the query of its files."""
    folder = tmp_path_factory.mktemp("pipeline")
    return folder, f"arch=config:{encode_config(json.dumps(save_pipeline(folder)))}&dtype=float16&gpu={GPU}"


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("weights=unet:nf4,text_encoder:nf4&offload=model&batch=2&vae=both", id="sample-nf4"),
        "offload=sequential",
        "offload=group-block:1&stream=1",
        "weights=fp8-cast&output=latent&guidance=0",
    ],
)
def test_the_script_of_a_call_measures_what_it_says_of_the_estimate(saved: tuple[Path, str], asked: str, tmp_path: Path) -> None:
    folder, query = saved
    text = peak.script(parse_query(f"{query}&{asked}"))
    (file := tmp_path / "call.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "sizer", "run", "--gpu", GPU, "--route", "driver", "--", str(file), str(folder)]
    # diffusers loads the parts in the order of a set of words; with this seed the text encoder comes before the U-Net, as estimated
    in_order = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=in_order)
    found = re.findall(r"^(\w[\w ]+): ([\d,]+) bytes .* estimated ([\d,]+) bytes", done.stdout, re.MULTILINE)
    assert len(found) == 5, done.stderr[-2000:]
    assert {name: size for name, size, _ in found} == {name: size for name, _, size in found}


@pytest.mark.parametrize(
    ("query", "lines"),
    [
        ("wan2.1-i2v-14b&frames=5", ['"vae": torch.float32', 'image=Image.new("RGB", (832, 480))', "transformer_2=None"]),
        ("sd3-medium&without=text_encoder_3&batch=2", ["text_encoder_3=None", "tokenizer_3=None", "num_images_per_prompt=2"]),
        ("flux.1-dev&weights=nf4,text_encoder_2:int8", ['"transformer": diffusers.Bits', '"text_encoder_2": transformers.Bits']),
        ("wan2.2-t2v-a14b&weights=fp8-cast&frames=5", ["pipe.transformer.enable_layer", "pipe.transformer_2.enable_layer"]),
        ("sd1.5&weights=text_encoder:fp8-cast", ["apply_layerwise_casting(pipe.text_encoder, "]),
    ],
)
def test_a_script_has_the_lines_of_what_is_asked(query: str, lines: list[str]) -> None:
    phases = [PhaseUse(phase=name, allocated_bytes=0, peak_allocated_bytes=0, reserved_bytes=0) for name in ("load", "vae")]
    request = parse_query(f"arch=diffusers:{query}")
    text = write_script(request, None, SimpleNamespace(phases=phases, peak_reserved_bytes=0))
    compile(text, "call.py", "exec")
    assert [line for line in lines if line not in text] == []


def measured() -> list[dict[str, str]]:
    with open(FOLDER / "measured.csv", newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


@pytest.mark.parametrize("query", dict.fromkeys(row["query"] for row in measured()))
def test_a_measured_call_has_its_recorded_error(query: str) -> None:
    row = estimated(query)
    for one in measured():
        if one["query"] == query:
            found = QUANTITIES[one["quantity"]](row)
            assert found == int(one["estimated_bytes"]), one["quantity"]
            assert found == pytest.approx(int(one["measured_bytes"]), rel=0.035), one["quantity"]


def published() -> list[dict[str, str]]:
    with open(FOLDER / "published.csv", newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def test_published_figures_without_a_reason_are_within_the_aims() -> None:
    errors = [abs(float(row["error"].rstrip("%"))) for row in published() if not row["reason"]]
    assert len(errors) >= 30
    assert statistics.median(errors) <= 0.15
    assert max(errors) <= 1.2


@pytest.mark.parametrize("row", published(), ids=lambda row: row["id"])
def test_a_published_figure_is_near_unless_a_reason_is_named(row: dict[str, str]) -> None:
    found = QUANTITIES[row["quantity"]](estimated(row["query"])) / 2**30
    error = found / float(row["published_gib"]) - 1
    if os.environ.get("SIZER_RECORD_LIBRARIES"):
        print(
            row["id"], f"{error:+.2%}", *(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers"))
        )
    assert f"{error:+.2%}" == row["error"]
    assert abs(error) < 0.012 or row["reason"]
