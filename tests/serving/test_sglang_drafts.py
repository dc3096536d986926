"""Speculative decoding of SGLang against its own functions, a published log, and the way from a command to the answer.

tests/measured/published/sglang_draft_shares.csv has the static share by the functions of each release, as in test_sglang.py, and
sglang_drafts.csv the bytes of a token by DefaultPoolConfigurator and HybridSWAPoolConfigurator of 0.5.14 to 0.5.23. Both are called
with a stand-in for the arguments. A row holds until the next one with the same arguments.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

import sizer
from sizer.base.errors import RequestError
from sizer.base.units import GIB, MIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.text import parse_query
from sizer.serving.architecture import FULL, SLIDING, Architecture, Layer
from sizer.serving.launch import read_launch, with_command
from sizer.serving.rules import Release
from sizer.serving.sglang import DRIVER_BYTES, SglangFlags, plan_pool, resolve_sglang, with_drafter
from sizer.serving.startup import read_startup
from sizer.serving.words import sum_line
from tests.serving.log_table import ROWS
from tests.serving.logs import architecture_of
from tests.serving.models import HIDDEN, attention, decoder, states

GPU = find_gpu("h100-80gb")
SMALL = "arch=hf:smollm2-135m&mode=serve&engine=sglang&gpu=t4"
METHODS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "STANDALONE": "smollm2-135m", "NGRAM": "ngram"}
VERSIONS = [(0, 5, patch) for patch in (3, 9, 10, 11, 12, 13, 20, 21, 22, 23)]


def recorded(name: str, release: Release) -> list[dict[str, str]]:
    """The rows that hold in a version."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    with ROWS.with_name(name).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if tuple(map(int, row["version"].split("."))) <= release:
                *case, _ = (value for key, value in row.items() if key != "version")
                found[tuple(case)] = row
    return [*found.values()]


def resolved(architecture: Architecture, draft: str, release: Release = (0, 5, 23), more: str = "") -> SglangFlags:
    query = f"arch=hf:qwen3-8b&mode=serve&engine=sglang&engine_version={'.'.join(map(str, release))}&gpu=h100-80gb{more}"
    return resolve_sglang(parse_query(f"{query}&speculative={draft}" if draft else query), architecture, GPU)


def drafted(draft: str, release: Release = (0, 5, 23), architecture: Architecture | None = None, more: str = "") -> Architecture:
    architecture = architecture or decoder()
    return with_drafter(architecture, resolved(architecture, draft, release, more), GPU, decoder())


@pytest.mark.parametrize("release", VERSIONS, ids=lambda release: ".".join(map(str, release)))
def test_the_share_with_a_draft_is_sglangs_own(release: Release):
    rows = recorded("sglang_draft_shares.csv", release)
    assert len(rows) == 9
    for row in rows:
        gpu = replace(GPU, total_bytes=int(row["total_mib"]) * MIB - DRIVER_BYTES)
        version = ".".join(map(str, release))
        query = f"arch=hf:qwen3-8b&mode=serve&engine=sglang&engine_version={version}&gpu=h100-80gb&tp={row['tp']}"
        flags = resolve_sglang(parse_query(f"{query}&speculative={METHODS[row['algorithm']]}:3"), decoder(), gpu)
        assert flags.fraction == pytest.approx(float(row["mem_fraction_static"]), abs=1e-9), row


@pytest.mark.parametrize("release", [(0, 5, patch) for patch in range(14, 24)], ids=lambda release: ".".join(map(str, release)))
def test_a_token_has_sglangs_own_bytes(release: Release):
    rows = recorded("sglang_drafts.csv", release)
    assert len(rows) == 7
    for row in rows:
        layers, windows, kv_heads, head, count, slides = (
            int(row[key]) for key in ("layers", "windows", "kv_heads", "head", "draft_layers", "draft_windows")
        )
        shared = row["latent"] == "1"
        full = Layer(kind=FULL, elements=head if shared else 2 * kv_heads * head, kv_heads=kv_heads, shared=shared)
        window = replace(full, kind=SLIDING, window=128)
        model = decoder(layers=(*[full] * (layers - windows), *[window] * windows))
        draft = replace(model, layers=(*[full] * (count - slides), *[window] * slides), model_type=row["model_type"])
        model = replace(model, model_type=row["model_type"], draft=draft)
        method = "mtp" if shared else METHODS[row["method"]]
        flags = replace(resolved(decoder(), f"{method}:3", release), tp=int(row["tp"]))
        assert plan_pool(model, flags, GPU).token_bytes == pytest.approx(float(row["token_bytes"]), abs=0.5), row


