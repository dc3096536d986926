"""SGLang's own rules for its static share, as recorded: the plan has the same chunk, graphs and share in every version.

Recorded with the functions of each release from 0.5.3 to 0.5.23, cut out of server_args.py, arg_groups/memory_hook.py and
arg_groups/cuda_graph_hook.py of its wheel and called with a stand-in for the arguments. A row holds until the next one with the
same arguments. SGLang is not needed to run these tests.
"""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from sizer.base.errors import RequestError
from sizer.base.units import GIB, MIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.serving import ENGINES
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.report.served import Served
from sizer.serving.architecture import FULL, Architecture, Layer
from sizer.serving.rules import SGLANG_RULES, Release
from sizer.serving.sglang import (
    DRIVER_BYTES,
    IMAGES_BYTES,
    Pool,
    SglangFlags,
    answer_sglang,
    plan_pool,
    ranks_bytes,
    resolve_sglang,
    sglang_command,
    static_share,
    with_fraction,
)
from sizer.serving.startup import read_startup
from tests.serving.log_table import ROWS
from tests.serving.logs import pool_of, read_rows, request_of
from tests.serving.models import attention, decoder, states

RECORDED = ROWS.with_name("sglang_memory.csv")
GPU = find_gpu("rtx-4090")
VERSIONS = [(0, 5, patch) for patch in range(3, 24)]
CASE = ("total_mib", "tp", "pp", "latent", "images", "eager", "running", "length", "tokens")
VISION = (27, 1152)  # layers and hidden size of the recorded tower


