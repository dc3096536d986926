"""Speculative decoding: the weights and caches of drafts against vLLM's own, versions, and the way from a command to the answer.

tests/measured/published/vllm_drafts.csv is recorded with vLLM 0.33.0's Python on meta tensors, as in test_planner.py: the draft is
made by `initialize_model`, embedding and head are shared as `load_eagle_model` shares them, and `get_kv_cache_configs` plans the
layers of both. The configs of EAGLE heads are those of the model, with a vocabulary of 32,000. Prefixes are not cached. Qwen3.5
has no blocks: its states have 16 bits there, because the preset's config leaves their dtype out. Blocks of DeepSeek-V3 had 16
tokens.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import pytest

import sizer
from sizer.base.errors import RequestError
from sizer.base.units import GIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.heads import head_of, pack_draft
from sizer.catalogue.presets import find_preset
from sizer.query.text import format_query, parse_query
from sizer.serving.architecture import FULL, STATE, Layer, Weight
from sizer.serving.cache import blocks_of_request, plan_cache, state_bytes
from sizer.serving.drafts import buffer_bytes, draft_bytes, drafting_bytes, with_draft
from sizer.serving.flags import Flags, resolve_flags
from sizer.serving.graphs import capture_sizes, graph_bytes
from sizer.serving.launch import read_launch
from sizer.serving.layout import stage_layers
from sizer.serving.plan import make_plan
from sizer.serving.startup import read_startup
from sizer.serving.words import sum_line
from tests.serving.log_table import ROWS
from tests.serving.logs import architecture_of
from tests.serving.models import HIDDEN, VOCABULARY, attention, decoder, flags, profiler, states

GPU = find_gpu("h100-80gb")
SMALL = "arch=hf:smollm2-135m&mode=serve&gpu=t4"


def recorded() -> list[dict[str, str]]:
    with ROWS.with_name("vllm_drafts.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", recorded(), ids=lambda row: f"{row['preset']} {row['speculative']}")
def test_a_draft_has_vllms_own_weights_and_caches(row: dict[str, str]):
    architecture, name = architecture_of(row["preset"]), row["speculative"].partition(":")[0]
    query = f"arch=hf:{row['preset']}&mode=serve&gpu=h100-80gb&tp={row['tp']}&max_model_len={row['max_model_len']}"
    request = parse_query(f"{query}&prefix_caching=0&speculative={row['speculative']}")
    asked = replace(resolve_flags(request, architecture, GPU, 132), max_num_batched_tokens=2048, second_runner=False)
    model = None if name in ("ngram", "mtp", "eagle", "eagle3") else architecture_of(name)
    drafted = with_draft(architecture, asked, model)
    # The allocator keeps up to 1 MiB of a segment, and the table rounds each tensor alone. FP8 layers differ by their scales.
    assert draft_bytes(drafted, asked) == pytest.approx(int(row["draft_bytes"]), rel=0.003)
    plan = plan_cache(drafted, asked, int(row["cache_gib"]) * GIB)
    if row["blocks"]:
        assert (plan.blocks, plan.kv_tokens) == (int(row["blocks"]), int(row["kv_tokens"]))
    if row["kv_tokens"]:
        assert plan.kv_tokens == pytest.approx(int(row["kv_tokens"]), rel=2e-4)
        assert plan.requests_at_once == pytest.approx(float(row["requests_at_once"]), abs=0.011)


# Published startup logs with a draft, each by the line "GPU KV cache size: N tokens": preset, flags, GiB of cache, tokens, requests
# at once. The drafted tokens of Qwen3.6-35B-A3B and of the log of 0.20 are inferred from the size of a block.
LOGS = [
    ("qwen3.6-27b", "engine_version=0.23.1&max_model_len=262144&kv=fp8&speculative=mtp:2", 48.6, 1_394_129, 5.32),
    ("qwen3.6-35b-a3b", "engine_version=0.22.0&max_model_len=200000&speculative=mtp:3", 71.15, 3_131_683, 15.66),
    ("qwen3.6-27b", "engine_version=0.20.0&max_model_len=65536&kv=fp8&speculative=mtp:1", 4.8, 36_432, 1.82),
    ("qwen3-8b", "engine_version=0.30.0&max_model_len=16384&speculative=eagle3:3", 3.25, 23_024, 1.41),
    ("qwen3-8b", "engine_version=0.31.0&max_model_len=16384&speculative=eagle3:3", 4.34, 30_784, 1.88),
    ("qwen3-8b", "engine_version=0.31.0&max_model_len=16384&speculative=eagle3:3", 5.47, 38_784, 2.37),
]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log[0]} {log[3]}")
def test_tokens_follow_from_the_memory_of_published_logs(log: tuple[str, str, float, int, float]):
    preset, keys, gib, tokens, at_once = log
    architecture = architecture_of(preset)
    asked = resolve_flags(parse_query(f"arch=hf:{preset}&mode=serve&gpu=h100-80gb&prefix_caching=1&{keys}"), architecture, GPU, 132)
    drafted = with_draft(architecture, asked)
    low, plan, high = (plan_cache(drafted, asked, round((gib + more) * GIB)) for more in (-0.005, 0, 0.005))
    assert low.kv_tokens <= tokens <= high.kv_tokens  # the memory of a log has two decimals
    assert round(plan.requests_at_once, 2) == at_once
    if preset.startswith("qwen3.6"):
        assert plan.kv_tokens == tokens


# Heads by their configs, and the bytes of each rank's tensors of vLLM 0.33.0's own classes on meta, each rounded to 512 bytes:
# `initialize_model` with the draft's config, without the embedding if it has the model's hidden size.
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 8}
SMALLER = LLAMA | {"hidden_size": 6144, "intermediate_size": 16_384, "num_attention_heads": 48, "target_hidden_size": 8192}
SMALLER |= {"vocab_size": 128_256, "draft_vocab_size": 32_000, "max_position_embeddings": 2048}
WIDER = LLAMA | {"hidden_size": 2880, "intermediate_size": 17_280, "num_attention_heads": 64, "head_dim": 64}
WIDER |= {"vocab_size": 201_088, "draft_vocab_size": 32_000, "max_position_embeddings": 4096}
DEEPER = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "fc_norm": True}
DEEPER |= {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "head_dim": 128, "attention_bias": True}
DEEPER |= {"vocab_size": 151_936, "draft_vocab_size": 32_000, "max_position_embeddings": 40_960}
FIRST = {**LLAMA, "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14_336}
FIRST |= {"num_attention_heads": 32, "vocab_size": 128_256, "max_position_embeddings": 2048}
HEADS_OF_VLLM = [
    ("llama-3.3-70b", SMALLER, 1, 3_154_423_808),
    ("llama-3.3-70b", SMALLER, 4, 1_016_901_632),
    ("gpt-oss-20b", WIDER, 1, 616_591_360),
    ("qwen3-8b", DEEPER, 1, 1_195_745_280),
    ("llama-3.1-8b", FIRST, 1, 505_423_872),
]


@pytest.mark.parametrize("row", HEADS_OF_VLLM, ids=lambda row: f"{row[0]} {row[2]}")
def test_a_head_has_the_sizes_of_its_config(row: tuple[str, dict, int, int]):
    preset, config, tp, expected = row
    query = f"arch=hf:{preset}&mode=serve&gpu=h100-80gb&tp={tp}&max_model_len=8192&speculative={json.dumps(config)}:3"
    request, architecture = parse_query(query), architecture_of(preset)
    assert parse_query(format_query(request)) == request
    asked = resolve_flags(request, architecture, GPU, 132)
    drafted = with_draft(architecture, asked)
    # the allocator keeps up to 1 MiB of a segment more
    assert draft_bytes(drafted, asked) == pytest.approx(expected, rel=0.002)
    assert asked.draft_method == ("eagle" if config is FIRST else "eagle3")
    assert len(drafted.draft.layers) == config["num_hidden_layers"]


def test_speculators_and_vllms_own_configs_name_the_sizes_of_a_head():
    inner = {key: value for key, value in DEEPER.items() if key not in ("draft_vocab_size", "architectures")}
    wrapped = {"speculators_model_type": "eagle3", "draft_vocab_size": 32_000, "fc_norm": True, "transformer_layer_config": inner}
    first = {"model_type": "eagle", "model": {key: value for key, value in FIRST.items() if key != "architectures"}}
    for whole, own in ((wrapped, DEEPER), (first, FIRST)):
        assert head_of(pack_draft(json.dumps(whole))) == head_of(pack_draft(json.dumps(own)))
    several = DEEPER | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 17, 25], "use_aux_hidden_state": True}}
    head = head_of(pack_draft(json.dumps(several)))
    assert (head.states, head.norms) == (4, 4 * 4096)
    assert head_of(pack_draft(json.dumps(several | {"eagle_config": {"use_aux_hidden_state": False}}))).states == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", "given a head for hidden states of 8,192 elements with smollm2-135m"),
        ('{"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 1}', "allowed the config of an EAGLE or EAGLE-3 head"),
        ('{"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64}', "allowed a draft's config with num_attention_heads"),
        ('{"hidden_size": 64', "given config is not valid JSON, allowed a draft's config.json"),
        ("config:abc", "base64url"),
        ("eagle4", "a published head"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(name: str, said: str):
    with pytest.raises(RequestError, match=re.escape(said)):
        sizer.estimate(f"{SMALL}&speculative={name}:3")


def test_a_named_head_is_in_the_command_and_narrows_the_range():
    for engine in ("vllm", "sglang"):
        query = f"arch=hf:llama-3.1-8b&mode=serve&gpu=h100-80gb&max_model_len=8k&engine={engine}"
        drafts = ("EAGLE3-LLaMA3.1-Instruct-8B", "eagle3")
        named, plain = (sizer.estimate(f"{query}&speculative={draft}:3").serve for draft in drafts)
        assert named.draft_bytes == plain.draft_bytes  # it has the sizes of a layer of the model
        assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in named.command and "HEAD" in plain.command
        assert read_launch(named.command).items["speculative"] == "eagle3-llama3.1-instruct-8b:3"
    assert sum("head, which is taken" in reason for reason in plain.reasons) == 0


def test_a_draft_models_config_is_counted_as_its_preset():
    config = json.dumps(find_preset("smollm2-135m").config)
    packed, named = (sizer.estimate(f"{SMALL}&speculative={name}:4").serve for name in (config, "smollm2-135m"))
    assert packed.draft_bytes == named.draft_bytes
    assert (packed.flags["speculative_method"], packed.kv_tokens) == ("draft_model", named.kv_tokens)


def eagle(**changes: object) -> Flags:
    return flags(draft="eagle3", draft_tokens=3, **changes)


def test_a_head_of_eagle_has_one_layer_in_the_last_stage():
    drafted = with_draft(decoder(), eagle(pp=2))
    assert draft_bytes(drafted, eagle(pp=2), stage=0) == 0 < draft_bytes(drafted, eagle(pp=2), stage=1)
    # 4 layers of 2 KiB a token in 16 tokens, and the head's: 5 in one stage, 2 and 3 in two
    plans = [plan_cache(drafted, eagle(pp=pp), GIB, stage) for pp, stage in ((1, 0), (2, 0), (2, 1))]
    assert [plan.block_bytes for plan in plans] == [layers * 2048 * 16 for layers in (5, 2, 3)]
    assert stage_layers(4, 2) == (range(2), range(2, 4))
    names = {weight.name: weight.shape for weight in drafted.draft.weights}
    assert names["model.layers.4.self_attn.q_proj.weight"] == (1024, 2 * HIDDEN)
    assert names["model.fc.weight"] == (HIDDEN, 3 * HIDDEN)
    assert names["lm_head.weight"] == (VOCABULARY, HIDDEN)  # not more than the model's own
    plain = with_draft(decoder(), flags(draft="eagle", draft_tokens=2)).draft
    assert not any("lm_head" in weight.name for weight in plain.weights)  # it uses the model's


def test_layers_of_one_kind_and_several_sizes_share_a_block():
    small = Layer(kind=FULL, elements=256, kv_heads=1)
    model = replace(decoder(layers=(small,) * 2), name="small")
    drafted = with_draft(decoder(), flags(release=(0, 15, 0), draft="small", draft_tokens=5, vocabulary=VOCABULARY), model)
    plan = plan_cache(drafted, flags(draft="small", draft_tokens=5), GIB)
    assert plan.block_bytes == (4 * 2048 + 2 * 512) * 16
    assert (len(plan.groups), plan.block_tokens) == (1, 16)


def test_states_have_room_for_drafted_tokens():
    layer = Layer(kind=STATE, state_elements=1000, conv_elements=300, conv_channels=100)
    assert [state_bytes(layer, decoder(), 1, drafted) for drafted in (0, 2)] == [2600, 3000]
    mixed = decoder(layers=(*states(3, 1000), *attention(1)))
    plain, drafting = (plan_cache(mixed, flags(draft_tokens=drafted), GIB) for drafted in (0, 3))
    assert plain.groups == drafting.groups
    more = [blocks_of_request(plain.groups, flags(draft_tokens=drafted), 8192) for drafted in (0, 3)]
    assert more[1] - more[0] == 3 * sum(group.kind == STATE for group in plain.groups)


@pytest.mark.parametrize(
    ("version", "draft", "more", "second"),
    [
        ("0.21.0", "eagle3:3", "", False),
        ("0.25.1", "eagle3:3", "", True),
        ("0.29.0", "eagle3:3", "&pp=2", False),
        ("0.29.0", "mtp:1", "&pp=2", True),
        ("0.30.0", "eagle3:3", "&pp=2", True),
        ("0.30.0", "qwen3-0.6b:3", "", False),
        ("0.31.0", "qwen3-0.6b:3", "", True),
        ("0.31.0", "ngram:3", "", False),
        ("0.32.0", "ngram:3", "", True),
    ],
)
def test_the_method_decides_which_model_runner_runs(version: str, draft: str, more: str, second: bool):
    request = parse_query(f"arch=hf:qwen3-8b&mode=serve&engine_version={version}&speculative={draft}{more}")
    plain = parse_query(f"arch=hf:qwen3-8b&mode=serve&engine_version={version}")
    assert resolve_flags(request, decoder(), GPU, 132).second_runner is second
    assert resolve_flags(plain, decoder(), GPU, 132).second_runner is (version >= "0.25")


def test_layers_for_several_tokens_have_a_head_of_their_own_before_0_16():
    architecture, sizes = architecture_of("glm-4.5-air"), []
    for release in ((0, 15, 0), (0, 16, 0)):
        asked = flags(release=release, draft="mtp", draft_tokens=1, max_model_len=8192)
        sizes.append(draft_bytes(with_draft(architecture, asked), asked))
    head = architecture.vocabulary * architecture.hidden * 2
    assert sizes[0] - sizes[1] == pytest.approx(head, abs=2 * 2**20)


def test_graphs_cover_the_drafted_tokens():
    assert max(capture_sizes(flags(release=(0, 12, 0), max_num_seqs=16, draft_tokens=3))) == 32
    assert max(capture_sizes(flags(release=(0, 13, 0), max_num_seqs=16, draft_tokens=3))) == 128
    asked = eagle(release=(0, 13, 0), max_num_seqs=16)
    alone, drafted = (graph_bytes(one, asked) for one in (decoder(), with_draft(decoder(), asked)))
    assert alone * 5 == drafted * 4  # one layer beside four


def test_eagle_3_keeps_three_hidden_states_while_it_runs():
    row = 2048 * HIDDEN * 2
    drafted = with_draft(decoder(), eagle())
    assert drafting_bytes(drafted, eagle(), 10 * row) == (3 * row, (4 + 12) * row)
    second = eagle(second_runner=True)
    assert drafting_bytes(drafted, second, 0) == (3 * row, (4 + 1 + 5) * row)
    assert drafting_bytes(decoder(), flags(), 10 * row) == (0, 0)
    predictor = flags(draft="mtp", draft_tokens=1)
    assert drafting_bytes(replace(decoder(), draft=decoder()), predictor, 0) == (0, 6 * row)


def test_buffers_of_a_draft_reduce_the_cache_from_0_27_on():
    row = 2048 * HIDDEN * 2
    for release, second, rows in (((0, 26, 0), False, 0), ((0, 27, 0), False, 2), ((0, 27, 0), True, 1)):
        asked = eagle(release=release, second_runner=second)
        assert buffer_bytes(with_draft(decoder(), asked), asked) == rows * row
    older, newer = (eagle(release=release) for release in ((0, 26, 0), (0, 27, 0)))
    plans = [make_plan(with_draft(decoder(), asked), asked, profiler, GPU) for asked in (older, newer)]
    assert plans[1].outside_torch_bytes - plans[0].outside_torch_bytes == 2 * row
    assert plans[0].draft_bytes == plans[1].draft_bytes > 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("speculative=eagle3", "speculative: given 'eagle3', allowed a method or a preset, a colon, and 1 to 128 drafted tokens"),
        ("speculative=eagle3:0", "1 to 128 drafted tokens; write for example speculative=eagle3:3"),
        ("speculative=medusa:3", "given 'medusa:3', allowed ngram, mtp, eagle, eagle3, a published head, the preset"),
        ("speculative=a/b:3", "write the config.json of 'a/b' in place of its name"),
        ("speculative=ngram:3&engine=llama.cpp", "speculative: given 'ngram:3' without engine=vllm or sglang"),
        ("speculative=mtp:1", "speculative: given mtp with smollm2-135m of type llama, allowed a checkpoint with layers for"),
        ("speculative=smollm2-360m:3&engine_version=0.14.0", "allowed ngram, mtp, eagle or eagle3 before 0.15.0"),
        ("speculative=qwen3-0.6b:3", "given qwen3-0.6b with 49,152 tokens of vocabulary in smollm2-135m, allowed a draft model"),
    ],
)
def test_a_draft_that_vllm_refuses_is_refused(more: str, said: str):
    with pytest.raises(RequestError, match=re.escape(said)):
        sizer.estimate(f"{SMALL}&{more}")


def test_a_model_with_latents_has_no_known_head():
    asked = eagle()
    with pytest.raises(RequestError, match="speculative: given eagle3 with decoder, allowed a model whose layers keep keys"):
        with_draft(replace(decoder(), latent=(512, 128, 128)), asked)
    several = replace(decoder(), model_type="glm4_moe", mtp_layers=2)
    with pytest.raises(RequestError, match="given mtp:3, allowed a multiple of the checkpoint's 2 layers; ask for mtp:2"):
        with_draft(several, flags(draft="mtp", draft_tokens=3))
    assert len(with_draft(several, flags(draft="mtp", draft_tokens=4)).draft.layers) == 2


def test_chunks_are_kept_whole_with_a_head():
    drafts = ("", "ngram", "eagle3", "mtp")
    assert [flags(release=(0, 14, 0), draft=draft).keeps_chunks for draft in drafts] == [True, True, False, False]


def test_the_answer_counts_a_draft_model():
    plain, drafted = (sizer.estimate(f"{SMALL}&engine_version=0.19.0{more}").serve for more in ("", "&speculative=smollm2-135m:4"))
    # the weights twice, except the table of rotations; its layers need as much cache
    assert 0.98 < drafted.draft_bytes / plain.weights_bytes <= 1
    assert drafted.sampler_bytes > plain.sampler_bytes
    spent = ("weights_bytes", "draft_bytes", "profile_peak_bytes", "outside_torch_bytes", "kv_cache_bytes")
    assert sum(getattr(drafted, name) for name in spent) == drafted.budget_bytes
    assert drafted.kv_tokens / plain.kv_tokens == pytest.approx(drafted.kv_cache_bytes / plain.kv_cache_bytes / 2, rel=1e-2)
    assert f" + {drafted.draft_bytes / GIB:.2f} draft + " in sum_line(drafted) and "draft" not in sum_line(plain)
    assert (drafted.flags["speculative_method"], drafted.flags["num_speculative_tokens"]) == ("smollm2-135m", 4)
    config = '{"method": "draft_model", "num_speculative_tokens": 4, "model": "HuggingFaceTB/SmolLM2-135M"}'
    assert drafted.command.endswith(f" --speculative-config '{config}'")
    assert read_launch(drafted.command).items["speculative"] == "smollm2-135m:4"
    assert any("the draft's buffers and graphs" in reason for reason in drafted.reasons)


def test_a_draft_is_written_as_it_was_asked_for():
    for text in ("ngram:5", "mtp:1", "eagle3:3", "qwen3-0.6b:128"):
        assert format_query(parse_query(f"{SMALL}&speculative={text}")).endswith(f"&speculative={text}")
    assert parse_query(f"{SMALL}&speculative=Qwen3_0.6B:2").speculative == ("qwen3-0.6b", 2)


COMMANDS = {
    '--speculative-config \'{"method": "eagle3", "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 3}\'': (
        "qwen3-8b_eagle3:3"
    ),
    '--speculative-config \'{"model": "heads/Qwen3-8B_eagle3", "num_speculative_tokens": 3}\'': "qwen3-8b_eagle3:3",
    '-sc \'{"method": "deepseek_mtp"}\'': "mtp:1",
    "-sc.method qwen3_next_mtp -sc.num_speculative_tokens=2": "mtp:2",
    '--speculative_config \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'': "ngram:5",
    "--spec-model Qwen/Qwen3-0.6B --spec-tokens 4": "qwen3-0.6b:4",
}


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_names_its_draft(text: str):
    launch = read_launch(f"vllm serve Qwen/Qwen3-8B {text}")
    assert (launch.items, launch.unmatched) == ({"mode": "serve", "speculative": COMMANDS[text]}, ())


UNREAD = {
    "-sc '{}'": "--speculative-config {}: a draft model reduces the cache: fewer tokens than planned",
    "-sc 'a'": "--speculative-config a: a draft model reduces the cache: fewer tokens than planned",
    "--spec-method suffix": "--spec-method suffix: a draft model reduces the cache: fewer tokens than planned",
    "--spec-model org/draft --spec-tokens 3": "--spec-model org/draft: a draft model reduces the cache: fewer tokens than planned",
    '--speculative-config \'{"method": "eagle3", "model": "a/EAGLE3-b", "num_speculative_tokens": 3}\'': (
        "the head 'a/EAGLE3-b': counted as one layer of the model; write its config.json into speculative in place of its method"
    ),
    '-sc \'{"method": "mtp", "draft_sample_method": "probabilistic"}\'': "draft_sample_method of --speculative-config",
}


@pytest.mark.parametrize("text", UNREAD)
def test_a_draft_that_cannot_be_counted_is_said(text: str):
    assert UNREAD[text] in read_launch(f"vllm serve Qwen/Qwen3-8B {text}").unmatched


def test_a_log_names_its_draft():
    config = "speculative_config=SpeculativeConfig(method='eagle3', model='a/b', num_spec_tokens=3), quantization=None"
    asked = "non-default args: {'model': 'a/b', 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 2}}"
    small = "speculative_config=SpeculativeConfig(method='draft_model', model='Qwen/Qwen3-0.6B', num_spec_tokens=4)"
    for text, keys in ((config, "eagle3:3"), (asked, "mtp:2"), (small, "qwen3-0.6b:4")):
        log = read_startup(f"{text}\nGPU KV cache size: 1 tokens")
        assert log.query() == f"mode=serve&speculative={keys}"
        assert [line.partition(":")[0] for line in log.remarks()] == (["the head 'a/b'"] if keys == "eagle3:3" else [])


def test_kimi_has_no_layers_for_several_tokens():
    asked = flags(draft="mtp", draft_tokens=1)
    with pytest.raises(RequestError, match="given mtp with kimi-k2-instruct of type deepseek_v3, allowed a checkpoint with layers"):
        with_draft(architecture_of("kimi-k2-instruct"), asked)
    assert architecture_of("deepseek-v3").mtp_layers == 1  # its preset leaves the number out


def test_a_weight_of_a_draft_keeps_its_name():
    weights = with_draft(architecture_of("qwen3.5-4b"), flags(draft="mtp", draft_tokens=1)).draft.weights
    assert Weight(name="mtp.layers.32.mlp.down_proj.weight", shape=(2560, 9216)) in weights
    assert not any("visual" in weight.name for weight in weights)