# _handle_max_mamba_cache of 0.5.14 and 0.5.17 to 0.5.23: GiB without weights, MiB of a request's states, verified tokens and
# requests, and the bytes that are left for tokens. Five states for each request, mamba_full_memory_ratio 0.9.
STATES = (
    ((0, 5, 14), 20, 150, 4, 48, 11_565_793_280),
    ((0, 5, 14), 60, 50, 4, 48, 37_423_677_440),
    ((0, 5, 14), 10, 20, 2, 16, 6_438_256_640),
    ((0, 5, 17), 20, 150, 4, 48, 11_723_079_680),
    ((0, 5, 23), 60, 50, 4, 48, 37_318_819_840),
    ((0, 5, 23), 10, 20, 2, 16, 6_417_285_120),
)


@pytest.mark.parametrize(("release", "rest", "state", "verified", "running", "left"), STATES)
def test_the_states_of_drafted_tokens_are_sglangs_own(
    release: Release, rest: int, state: int, verified: int, running: int, left: int
):
    hybrid = replace(decoder(layers=(*attention(1), *states(1, state * MIB // 4))), model_type="qwen3_next")
    flags = resolved(hybrid, f"ngram:{verified - 1}", release, f"&max_num_seqs={running}")
    assert plan_pool(hybrid, flags, GPU).state_bytes == state * MIB
    found = plan_pool(hybrid, replace(flags, fraction=0.0), GPU)
    weights = found.weights_bytes + GIB // 20
    assert plan_pool(hybrid, replace(flags, fraction=0.0), GPU, change=rest * GIB + weights).pool_bytes == left


def test_no_tokens_are_left_if_no_state_fits():
    hybrid = decoder(layers=(*attention(1), *states(1, 75 * MIB // 2)))
    flags = replace(resolved(hybrid, "ngram:3"), fraction=0.0)
    held = plan_pool(hybrid, flags, GPU).weights_bytes + GIB // 20
    sizes = [plan_pool(hybrid, flags, GPU, change=held + rest * MIB).pool_bytes for rest in (-100, 100, 10_000)]
    assert sizes[0] < 0 == sizes[1] < sizes[2]


def test_a_head_has_an_embedding_and_logits_of_its_own_until_the_pool_is_sized():
    # sgl-project/sglang, pull request 35996: "type=Qwen3_5ForCausalLMMTP, mem usage=5.18 GB" of a model of 27B in FP8
    flags = resolved(architecture := architecture_of("qwen3.6-27b"), "mtp:3", more="&weights=fp8")
    found = plan_pool(with_drafter(architecture, flags, GPU, None), flags, GPU)
    assert found.draft_bytes / GIB == pytest.approx(5.18, abs=0.01)
    assert found.weights_bytes / GIB == pytest.approx(28.39, rel=0.005)
    # 4 heads of 256 elements; spec_aux_hidden_state.py finds no num_nextn_predict_layers, so that no token pays for the layer
    assert found.outside_bytes == found.tokens * 2 * 4 * 256 * 2
    split = with_drafter(architecture, replace(flags, tp=2), GPU, None).draft
    assert next(weight.shape for weight in split.weights if weight.name == "mtp.fc.weight") == (5120, 2 * 5120)


def test_a_draft_is_in_the_share_from_0_5_14_on():
    pools = {}
    for patch in (13, 14):
        flags = replace(resolved(decoder(), "eagle3:3", (0, 5, patch)), fraction=0.8)
        pools[patch] = plan_pool(drafted("eagle3:3", (0, 5, patch)), flags, GPU)
        plain = plan_pool(decoder(), replace(flags, draft=""), GPU)
        assert plain.pool_bytes - pools[patch].pool_bytes == pools[patch].draft_bytes
    assert (pools[13].draft_bytes, pools[14].outside_bytes) == (0, 0) < (pools[14].draft_bytes, pools[13].outside_bytes)
    assert (pools[13].token_bytes, pools[14].token_bytes) == (4 * 2048, 5 * 2048)
    # the head's weights, without an embedding of its own, which is shared before the draft's pool is made
    copies = pools[14].draft_bytes - (pools[13].outside_bytes - pools[13].tokens * 2048)
    assert copies == pytest.approx(2 * 1024 * HIDDEN, abs=MIB)


def test_a_draft_outside_of_the_share_has_to_fit_the_rest():
    query = f"{SMALL}&engine_version=0.5.13&speculative=smollm2-135m:3&util="
    roomy, tight = (sizer.estimate(f"{query}{util}").serve for util in (0.4, 0.9))
    assert (roomy.starts, roomy.message) == (True, "")
    assert "the draft takes" in roomy.reasons[1] and roomy.draft_bytes == 0
    assert (tight.starts, tight.message) == (False, "torch.OutOfMemoryError: CUDA out of memory")


def test_the_pool_of_old_versions_has_room_for_drafted_tokens():
    # 0.5.3, draft_runner_cache_size: steps × topk and verified tokens of 48 requests, and 100 more
    tokens = {}
    for patch in (6, 7):
        flags = replace(resolved(decoder(), "eagle3:3", (0, 5, patch)), fraction=0.5)
        tokens[patch] = plan_pool(drafted("eagle3:3", (0, 5, patch)), flags, GPU).tokens
    assert tokens[6] - tokens[7] == 48 * (3 + 4) + 100


def test_48_requests_run_unless_more_are_asked_for():
    found = sizer.estimate(f"{SMALL}&max_model_len=512&speculative=ngram:11&want=60x512").serve
    assert (found.flags["max_running_requests"], found.flags["speculative_num_draft_tokens"]) == (48, 12)
    assert found.want.fits is False and found.want.missing_bytes == 0
    assert found.levers[0].flags == "--max-running-requests 60"
    assert max(row.requests for row in found.contexts) == 48
    assert sizer.estimate(f"{SMALL}&max_model_len=512&speculative=ngram:11&want=60x512&max_num_seqs=60").serve.want.fits is True
    # --max-running-requests bounds the largest graph from 0.5.22 on, its default with a draft does not
    assert found.flags["cuda_graph_max_bs"] == sizer.estimate(f"{SMALL}&max_model_len=512").serve.flags["cuda_graph_max_bs"]


def test_ngram_takes_no_memory_and_a_draft_model_its_own():
    more = ("", "&speculative=ngram:3", "&speculative=smollm2-360m:3")
    plain, ngram, model = (sizer.estimate(SMALL + one).serve for one in more)
    assert (ngram.kv_tokens, ngram.draft_bytes) == (plain.kv_tokens, 0)
    assert model.draft_bytes > model.weights_bytes and model.kv_tokens < plain.kv_tokens
    assert "draft" in sum_line(model) and "draft" not in sum_line(ngram)


REFUSED = [
    ("eagle3:3", (0, 5, 2), "", decoder(), "allowed SGLang 0.5.3 or later for this model; ask for a later version"),
    ("ngram:3", (0, 5, 13), "", decoder(layers=(*attention(2), *states(2, 64))), "allowed SGLang 0.5.14 or later for this model"),
    ("ngram:3", (0, 5, 23), "&pp=2", decoder(), "given ngram with pp=2, allowed pp=1: SGLang refuses both by default"),
    ("mtp:1", (0, 5, 23), "", decoder(), "given mtp with decoder of type llama, allowed a checkpoint with layers for"),
]


@pytest.mark.parametrize(("draft", "release", "more", "architecture", "message"), REFUSED)
def test_what_sglang_refuses_is_refused(draft: str, release: Release, more: str, architecture: Architecture, message: str):
    with pytest.raises(RequestError, match=message):
        drafted(draft, release, architecture, more)


COMMANDS = {
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3 --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4": "qwen3-8b_eagle3:3",
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path AngelSlim/Qwen3-8B_eagle3": "qwen3-8b_eagle3:3",
    "--speculative-algorithm EAGLE": "mtp:3",
    "--speculative-algorithm NEXTN --speculative-draft-model-path a/DeepSeek-R1-NextN --speculative-num-draft-tokens=2": "mtp:1",
    "--speculative_algorithm EAGLE --speculative_draft_model_path Qwen/Qwen3-8B": "mtp:3",
    "--speculative-algorithm STANDALONE --speculative-draft-model-path Qwen/Qwen3-0.6B "
    "--speculative-attention-mode decode": "qwen3-0.6b:3",
    "--speculative-algorithm NGRAM": "ngram:11",
    "--speculative-algorithm ngram --speculative-num-draft-tokens 16": "ngram:15",
}


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_sglang_names_its_draft(text: str):
    launch = read_launch(f"python -m sglang.launch_server --model-path Qwen/Qwen3-8B {text}")
    assert (launch.items.get("speculative"), launch.unmatched) == (COMMANDS[text], ())


def test_a_head_of_llama_verifies_eight_tokens_by_default():
    command = "sglang serve meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b"
    launch = read_launch(command)
    assert launch.items["speculative"] == "eagle3:7"
    said = "counted as one layer of the model; write its config.json into speculative in place of its method"
    assert launch.unmatched == (f"the head 'a/b': {said}",)
    assert read_launch(f"{command.replace('EAGLE3', 'EAGLE')} --speculative-num-steps 5").items["speculative"] == "eagle:5"


@pytest.mark.parametrize(
    "text",
    [
        "--speculative-algorithm DFLASH",
        "--speculative-algorithm STANDALONE --speculative-draft-model-path /folder",
        "--speculative-algorithm NEXTN --speculative-draft-model-path google/gemma-4-assistant",
        "--speculative-num-draft-tokens 4",
    ],
)
def test_other_drafts_are_said_as_not_counted(text: str):
    launch = read_launch(f"sglang serve Qwen/Qwen3-8B {text}")
    assert "speculative" not in launch.items
    assert launch.unmatched[0].endswith(": a draft model reduces the cache: fewer tokens than planned")


@pytest.mark.parametrize("draft", ["ngram:3", "smollm2-360m:4"])
def test_the_command_of_an_answer_is_read_back(draft: str):
    found = sizer.estimate(f"{SMALL}&speculative={draft}").serve
    launch = read_launch(found.command)
    assert launch.items["speculative"] == draft
    assert not any("speculative" in line for line in launch.unmatched)


def test_a_log_of_sglang_names_its_draft():
    given = "server_args=ServerArgs(model_path='Qwen/Qwen3-8B', speculative_algorithm='{}', speculative_draft_model_path={}, "
    given += "speculative_num_steps=3, speculative_num_draft_tokens={})\nLoad weight end. mem usage=15.27 GB\nsglang"
    eagle, other = read_startup(given.format("EAGLE3", "'a/b'", 6)), read_startup(given.format("DFLASH", "'a/b'", "None"))
    assert eagle.query() == "mode=serve&engine=sglang&speculative=eagle3:5"
    assert eagle.remarks()[0].startswith("the head 'a/b': counted as one layer of the model")
    assert other.query() == "mode=serve&engine=sglang"
    assert other.remarks() == ["not counted: speculative decoding: a draft model and its cache"]
    text = "sglang serve Qwen/Qwen3-8B --speculative-algorithm NGRAM\nLoad weight end. mem usage=15.27 GB"
    assert with_command(read_startup(text), text).query().endswith("&speculative=ngram:11")
