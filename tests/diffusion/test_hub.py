"""Pipelines of the hub: their files are fetched, and read as a preset or a pasted bundle is."""

from __future__ import annotations

import argparse
import json
from urllib.parse import unquote

import pytest

import sizer
from sizer.__main__ import main
from sizer.architecture.hub_files import fetch_config
from sizer.base.config_json import MAX_CONFIG_BYTES, encode_config, read_config
from sizer.base.errors import HubError, RequestError
from sizer.catalogue.sources import fetch
from sizer.commands import estimate_command
from sizer.commands.arguments import query_of
from sizer.diffusion.bundle import INDEX, read_bundle, read_preset
from sizer.diffusion.hub import fetch_bundle
from sizer.estimating import estimator
from sizer.query.text import as_pipeline, format_query, parse_query
from tests.diffusion.test_bundle import files_of
from tests.hub import REPO, Hub

NAME = "sd1.5"


def serve(hub: Hub, files: dict, revision: str = "main") -> None:
    """Answer with the files of a pipeline, and as the hub does for a file that a repository lacks."""
    for path in (INDEX, "config.json", "adapter_config.json"):
        hub.routes[f"/{REPO}/resolve/{revision}/{path}"] = lambda handler: handler.answer(
            404, X_Error_Code="EntryNotFound"
        )
    for path, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        hub.routes[f"/{REPO}/resolve/{revision}/{path}"] = lambda handler, data=data: handler.answer(200, data)


def test_a_repository_is_read_as_its_preset_is(hub: Hub) -> None:
    serve(hub, files_of(NAME))
    bundle = read_bundle(read_config(fetch_bundle(REPO)))
    assert bundle.parts == read_preset(NAME).parts
    assert {unquote(path) for path, _ in hub.asked} <= {f"/{REPO}/resolve/main/{path}" for path in files_of(NAME)}


def test_a_revision_is_fetched(hub: Hub) -> None:
    serve(hub, files_of(NAME), "refs%2Fpr%2F1")
    assert read_config(fetch_bundle(REPO, "refs/pr/1"))[INDEX] == files_of(NAME)[INDEX]


def test_a_tokenizer_without_a_limit_is_read(hub: Hub) -> None:
    tokenizer = b'{"model_max_length": 1000000000000000019884624838656, "added_tokens_decoder": {}}'
    serve(hub, files_of(NAME) | {"tokenizer/tokenizer_config.json": tokenizer})
    assert read_config(fetch_bundle(REPO))["tokenizer/tokenizer_config.json"] == {}


