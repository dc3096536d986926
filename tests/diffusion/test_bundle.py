"""Pipelines as their files describe them, and what a query may ask of them. No test here needs diffusers."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import asdict

import pytest

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, ConfigError, RequestError
from sizer.catalogue.pipelines import PART_NAME, preset_names
from sizer.diffusion.bundle import INDEX, file_of, preset_data, read_bundle, read_preset
from sizer.estimating.estimator import estimate
from sizer.query.text import format_query, parse_query
from sizer.tape.tape import PIPELINE_PHASES
from tests.query.test_request import as_a_job_tells_it

FLUX = "arch=diffusers:flux.1-dev"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_describes_all_its_parts(name: str) -> None:
    bundle = read_preset(name)
    assert bundle.denoiser
    assert set(bundle.with_weights) <= set(PIPELINE_PHASES)
    assert all(PART_NAME.fullmatch(part) for part in bundle.with_weights)
    assert set(bundle.float32) <= set(bundle.with_weights)
    assert parse_query(f"arch=diffusers:{name}").name == name


def files_of(name: str) -> dict:
    return copy.deepcopy(preset_data(name)["files"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({INDEX: None}, INDEX),
        ({"vae/config.json": None}, "vae/config.json"),
        ({INDEX: {"_class_name": "FluxPipeline", "vae": ["of_a_stranger", "Vae"]}}, "vae"),
        ({INDEX: {"_class_name": "FluxPipeline", "vae": ["diffusers"]}}, "vae"),
        ({INDEX: {"_class_name": "WanVideoToVideoPipeline"}}, "WanVideoToVideoPipeline needs inputs"),
        ({INDEX: {"_class_name": "FluxPriorReduxPipeline"}}, "FluxPriorReduxPipeline needs inputs"),
        ({INDEX: {"_class_name": "QwenImageEditPlusPipeline"}}, "QwenImageEditPlusPipeline needs inputs"),
        ({INDEX: {"_class_name": "HunyuanVideoImageToVideoPipeline"}}, "HunyuanVideoImageToVideoPipeline needs inputs"),
        ({INDEX: {"_class_name": "CogVideoXFunControlPipeline"}}, "CogVideoXFunControlPipeline needs inputs"),
        ({INDEX: {"_class_name": "WanVACEPipeline"}}, "WanVACEPipeline needs inputs"),
        ({INDEX: {"_class_name": "IFSuperResolutionPipeline"}}, "IFSuperResolutionPipeline needs inputs"),
        ({INDEX: {"_class_name": "LTXLatentUpsamplePipeline"}}, "LTXLatentUpsamplePipeline needs inputs"),
        ({INDEX: {"_class_name": "FluxPipeline", "controlnet": ["diffusers", "MultiControlNetModel"]}}, "several ControlNets"),
        ({INDEX: {"_class_name": "FluxPipeline", "ip_adapter": ["diffusers", "IPAdapter"]}}, "ip_adapter belongs to an IP-Adapter"),
        ({"transformer/config.json": {"encoder_hid_dim_type": "ip_image_proj"}}, "transformer belongs to an IP-Adapter"),
    ],
)
def test_a_bundle_that_lacks_a_file_is_refused_by_its_name(changed: dict, said: str) -> None:
    files = {path: content for path, content in (files_of("flux.1-dev") | changed).items() if content is not None}
    with pytest.raises(ConfigError, match=said):
        read_bundle(files)


def test_lists_of_numbers_are_options_and_classes_of_pipelines_are_parts() -> None:
    index = {"_class_name": "Krea2Pipeline", "layers": [0, 1], "text_encoder": ["kolors", "ChatGLMModel"]}
    index |= {"guider": ["diffusers", "ClassifierFreeGuidance"]}
    bundle = read_bundle({INDEX: index, "text_encoder/config.json": {}})
    assert bundle.options == {"layers": [0, 1]}
    assert bundle.with_weights == ("text_encoder",)
    assert file_of("guider", "ClassifierFreeGuidance") == "guider/guider_config.json"


def test_pasted_files_are_read_as_their_preset_is() -> None:
    nested = {
        f"FLUX.1-dev/{path}" if path != INDEX else path: content for path, content in files_of("flux.1-dev").items()
    }
    assert read_bundle(nested).parts == read_preset("flux.1-dev").parts


def test_pasted_files_are_a_pipeline_in_every_form_of_a_query() -> None:
    request = parse_query(f"arch=config:{encode_config(json.dumps(files_of('flux.1-dev')))}&offload=model")
    assert (request.source, request.mode, request.batches) == ("diffusers", "inference", (1,))
    assert parse_query(format_query(request)) == request
    pasted, preset = (
        sorted(bundle.parts, key=lambda part: part.name)
        for bundle in (read_bundle(json.loads(request.config)), read_preset("flux.1-dev"))
    )
    assert pasted == preset


def test_a_pipeline_has_defaults_of_its_own() -> None:
    assert format_query(parse_query(FLUX)) == FLUX
    assert parse_query(FLUX) == parse_query(f"{FLUX}&mode=inference&dtype=bfloat16&batch=1")


@pytest.mark.parametrize(
    "asked",
    [
        "offload=model",
        "offload=group-block:2&stream=1",
        "weights=fp8-cast",
        "weights=nf4",
        "weights=transformer:nf4,text_encoder_2:int8",
        "image=512x768&frames=9&vae=tiling,slicing&guidance=0&output=latent&without=text_encoder_3",
    ],
)
def test_what_is_asked_of_a_pipeline_is_written_as_it_is_read(asked: str) -> None:
    request = parse_query(f"{FLUX}&{asked}")
    assert parse_query(format_query(request)) == request
    assert parse_query(format_query(request, complete=True)) == request
    assert as_a_job_tells_it(request) == asdict(request)


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ("arch=diffusers:flux.3", "arch"),
        ("arch=diffusers:sdxl-ip-adapter", "arch"),
        ("arch=diffusers:h94/IP-Adapter", "arch"),
        (f"{FLUX}&mode=generate", "mode"),
        (f"{FLUX}&offload=1", "offload"),
        (f"{FLUX}&offload=group-block:0", "offload"),
        (f"{FLUX}&offload=model:2", "offload"),
        (f"{FLUX}&stream=1", "stream"),
        (f"{FLUX}&weights=transformer:gguf", "weights"),
        (f"{FLUX}&weights=nf4,nf4", "weights"),
        (f"{FLUX}&tp=2", "tp"),
        (f"{FLUX}&gpu=m2-ultra-192gb", "gpu"),
        ("arch=hf:llama-3.1-8b&weights=transformer:nf4", "weights"),
        ("arch=hf:llama-3.1-8b&offload=model", "offload"),
        ("arch=torchvision:resnet50&frames=9", "frames"),
        ("arch=torchvision:resnet50&vae=tiling", "vae"),
    ],
)
def test_what_a_pipeline_or_another_model_does_not_take_is_refused_by_its_key(query: str, key: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_query(query)
    assert key in {refusal.key for refusal in refused.value.refusals}


def test_without_diffusers_the_answer_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(BuildError, match="pip install diffusers"):
        estimate(parse_query(FLUX))