def recorded(release: Release) -> list[dict[str, str]]:
    """The rows that hold in a version."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    with RECORDED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if tuple(map(int, row["version"].split("."))) <= release:
                found[tuple(row[name] for name in CASE)] = row
    return [*found.values()]


def resolved(release: Release, row: dict[str, str]) -> SglangFlags:
    """The flags of a server on a device whose nvidia-smi prints the MiB of a row."""
    architecture = replace(
        decoder(),
        latent=(512, 128, 128) if row["latent"] == "1" else None,
        encoder="vision" if row["images"] == "1" else None,
        vision=VISION if row["images"] == "1" else None,
    )
    given = {"max_num_seqs": row["running"], "max_model_len": row["length"], "max_num_batched_tokens": row["tokens"]}
    more = "".join(f"&{key}={value}" for key, value in given.items() if value)
    version = ".".join(map(str, release))
    query = f"arch=hf:qwen3-8b&mode=serve&engine=sglang&engine_version={version}&gpu=rtx-4090&tp={row['tp']}&pp={row['pp']}"
    gpu = replace(GPU, total_bytes=int(row["total_mib"]) * MIB - DRIVER_BYTES)
    return resolve_sglang(parse_query(f"{query}&enforce_eager={row['eager']}{more}"), architecture, gpu)


@pytest.mark.parametrize("release", VERSIONS, ids=lambda release: ".".join(map(str, release)))
def test_the_share_is_sglangs_own(release: Release):
    rows = recorded(release)
    assert len(rows) == 57
    for row in rows:
        flags = resolved(release, row)
        found = (flags.chunked_prefill_size, flags.graph_batch, pytest.approx(flags.fraction, abs=1e-9))
        told = (int(row["chunked_prefill_size"]), int(row["cuda_graph_max_bs"]), float(row["mem_fraction_static"]))
        assert told == found, row


def test_every_recorded_version_is_known_and_every_rule_has_a_source():
    assert (ENGINES["sglang"].newest, VERSIONS[-1]) == ((0, 5, 23), (0, 5, 23))
    assert all(rule.source for rule in SGLANG_RULES)


def served(architecture: Architecture | None = None, **changes: object) -> Served:
    architecture = architecture or decoder()
    query = parse_query("arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=rtx-4090&max_model_len=8k")
    flags = resolve_sglang(query, architecture, GPU)
    return answer_sglang(architecture, replace(flags, **changes), GPU, model="org/model", want=None, auto=False)


def test_a_larger_share_never_holds_fewer_tokens():
    tokens = [served(fraction=share / 100).kv_tokens for share in range(10, 100, 5)]
    assert tokens == sorted(tokens)


def test_tensor_parallel_never_raises_weights_and_larger_chunks_never_the_share():
    weights = [served(tp=tp).weights_bytes for tp in (1, 2, 4, 8)]
    assert weights == sorted(weights, reverse=True)
    query = "arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=rtx-4090&max_num_batched_tokens="
    shares = [resolve_sglang(parse_query(f"{query}{n}"), decoder(), GPU).fraction for n in (2048, 4096, 8192)]
    assert shares == sorted(shares, reverse=True)


def test_a_cache_in_8_bits_holds_twice_the_tokens():
    whole, half = served().kv_tokens, served(kv="fp8").kv_tokens
    assert 0 <= half - 2 * whole <= 1


def token_bytes(model_type: str, release: Release, **changes: object) -> int:
    """The bytes of a token of two layers of full attention and two of windows, with 2 KiB each."""
    mixed = replace(decoder(layers=(*attention(2), *attention(2, window=100))), model_type=model_type, **changes)
    flags = resolve_sglang(parse_query("arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=rtx-4090"), mixed, GPU)
    return plan_pool(mixed, replace(flags, release=release), GPU).token_bytes


def test_windows_of_some_models_have_a_pool_of_their_own():
    # four layers of 2 KiB; a pool of windows has 0.8 of the tokens
    whole, windows = 4 * 2048, round(2 * 2048 + 2 * 2048 * 0.8)
    assert token_bytes("gemma3_text", (0, 5, 23)) == token_bytes("gpt_oss", (0, 5, 7)) == whole
    assert token_bytes("gpt_oss", (0, 5, 8)) == token_bytes("gemma4_text", (0, 5, 11)) == windows
    assert token_bytes("gemma4_text", (0, 5, 10)) == whole
    # chunks of Llama 4 are three layers of four
    assert token_bytes("llama4_text", (0, 5, 8), layers=attention(4)) == round(2048 + 3 * 2048 * 0.8)


def test_sparse_attention_has_a_cache_in_8_bits_on_blackwell():
    sparse = decoder(layers=(Layer(kind=FULL, elements=576, shared=True, index_bytes=132),))
    query = "arch=hf:qwen3-8b&mode=serve&engine=sglang&engine_version={}&gpu={}"
    kinds = [("0.5.5", "b200"), ("0.5.4", "b200"), ("0.5.5", "h200")]
    kvs = [resolve_sglang(parse_query(query.format(*kind)), sparse, find_gpu(kind[1])).kv for kind in kinds]
    assert kvs == ["fp8", "auto", "auto"]
    assert resolve_sglang(parse_query(query.format("0.5.5", "b200")), decoder(), find_gpu("b200")).kv == "auto"


def test_layers_that_use_the_cache_of_others_have_one_of_their_own():
    (full,), (window,) = attention(1), attention(1, window=100)
    lent = replace(decoder(layers=(full, window, *[replace(full, elements=0)] * 2)), model_type="gemma4_text", lent=(window, full))
    flags = resolve_sglang(parse_query("arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=rtx-4090"), lent, GPU)
    assert plan_pool(lent, flags, GPU).token_bytes == token_bytes("gemma4_text", (0, 5, 23))


def test_a_model_that_reads_images_has_a_smaller_share_unless_it_is_served_as_text():
    query = parse_query("arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=rtx-4090")
    seeing = replace(decoder(), encoder="vision", vision=VISION)
    as_text, other = (replace(seeing, model_type=kind) for kind in ("gemma3_text", "gemma3n_text"))
    text, images, gemma, nano = (resolve_sglang(query, one, GPU).fraction for one in (decoder(), seeing, as_text, other))
    assert images == nano < text == gemma
    flags = resolve_sglang(query, seeing, GPU)
    before, after = (plan_pool(seeing, replace(flags, release=(0, 5, patch)), GPU).pool_bytes for patch in (17, 18))
    assert before - after == IMAGES_BYTES


def test_a_device_of_another_maker_has_no_graphs_of_prefills():
    # server_args.py, _handle_piecewise_cuda_graph, 0.5.10: is_hip; cuda_graph_config.py, default_prefill_backend, 0.5.23
    query = parse_query("arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=mi300x")
    gpu = find_gpu("mi300x")
    here, there = (resolve_sglang(query, decoder(), one).fraction for one in (gpu, replace(gpu, maker="NVIDIA")))
    # 74 sizes of 8 MiB of some 192 GiB
    custom = find_gpu("custom:24GiB@8.9")
    assert resolve_sglang(query, decoder(), custom) == resolve_sglang(query, decoder(), replace(custom, maker="NVIDIA"))
    assert here - there == pytest.approx(74 * 8 * MIB / (gpu.total_bytes + DRIVER_BYTES), abs=0.001)


def test_the_newest_version_is_the_default_and_a_newer_one_is_refused():
    assert served().engine_version == "0.5.23"
    with pytest.raises(RequestError, match=r"given '0.5.24', newer than the supported versions of SGLang, allowed 0.4.0 to 0.5.23"):
        parse_query("arch=hf:qwen3-8b&mode=serve&engine=sglang&engine_version=0.5.24")


def test_a_lever_of_ranks_changes_graphs_and_share_as_asking_for_them_does():
    query = "arch=hf:qwen3-8b&mode=serve&engine=sglang&gpu=rtx-4090&max_model_len=8k&tp="
    asked = resolve_sglang(parse_query(f"{query}4"), decoder(), GPU)
    changed = with_fraction(replace(resolve_sglang(parse_query(f"{query}2"), decoder(), GPU), tp=4))
    assert (changed.graph_batch, changed.fraction) == (asked.graph_batch, asked.fraction)


def test_weights_over_the_share_have_the_message_of_the_version():
    old, new = (served(fraction=0.001, release=(0, 5, patch)) for patch in (13, 14))
    assert old.message.startswith("Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_")
    assert new.message.startswith("Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.001. Raise ")
    assert read_startup(new.message).failure == read_startup(old.message).failure == "not enough memory for the pool"
    share = float(new.message.partition("above ")[2].partition(" ")[0])
    assert served(fraction=share + 0.001).kv_tokens > 0 == served(fraction=share - 0.001).kv_tokens


SGLANG = "arch=hf:qwen3-8b&mode=serve&engine=sglang"


def test_aiter_takes_a_part_of_the_share_on_amd():
    # sglang issue 18262: an MI355X, five layers of Qwen3-30B-A3B; 287.20 GB free, 12.79 of weights, 209.66 of cache
    gpu = find_gpu("mi355x")
    query = f"{SGLANG}&gpu=mi355x&engine_version=0.5.7"
    flags = resolve_sglang(parse_query(query), decoder(), gpu)
    assert (flags.fraction, static_share(flags)) == (0.911, pytest.approx((12.79 + 209.66) / 287.2, abs=3e-4))
    command = answer_sglang(decoder(), flags, gpu, model="org/model", want=None, auto=False).command
    assert "--mem-fraction-static 0.911 " in command
    short, old = f"{query}&max_model_len=8192", query.replace("0.5.7", "0.4.6")
    shares = [static_share(resolve_sglang(parse_query(one), decoder(), gpu)) for one in (short, old)]
    assert shares == [0.911, pytest.approx(1 - 13 * GIB / (gpu.total_bytes + DRIVER_BYTES))]
    latent = replace(decoder(heads=64), latent=(512, 128, 128))  # eight heads on a rank run on Triton, as in a log of Kimi K2.5
    shares = [static_share(resolve_sglang(parse_query(f"{query}&tp={tp}&util=0.8"), latent, gpu)) for tp in (8, 4)]
    assert shares == [0.8, pytest.approx(0.68)]


def test_a_log_on_amd_prints_the_share_that_is_left():
    log = "model_path='Qwen/Qwen3-8B', mem_fraction_static=0.77435, attention_backend='aiter'\nLoad weight end. mem usage=1.0 GB"
    logs = [f"sglang {version}, context_len=40960, {log}" for version in ("0.5.7", "0.5.4")]
    keys = [dict(item.split("=") for item in read_startup(text).query().split("&")) for text in logs]
    assert [one["util"] for one in keys] == ["0.911", "0.77435"]


def test_images_made_even_a_requested_share_smaller_until_0_4_9():
    seeing = replace(decoder(), encoder="vision", vision=VISION)
    for version, asked, default in (("0.4.4", 0.76, 0.88 * 0.95), ("0.4.8", 0.72, 0.9 * 0.879), ("0.4.9", 0.8, 0.9 * 0.879)):
        query = f"{SGLANG}&gpu=rtx-4090&engine_version={version}"
        found = [static_share(resolve_sglang(parse_query(f"{query}{more}"), seeing, GPU)) for more in ("&util=0.8", "")]
        assert found == [pytest.approx(asked), pytest.approx(default)], version


def test_large_devices_had_reserves_of_their_own_before_0_4_8():
    # server_args.py of 0.4.4, 0.4.6 and 0.4.7: an H200 has 143,771 MiB, an H20 97,871, a B200 more than 180,000
    total = 143_771
    cases = {
        ("h200", "0.4.4", 8): 0.81,
        ("h200", "0.4.6", 8): (total - 13 * 1024) / total,
        ("h200", "0.4.7", 8): (total - 18 * 1024) / total,
        ("h100-80gb", "0.4.7", 8): 0.81,
        ("h20", "0.4.7", 8): 0.88,
        ("b200", "0.4.7", 8): 0.79,
    }
    for (gpu, version, tp), share in cases.items():
        query = f"{SGLANG}&gpu={gpu}&engine_version={version}&tp={tp}"
        found = resolve_sglang(parse_query(query), decoder(), find_gpu(gpu)).fraction
        assert found == pytest.approx(share, abs=1e-3), (gpu, version)


def test_windows_of_gpt_oss_had_no_pool_on_blackwell_in_two_versions():
    mixed = replace(decoder(layers=(*attention(2), *attention(2, window=100))), model_type="gpt_oss")
    windows, whole = round(2 * 2048 + 2 * 2048 * 0.8), 4 * 2048
    for gpu, version, told in (("b200", "0.5.8", whole), ("b200", "0.5.10", windows), ("h200", "0.5.8", windows)):
        flags = resolve_sglang(parse_query(f"{SGLANG}&gpu={gpu}&engine_version={version}"), mixed, find_gpu(gpu))
        assert plan_pool(mixed, flags, find_gpu(gpu)).token_bytes == told, (gpu, version)


@pytest.mark.parametrize(
    ("version", "kind", "more", "slots", "running"),
    [
        ("0.5.3", "qwen3_next", "", 512, 512),  # no prefixes are cached
        ("0.5.3", "qwen3_next", "&max_num_seqs=40", 40, 40),
        ("0.5.4", "nemotron_h", "", 512, 512),
        ("0.5.8", "qwen3_next", "&prefix_caching=0", 512, 512),
        ("0.5.9", "qwen3_next", "&prefix_caching=0&max_num_seqs=40", 40, 40),
        ("0.5.4", "qwen3_next", "", None, None),  # by the memory, three states for a request
        ("0.5.14", "qwen3_next", "", None, None),  # five
        ("0.5.14", "lfm2", "", None, None),  # three
    ],
)
def test_states_are_as_many_as_the_version_keeps(version: str, kind: str, more: str, slots: int | None, running: int | None):
    # model_runner.py, is_hybrid_gdn, 0.5.3; handle_max_mamba_cache, 0.5.4, 0.5.8, 0.5.9 and 0.5.14
    state = 10 * MIB
    hybrid = replace(decoder(layers=(*attention(1), *states(1, state // 4))), model_type=kind)
    gpu = find_gpu("h100-80gb")
    flags = resolve_sglang(parse_query(f"{SGLANG}&gpu=h100-80gb&engine_version={version}{more}"), hybrid, gpu)
    plain = plan_pool(decoder(layers=attention(1)), flags, gpu)
    found = plan_pool(hybrid, flags, gpu)
    if slots is None:
        each = 5 if (version, kind) == ("0.5.14", "qwen3_next") else 3
        slots = int(plain.pool_bytes * 0.9 / 1.9 // state)
        running = slots // each
    assert (plain.pool_bytes - found.pool_bytes, found.running) == (slots * state, running)


def pool(architecture: Architecture, version: str, flags: str, **changes: object) -> Pool:
    """The pool of a server on an H100 with flags of the pool."""
    query = f"{SGLANG}&gpu=h100-80gb&engine_version={version}{f'&pool={flags}' if flags else ''}"
    gpu = find_gpu("h100-80gb")
    return plan_pool(architecture, replace(resolve_sglang(parse_query(query), architecture, gpu), **changes), gpu)


def test_flags_divide_the_pool_of_windows():
    mixed = replace(decoder(layers=(*attention(2), *attention(2, window=100))), model_type="gpt_oss")
    # two layers of 2 KiB keep all tokens, two keep the ratio of them
    for ratio in (0.1, 0.5, 1.0):
        assert pool(mixed, "0.5.20", f"swa_full_tokens_ratio:{ratio}").token_bytes == round(4096 + 4096 * ratio)
    # pool_configurator.py, _solve_pool_sizes, 0.5.11: the bound is of full attention; set_num_tokens_hybrid_swa, 0.5.8: of all
    # layers alike, 8 KiB for each of 1,000 tokens, which are shared out at 4 KiB + 0.5 * 4 KiB
    half = "max_total_tokens:1000,swa_full_tokens_ratio:0.5"
    assert pool(mixed, "0.5.11", half).tokens == 1000
    assert pool(mixed, "0.5.8", half).tokens == 1000 * 8192 // 6144
    assert pool(mixed, "0.5.11", half).pool_bytes == 1000 * 6144
    # a page is whole, and a bound beyond the memory has no effect
    assert pool(mixed, "0.5.20", "max_total_tokens:1000,page_size:64").tokens == 960
    assert pool(mixed, "0.5.20", "max_total_tokens:999999999") == pool(mixed, "0.5.20", "")


def test_flags_divide_the_pool_of_states():
    # mamba_utils.py, mamba2_state_dtype: float32 unless a flag says otherwise, whatever the model's dtype
    hybrid = replace(decoder(layers=(*attention(1), *states(1, 5 * MIB))), model_type="qwen3_next")
    assert pool(hybrid, "0.5.10", "").state_bytes == 20 * MIB
    assert pool(hybrid, "0.5.10", "mamba_ssm_dtype:bfloat16").state_bytes == 10 * MIB
    plain = pool(decoder(layers=attention(1)), "0.5.10", "").pool_bytes
    # kv_cache_configurator.py, _handle_max_mamba_cache: a number of states, else the ratio of their memory to that of tokens
    fixed = pool(hybrid, "0.5.10", "max_mamba_cache_size:43")
    assert (plain - fixed.pool_bytes, fixed.running) == (43 * 20 * MIB, 43 // 3)
    even = pool(hybrid, "0.5.10", "mamba_full_memory_ratio:1")
    assert plain - even.pool_bytes == plain // 2 // (20 * MIB) * 20 * MIB
    assert pool(hybrid, "0.5.20", "max_mamba_cache_size:43").running == 43 // 5  # with two more for each request


@pytest.mark.parametrize(
    ("model", "running"),
    [("granite-4.0-h-micro", 12), ("Qwen3.8-27B-FP8", 24)],  # max_mamba_cache_size: 38 // 3, and "capped to 24" of 124
)
def test_published_logs_have_as_many_states(model: str, running: int):
    row = next(row for row in read_rows("sglang") if row.cells["model"] == model)
    assert pool_of(row).running == running


def test_a_published_log_with_states_in_16_bits_and_drafted_tokens():
    # index: "max_mamba_cache_size: 43, conv_state 0.12GB" and "#tokens: 171008": Qwen3.6-27B on an A100 with SGLang 0.5.17
    query = f"{SGLANG.replace('qwen3-8b', 'qwen3.6-27b')}&gpu=a100-80gb&engine_version=0.5.17&util=0.92&max_model_len=169000"
    report = estimate(parse_query(f"{query}&max_num_seqs=4&pool=mamba_ssm_dtype:bfloat16&speculative=mtp:5"))
    assert report.serve.kv_tokens == pytest.approx(171_008, rel=0.02)
    assert report.serve.kv_tokens_low < 171_008 < report.serve.kv_tokens_high


def test_an_answer_has_the_pool_of_the_logs():
    # NCCL's memory is in the fitted bytes between ranks: it was taken off twice
    row = next(row for row in read_rows("sglang") if row.cells["gpu"] == "l4" and row.cells["tp"] == "4")
    request = replace(request_of(row), gpu="l4")
    served = estimate(request).serve
    assert served.kv_tokens == pytest.approx(row.integer("kv_tokens"), rel=0.02)
    assert served.kv_tokens_low < row.integer("kv_tokens") < served.kv_tokens_high


def test_the_range_is_as_wide_as_free_memory_differs():
    # tests/measured/published/serving.csv: free memory on a DGX Spark, and between ranks on MI355X
    for gpu, more, band in (("dgx-spark", "", 4), ("mi355x", "&tp=2", 8), ("mi355x", "", 1), ("h100-80gb", "&tp=2", 1)):
        served = estimate(parse_query(f"{SGLANG}&gpu={gpu}{more}")).serve
        assert served.kv_cache_bytes - served.kv_cache_low_bytes == band * GIB, gpu
        assert any(f"up to {band} GiB" in reason for reason in served.reasons)


def test_what_a_bound_of_the_pool_leaves_is_a_change():
    query = f"{SGLANG}&gpu=h100-80gb&max_model_len=8k&pool=max_total_tokens:16384&want=4x8k"
    served = estimate(parse_query(query)).serve
    assert (served.kv_tokens, served.want.fits) == (16_384, False)
    assert "--max-total-tokens 16384" in served.command
    assert served.levers[0].flags == "--max-total-tokens 32768"
    assert parse_query(f"{SGLANG}&{served.levers[0].query}").pool == (("max_total_tokens", "32768"),)


def test_groups_of_attention_have_requests_of_their_own():
    # deepseek_v2.py and qwen3_moe.py, attn_tp_size: 4 key heads on 4 ranks, or on 2 in each of 2 groups
    plain, grouped = (pool(decoder(), "0.5.20", "", tp=4, attn_dp=groups, asked_fraction=0.8) for groups in (1, 2))
    assert grouped.token_bytes == 2 * plain.token_bytes
    assert plain.weights_bytes < grouped.weights_bytes < pool(decoder(), "0.5.20", "", tp=2, asked_fraction=0.8).weights_bytes
    answer, both = (served(tp=4, attn_dp=groups, asked_fraction=0.8) for groups in (1, 2))
    assert (answer.gpus, both.gpus) == (4, 4)
    assert both.requests_at_once == pytest.approx(2 * both.kv_tokens / 8192, abs=0.01)
    # memory_hook.py, reserve_for_graph_mb, 0.5.19: graph_batch * groups * 3 MiB, 4.5 from 300 on
    query = f"{SGLANG}&gpu=h200&engine_version=0.5.19&tp=8"
    shares = [resolve_sglang(parse_query(f"{query}{more}"), decoder(), find_gpu("h200")) for more in ("", "&attn_dp=4")]
    total_mib = (find_gpu("h200").total_bytes + DRIVER_BYTES) / MIB
    assert shares[0].graph_batch > 300
    assert shares[0].fraction - shares[1].fraction == pytest.approx(shares[0].graph_batch * 4 * 4.5 / total_mib, abs=1e-3)
    assert shares[1].shown()["chunked_prefill_size"] * 4 == shares[0].shown()["chunked_prefill_size"]


def test_attention_of_deepseek_keeps_as_much_of_a_token_in_each_group():
    # index: "KV Cache is allocated. #tokens: 524288, KV size: 17.16 GB" of DeepSeek-R1 with tp 8 and dp 8 in FP8
    query = f"{SGLANG.replace('qwen3-8b', 'deepseek-v3')}&gpu=b200&tp=8&attn_dp=8&kv=fp8&pool=max_total_tokens:524288"
    served = estimate(parse_query(query)).serve
    assert (served.kv_tokens, round(served.kv_cache_bytes / GIB, 2)) == (524_288, 17.16)


@pytest.mark.parametrize(
    ("more", "allowed"), [("tp=8&attn_dp=3", "a divisor of tp"), ("tp=8&attn_dp=8&engine_version=0.4.9", "SGLang 0.5.3 or later")]
)
def test_groups_that_are_not_planned_are_refused(more: str, allowed: str):
    with pytest.raises(RequestError, match=allowed):
        resolve_sglang(parse_query(f"{SGLANG}&gpu=h200&{more}"), decoder(), find_gpu("h200"))


def test_commands_name_groups_as_their_version_does():
    for version, words in (("0.5.21", "--dp 4 --enable-dp-attention"), ("0.5.22", "--attn-dp-size 4")):
        flags = resolve_sglang(parse_query(f"{SGLANG}&gpu=h200&tp=8&attn_dp=4&engine_version={version}"), decoder(), GPU)
        assert words in sglang_command("org/model", flags)


def test_a_server_without_the_states_of_one_request_does_not_start():
    hybrid = replace(decoder(layers=(*attention(1), *states(1, 5 * MIB))), model_type="qwen3_next")
    for slots, starts in ((4, False), (5, True)):  # five states for each request; resolve_max_num_reqs, 0.5.23
        answer = served(hybrid, pool=(("max_mamba_cache_size", str(slots)),))
        assert (answer.starts, "state cache is too small" in answer.message) == (starts, not starts)


def test_no_more_requests_run_at_once_than_states_allow():
    hybrid = replace(decoder(layers=(*attention(1), *states(1, 25 * MIB))), model_type="qwen3_next")
    answer = served(hybrid, context_length=1024)
    assert answer.kv_tokens // 1024 > answer.requests_at_once == answer.contexts[0].requests
    plain = served(context_length=64)  # max_running_requests is at most 4,096
    assert plain.kv_tokens // 64 > plain.requests_at_once == 4096


def test_a_requested_number_of_requests_does_not_fit_if_states_do_not_allow_it():
    hybrid = replace(decoder(layers=(*attention(1), *states(1, 25 * MIB))), model_type="qwen3_next")
    flags = resolve_sglang(parse_query(f"{SGLANG}&gpu=rtx-4090"), hybrid, GPU)
    most = plan_pool(hybrid, flags, GPU).running
    fits = [answer_sglang(hybrid, flags, GPU, model="org/model", want=(count, 64), auto=False).want.fits for count in (8, most + 1)]
    assert fits == [True, False]


def test_buffers_between_ranks_come_off_the_free_memory():
    # "Init torch distributed ends. mem usage": 1.25 GB for 8 H100 (0.5.2), 2.0 for 8 H200 (0.5.3), 0.13 for 4 L4, 0.19 for 2 4090
    told = {("h100-80gb", 8): 1.25, ("h100-80gb", 2): 0.2, ("l4", 4): 0.2, ("rtx-4090", 2): 0.2, ("h100-80gb", 1): 0}
    for (gpu, tp), gib in told.items():
        flags = resolve_sglang(parse_query(f"{SGLANG}&gpu={gpu}&tp={tp}"), decoder(), find_gpu(gpu))
        assert ranks_bytes(flags, find_gpu(gpu)) == pytest.approx(gib * GIB, rel=0.01), gpu