def test_the_safety_checker_is_left_out_and_named(hub: Hub) -> None:
    files = files_of(NAME)
    files[INDEX] = files[INDEX] | {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"]}
    serve(hub, files)
    bundle = read_bundle(read_config(fetch_bundle(REPO)))
    assert bundle.left_out == ("safety_checker",)
    assert bundle.parts == read_preset(NAME).parts


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vae/config.json": None}, "has no vae/config.json"),
        ({"vae/config.json": b"[]"}, "vae/config.json of org/name is refused: config is not a JSON object"),
        ({"vae/config.json": b" " * (MAX_CONFIG_BYTES + 1)}, "vae/config.json of org/name is too large"),
        ({INDEX: None}, "org/name has no model_index.json"),
        ({INDEX: {f"part{number}": ["diffusers", "UNet2DModel"] for number in range(33)}}, "too many parts"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(hub: Hub, changed: dict, said: str) -> None:
    files = files_of(NAME) | changed
    serve(hub, {path: content for path, content in files.items() if content is not None})
    for path, content in changed.items():
        if content is None:
            hub.routes[f"/{REPO}/resolve/main/{path}"] = lambda handler: handler.answer(404, X_Error_Code="EntryNotFound")
    with pytest.raises(HubError, match=said):
        fetch_bundle(REPO)


def test_a_gated_repository_is_named(hub: Hub) -> None:
    hub.routes[f"/{REPO}/resolve/main/{INDEX}"] = lambda handler: handler.answer(401, X_Error_Code="GatedRepo")
    with pytest.raises(HubError, match="org/name is gated"):
        fetch_bundle(REPO)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_model_query_of_a_pipeline_names_the_query_that_answers(hub: Hub, revision: str | None) -> None:
    serve(hub, files_of(NAME), revision or "main")
    at = f"@{revision}" if revision else ""
    with pytest.raises(HubError, match=f"org/name holds a diffusion pipeline.*ask for arch=diffusers:org/name{at}$"):
        fetch_config(REPO, revision)


def test_a_repository_takes_the_keys_of_a_pipeline() -> None:
    request = parse_query("arch=diffusers:org/name@v1&offload=model")
    assert (request.source, request.name, request.revision, request.mode) == ("diffusers", "org/name", "v1", "inference")
    assert request.is_fetched
    assert not parse_query("arch=diffusers:sd1.5").is_fetched
    assert parse_query(format_query(request)) == request


@pytest.mark.parametrize("key", ["offload=model", "vae=both", "frames=9", "weights=fp8-cast", "output=latent", "guidance=0"])
def test_a_repository_that_is_asked_for_a_call_is_a_pipeline(key: str) -> None:
    assert parse_query(f"arch=hub:org/name@v1&{key}") == parse_query(f"arch=diffusers:org/name@v1&{key}")


def test_a_model_query_of_a_pipeline_is_answered_as_its_call(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(hub, files_of(NAME))
    asked: list[str] = []
    monkeypatch.setattr(estimator, "estimate", lambda request, config: asked.append(format_query(request)) or config)
    assert INDEX in sizer.estimate(f"arch=hub:{REPO}&gpu=rtx-4090")
    assert asked == [f"arch=diffusers:{REPO}&gpu=rtx-4090"]
    assert as_pipeline(f"https://huggingface.co/{REPO}/tree/v1&batch=2") == f"arch=diffusers:{REPO}@v1&batch=2"

    def run(options: argparse.Namespace, make_client: object) -> int:
        if (request := parse_query(query_of(options))).source == "hub":
            fetch_config(request.name)
        return asked.append(query_of(options)) or 0

    monkeypatch.setitem(estimate_command.COMMANDS, "estimate", (estimate_command.add_arguments, run))
    assert main(["estimate", f"hub:{REPO}", "--gpu", "rtx-4090", "--json"]) == 0
    assert asked[1:] == [f"arch=diffusers:{REPO}&gpu=rtx-4090"]
    assert f"{REPO} holds a diffusion pipeline" in capsys.readouterr().err


def test_a_gated_repository_names_its_preset(hub: Hub) -> None:
    hub.routes["/black-forest-labs/FLUX.1-dev/resolve/main/model_index.json"] = lambda handler: handler.answer(
        401, X_Error_Code="GatedRepo"
    )
    with pytest.raises(HubError, match=r"is gated.*ask for the preset arch=diffusers:flux\.1-dev"):
        fetch("diffusers", "black-forest-labs/FLUX.1-dev", None)


@pytest.mark.parametrize("value", ["org/", "org/name@", "org/name@..", "https://huggingface.co/org/name/blob/main/x.py"])
def test_a_malformed_repository_is_refused(value: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_query(f"arch=diffusers:{value}")
    assert [refusal.key for refusal in refused.value.refusals] == ["arch"]


@pytest.mark.full
def test_a_repository_and_its_pasted_files_take_the_same_bytes(hub: Hub) -> None:
    serve(hub, files_of(NAME))
    found = sizer.estimate(f"arch=diffusers:{REPO}&dtype=float16")
    pasted = sizer.estimate(f"arch=config:{encode_config(json.dumps(files_of(NAME)))}&dtype=float16")
    assert found.estimates == pasted.estimates
