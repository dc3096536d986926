"""Training of denoisers: bytes over the null driver, what a step trains, and what is refused.

`.ci/full` runs all of them, `.ci/run` those whose name begins with "sample", and those without diffusers.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.diffusion.bundle import read_bundle
from sizer.estimating.estimator import estimate
from sizer.query.text import format_query, parse_query
from sizer.report.estimate import Estimate
from tests.diffusion.test_bundle import files_of
from tests.null_driver.conftest import Run, run_on_null  # noqa: F401 (a fixture)

LAYERS = {"num_layers": 2}
BOTH = {"num_layers": 2, "num_single_layers": 2}
# Presets with few layers: how many, and the size of an image or a video.
MODELS = {
    "flux.1-dev": (BOTH, "&image=512x512"),
    "flux.2-klein-4b": (BOTH, "&image=512x512"),
    "sd3-medium": (LAYERS, "&image=512x512"),
    "qwen-image": (LAYERS, "&image=512x512"),
    "z-image-turbo": ({"n_layers": 2}, "&image=512x512"),
    "pixart-sigma": (LAYERS, "&image=512x512"),
    "wan2.1-t2v-1.3b": (LAYERS, "&frames=5&image=256x256"),
    "cogvideox-2b": (LAYERS, "&frames=9"),
    "ltx-video": (LAYERS, "&frames=9&image=256x256"),
    "hunyuan-video": (BOTH, "&frames=5&image=256x256"),
    "mochi": (LAYERS, "&frames=7"),
    "latte": (LAYERS, ""),
}
LORA = "&train=adapter&r=4&batch=2&checkpointing=1&gpu=h100-80gb"
CASES = {
    "sample-lora": ("flux.1-dev", LORA),
    "nf4": ("z-image-turbo", "&train=adapter&r=4&gpu=rtx-4090&weights=nf4&dtype=float16&optimizer=adamw-8bit"),
    **{f"lora-{name}": (name, LORA) for name in MODELS},
    "nf4-dq": ("flux.1-dev", "&train=adapter&gpu=a100-80gb&batch=3&weights=nf4-dq&prepare=0&accumulate=2"),
    "nf4-float16": ("qwen-image", "&train=adapter&r=4&gpu=rtx-4090&weights=nf4&dtype=float16"),
    "int8": ("sd3-medium", "&train=adapter&gpu=t4&weights=int8&dtype=float16&checkpointing=1"),
    **{
        f"cached-{cached}-{name}": (name, f"{LORA}&cached={cached}")
        for cached in ("none", "prompts", "latents")
        for name in ("flux.1-dev", "sd3-medium", "qwen-image", "z-image-turbo")
    },
    "cached-nf4": ("flux.1-dev", "&train=adapter&gpu=rtx-4090&weights=nf4&dtype=float16&optimizer=adamw-8bit&cached=prompts"),
    "amp": ("ltx-video", "&dtype=amp-bfloat16&gpu=rtx-4090&optimizer=adamw-8bit"),
    "amp-pixart": ("pixart-sigma", "&dtype=amp-bfloat16&gpu=rtx-4090&optimizer=adamw-8bit"),
    "amp-lists": ("z-image-turbo", "&dtype=amp-bfloat16&gpu=rtx-4090&optimizer=adamw-8bit"),
}
ATTENTION_OF_BOTH = (
    "attn.to_k,attn.to_q,attn.to_v,attn.to_out.0,attn.add_k_proj,attn.add_q_proj,attn.add_v_proj,attn.to_add_out"
)
SD15 = "arch=diffusers:sd1.5&mode=training"


def query_of(name: str, keys: str) -> str:
    layers, size = MODELS[name]
    files = files_of(name)
    files["transformer/config.json"] = {**files["transformer/config.json"], **layers}
    return f"arch=config:{encode_config(json.dumps(files))}&mode=training{size}{keys}"


def estimated(query: str) -> Estimate:
    report = estimate(parse_query(query))
    assert not report.failures
    return report.estimates[0]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_it_takes_on_cuda(run_on_null: Run, name: str) -> None:  # noqa: F811
    query = query_of(*CASES[name])
    row = estimated(query)
    found = run_on_null("tests.null_driver.recipes", "--one", query, gpu=parse_query(query).gpu)
    assert found["failure"] is None
    assert {phase.phase: phase.peak_allocated_bytes for phase in row.phases} == found["phases"]
    assert [row.peak_allocated_bytes, row.peak_reserved_bytes] == [found["allocated"], found["reserved"]]


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    ["&train=adapter&r=4&batch=2", "&train=adapter&r=4&batch=2&cached=none", "&dtype=amp-bfloat16&checkpointing=1"],
)
def test_a_step_of_a_whole_unet_takes_what_it_takes_on_cuda(run_on_null: Run, keys: str) -> None:  # noqa: F811
    query = f"{SD15}&gpu=h100-80gb{keys}"
    row = estimated(query)
    found = run_on_null("tests.null_driver.recipes", "--one", query, gpu="h100-80gb")
    assert {phase.phase: phase.peak_allocated_bytes for phase in row.phases} == found["phases"]
    assert row.peak_reserved_bytes == found["reserved"]


@pytest.mark.full
def test_flux_trains_as_many_parameters_as_its_script_says() -> None:
    # examples/research_projects/flux_lora_quantization: 4,669,440 at rank 4
    report = estimate(
        parse_query(
            "arch=diffusers:flux.1-dev&mode=training&train=adapter&r=4&image=512x768&seq=77&gpu=rtx-4090&weights=nf4"
            "&optimizer=adamw-8bit&checkpointing=1"
        )
    )
    assert report.model.trainable_parameters == 4_669_440
    (row,) = report.estimates
    assert 8.9e9 < row.process_bytes < 9.4e9  # its README: about 9 GB


@pytest.mark.full
def test_sample_what_one_trace_leaves_is_not_found_by_the_next() -> None:
    several = estimate(parse_query(query_of("qwen-image", "&train=adapter&batch=1,2&gpu=h100-80gb"))).estimates
    alone = estimated(query_of("qwen-image", "&train=adapter&batch=2&gpu=h100-80gb"))
    assert several[1].phases == alone.phases  # tables of rotary positions, which a method keeps by device


@pytest.mark.full
def test_sample_frames_that_a_vae_does_not_take_are_told_of_a_training() -> None:
    query = query_of("ltx-video", "&train=adapter&gpu=h100-80gb").replace("frames=9", "frames=12")
    given, rounded = (estimate(parse_query(one)) for one in (query, query.replace("frames=12", "frames=9")))
    assert [one for one in given.notes if "frames=12 is traced as frames=9" in one]
    assert given.estimates[0].phases == rounded.estimates[0].phases


@pytest.mark.full
def test_sample_a_batch_of_cogvideox_is_of_prompts() -> None:
    one, two = (estimated(query_of("cogvideox-2b", f"&train=adapter&batch={batch}&gpu=h100-80gb")) for batch in (1, 2))
    assert two.activations_bytes > 1.9 * one.activations_bytes


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("&offload=model", "offload: given 'model' without mode=inference"),
        ("&vae=tiling", "vae: given 'tiling' without mode=inference"),
        ("&weights=transformer:nf4&train=adapter", "weights: given 'transformer:nf4' with mode=training"),
        ("&weights=fp8-cast&train=adapter", "weights: given 'fp8-cast' with mode=training"),
        ("&weights=nf4", "weights: given 'nf4' without train=adapter"),
        ("&weights=fp8&train=adapter", "weights: given 'fp8' with a diffusers architecture"),
        ("&train=head", "train: given 'head' with a diffusers architecture"),
        ("&train=adapter&adapter=prefix", "adapter: given 'prefix' with a diffusers architecture"),
        ("&train=adapter&dtype=amp-bfloat16", "dtype: given amp-bfloat16 with a diffusers architecture"),
        ("&cached=none", "cached: given 'none' without train=adapter"),
        ("&train=adapter&targets=script,to_q", "targets: given 'script,to_q'"),
        ("&train=adapter&cached=1", "cached: given '1'"),
        ("&parallel=fsdp", "parallel: given 'fsdp' with a diffusers architecture"),
        ("&objective=dpo", "objective: given 'dpo' without an architecture of one module"),
    ],
)
def test_what_a_denoisers_training_does_not_take_is_refused_by_its_key(keys: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_query(f"{SD15}{keys}")
    assert said in str(refused.value)


def test_a_call_encodes_nothing_before_it() -> None:
    with pytest.raises(RequestError, match="cached: given 'none' without mode=training"):
        parse_query("arch=diffusers:sd1.5&cached=none")


@pytest.mark.full
def test_sample_parts_beside_a_denoiser_are_counted_and_stay_as_scripts_load_them() -> None:
    query = query_of("sd3-medium", "&train=adapter&r=4&batch=2&gpu=h100-80gb&cached=prompts")
    report = estimate(parse_query(query))
    cached = estimate(parse_query(query.replace("&cached=prompts", "")))
    assert report.model.class_name == cached.model.class_name == "SD3Transformer2DModel"
    vae = report.model.parameters - cached.model.parameters
    added = report.estimates[0].weights_bytes - cached.estimates[0].weights_bytes
    assert added == 4 * vae  # the VAE of SD3 stays in float32
    assert vae == 83_819_683
    assert report.model.trainable_parameters == cached.model.trainable_parameters


@pytest.mark.full
def test_sample_a_pipeline_without_a_script_refuses_to_encode_in_a_step() -> None:
    with pytest.raises(RequestError, match="cached: given 'prompts' with WanPipeline"):
        estimate(parse_query("arch=diffusers:wan2.1-t2v-1.3b&mode=training&train=adapter&cached=prompts"))


def test_a_call_has_no_mixed_precision() -> None:
    with pytest.raises(RequestError, match="dtype: given amp-float16 with a diffusers architecture"):
        parse_query("arch=diffusers:sd1.5&dtype=amp-float16")


@pytest.mark.parametrize(
    "query",
    [
        SD15,
        "arch=diffusers:sd1.5",
        f"{SD15}&dtype=float32,bfloat16&batch=1,2&train=adapter",
        f"{SD15}&train=adapter&targets=all-linear",
        f"{SD15}&dtype=float32,bfloat16,float16,amp-bfloat16,amp-float16&batch=1,2,4,8,16,32,64,128",
        "arch=hf:gpt2&train=adapter&targets=all-linear",
    ],
)
def test_a_link_asks_what_its_query_asked(query: str) -> None:
    request = parse_query(query)
    assert parse_query(format_query(request)) == request


def test_an_adapter_of_a_denoiser_adapts_what_diffusers_scripts_adapt() -> None:
    assert parse_query(f"{SD15}&train=adapter").adapter_targets == ("script",)
    assert parse_query("arch=hf:gpt2&train=adapter").adapter_targets == ("all-linear",)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("sd3-medium", ATTENTION_OF_BOTH),
        ("flux.1-dev", f"{ATTENTION_OF_BOTH},ff.net.0.proj,ff.net.2,ff_context.net.0.proj,ff_context.net.2"),
        ("flux.1-dev+nf4", "to_k,to_q,to_v,to_out.0"),  # of flux_lora_quantization
        ("z-image-turbo", "to_k,to_q,to_v,to_out.0"),
        (
            "flux.2-klein-4b",
            "to_k,to_q,to_v,to_out.0,to_qkv_mlp_proj,single_transformer_blocks.0.attn.to_out,single_transformer_blocks.1.attn.to_out",
        ),
    ],
)
def test_sample_a_script_names_the_layers_that_are_adapted(name: str, named: str) -> None:
    preset, _, weights = name.partition("+")
    query = query_of(preset, f"&train=adapter&r=4&gpu=rtx-4090&weights={weights or 'checkpoint'}")
    by_default, by_names = (estimate(parse_query(f"{query}{targets}")) for targets in ("", f"&targets={named}"))
    assert by_default.model.trainable_parameters == by_names.model.trainable_parameters > 0
    assert by_default.estimates[0].phases == by_names.estimates[0].phases


def test_numbers_that_json_lacks_come_back_from_pasted_files() -> None:
    files = files_of("pixart-sigma")
    pasted = parse_query(f"arch=config:{encode_config(json.dumps(files))}")
    bundle = read_bundle(json.loads(pasted.config))
    scheduler = next(part for part in bundle.parts if part.name == "scheduler")
    assert scheduler.config["lambda_min_clipped"] == -torch.inf


@pytest.mark.skipif(find_spec("diffusers") is not None, reason="diffusers is installed")
def test_diffusers_is_named_if_it_is_missing() -> None:
    with pytest.raises(BuildError, match="diffusers is not installed"):
        estimate(parse_query(SD15))
