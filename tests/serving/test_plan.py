"""The plan by hand: what the budget is spent on, whether the server starts, its message and what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.base.units import GIB, MIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.text import parse_query
from sizer.report.served import Served
from sizer.serving.answer import answer_vllm, longest_flags
from sizer.serving.flags import resolve_flags, runs_second
from sizer.serving.graphs import capture_sizes, graph_bytes
from sizer.serving.plan import (
    DENSE_BAND,
    OTHER_BAND,
    VISION_BAND,
    Plan,
    compiling_bytes,
    make_plan,
    server_message,
    wanted,
)
from sizer.serving.rules import RULES, rules_of
from sizer.serving.words import headline, sum_line, want_line
from tests.serving.models import decoder, flags, profiler

GPU = replace(find_gpu("rtx-4090"), total_bytes=24 * GIB)


def plan(**changes: object) -> Plan:
    return make_plan(decoder(), flags(**changes), profiler, GPU)


def answer(want: tuple[int, int] | None = None, **changes: object) -> Served:
    return answer_vllm(decoder(), flags(**changes), profiler, GPU, model="org/model", want=want)


def test_the_budget_is_the_sum_of_its_parts():
    found = plan()
    # the sampler holds 256 MiB; beside it 2,048 rows of hidden states and twice 256, of 2,048 bytes
    assert found.profile_peak_bytes == 256 * MIB + (2048 + 512) * 2048
    assert found.budget_bytes == -(-24 * GIB * 9 // 10)
    spent = found.weights_bytes + found.profile_peak_bytes + found.outside_torch_bytes + found.kv_cache_bytes
    assert found.budget_bytes == spent
    assert found.starts is True
    assert server_message(found, decoder()) == ""


def test_the_largest_graph_follows_the_device():
    sizes = {}
    for gpu in ("b200", "h100-80gb", "rtx-5090"):
        for version in ("0.27.1", "0.28.0"):
            request = parse_query(f"arch=hf:qwen3-8b&mode=serve&gpu={gpu}&engine_version={version}&max_num_seqs=1024")
            sizes[gpu, version] = capture_sizes(resolve_flags(request, decoder(), find_gpu(gpu), 132))[-1]
    assert {key: size for key, size in sizes.items() if size != 512} == {("b200", "0.28.0"): 1024}


def test_a_step_holds_a_whole_video_of_gemma_4():
    def tokens(version: str, more: str = "") -> int:
        request = parse_query(f"arch=hf:gemma-4-31b&mode=serve&gpu=l40s&engine_version={version}{more}")
        return resolve_flags(request, replace(decoder(), item_tokens=2496), find_gpu("l40s"), 142).max_num_batched_tokens

    assert [tokens(version) for version in ("0.21.0", "0.22.0")] == [2048, 2496]
    assert tokens("0.33.0", "&inputs=text") == 2048
    assert [tokens("0.33.0", f"&{more}") for more in ("max_num_batched_tokens=1024", "api=offline")] == [1024, 8192]


def test_graphs_come_off_the_budget_from_0_20_on():
    before, after = plan(release=(0, 19, 1)), plan(release=(0, 20, 0))
    assert before.graphs_bytes == after.graphs_bytes > 0
    assert before.kv_cache_bytes - after.kv_cache_bytes == after.graphs_bytes
    assert plan(release=(0, 20, 0), eager=True).graphs_bytes == 0


def test_graphs_are_captured_for_the_sizes_of_the_version():
    # 1, 2, 4; 8 to 248 by 8; 256 to 512 by 16
    assert len(capture_sizes(flags())) == 3 + 31 + 17
    assert capture_sizes(flags(max_num_seqs=6)) == (1, 2, 4, 8)
    assert capture_sizes(flags(eager=True)) == ()
    # from 0.31 on max_num_seqs too; from 0.20.1 on a step of 100 tokens
    assert capture_sizes(flags(release=(0, 31, 0), max_num_seqs=6)) == (1, 2, 4, 6, 8)
    assert capture_sizes(flags(release=(0, 20, 1), max_num_batched_tokens=100))[-2:] == (96, 100)
    assert capture_sizes(flags(release=(0, 20, 0), max_num_batched_tokens=100))[-2:] == (88, 96)
    # of three drafted tokens: 4 for each of 1, 2, 4, 8, ... 24, 25 requests up to 2 x 4 x 25; from 0.29 on
    drafting = {"max_num_seqs": 25, "draft_tokens": 3}
    more = set(capture_sizes(flags(release=(0, 29, 0), **drafting))) - set(capture_sizes(flags(release=(0, 28, 0), **drafting)))
    assert more == {100}
    # 35 of the 51 sizes are up to 256 requests
    assert graph_bytes(decoder(), flags()) == 3 * MIB // 10 * 4 * (51 + 35)


@pytest.mark.parametrize(("field", "values"), [("max_num_seqs", (1, 32, 256, 1024)), ("max_num_batched_tokens", (512, 2048, 8192))])
def test_more_at_once_never_leaves_more_cache(field: str, values: tuple[int, ...]):
    caches = [plan(**{field: value}).kv_cache_bytes for value in values]
    assert caches == sorted(caches, reverse=True)


def test_a_larger_share_leaves_more_cache():
    caches = [plan(util=share / 100).kv_cache_bytes for share in range(1, 101)]
    assert caches == sorted(caches)
    assert len(set(caches)) == 100


def test_the_range_depends_on_what_is_not_exact():
    assert plan().band_bytes == DENSE_BAND
    assert plan(tp=2).band_bytes == plan(release=(0, 20, 0)).band_bytes == OTHER_BAND
    seeing = make_plan(replace(decoder(), encoder="vision"), flags(), profiler, GPU)
    assert (seeing.band_bytes, "vision" in seeing.reasons[-1]) == (VISION_BAND, True)
    assert plan(kv_bytes=GIB).band_bytes == 0


def test_a_server_that_has_no_room_says_so_as_vllm_does():
    small = replace(GPU, total_bytes=2 * GIB, context_bytes=0, context_low_bytes=0, context_high_bytes=0)
    tight = make_plan(decoder(), flags(total_bytes=2 * GIB, util=0.1), profiler, small)
    assert tight.kv_cache_bytes < -DENSE_BAND
    assert (tight.starts, server_message(tight, decoder())[:42]) == (False, "No available memory for the cache blocks. ")
    # 8,192 tokens are 512 blocks of 128 KiB, 64 MiB; 32 MiB hold 4,096
    short = make_plan(decoder(), flags(kv_bytes=32 * MIB), profiler, GPU)
    assert short.starts is False
    message = server_message(short, decoder())
    assert "max seq len (8192), (0.06 GiB KV cache is needed" in message
    assert "(0.03 GiB). Based on the available memory, the estimated maximum model length is 4096." in message


def test_memory_in_use_must_leave_the_budget_free():
    busy = plan(used_bytes=4 * GIB)
    assert busy.starts is False
    assert server_message(busy, decoder()).startswith("Free memory on device cuda:0 (")
    lever = answer(used_bytes=4 * GIB).levers[0]
    assert (lever.query.partition("=")[0], lever.starts) == ("util", True)


def test_levers_are_plans_of_their_own_and_the_most_useful_is_first():
    found = answer()
    gains = [lever.gained for lever in found.levers]
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 0 for gain in gains)
    fewer = next(lever for lever in found.levers if lever.query == "max_num_seqs=32")
    assert fewer.kv_cache_bytes == plan(max_num_seqs=32).kv_cache_bytes


def test_the_smallest_sets_that_start_come_first():
    # the sampler's 900 MiB are more than the budget: fewer requests at once alone are enough
    small = replace(GPU, total_bytes=GIB, context_bytes=0, context_low_bytes=0)
    tight = flags(total_bytes=GIB, util=0.6, max_num_seqs=900)
    found = answer_vllm(decoder(), tight, profiler, small, model="org/model")
    assert found.starts is False
    assert [lever.starts for lever in found.levers] == [True] * len(found.levers)
    assert "--max-num-seqs 32" in [lever.flags for lever in found.levers]
    assert not any(" --max" in lever.flags for lever in found.levers)


def test_a_shorter_length_is_offered_and_frees_nothing():
    # a request of 8,192 tokens needs 64 MiB: 40 MiB hold 5,120 tokens, or all of them in 8 bits or on two GPUs
    levers = answer(kv_bytes=40 * MIB, max_model_len=8192).levers
    assert [lever.query for lever in levers] == ["kv=fp8", "tp=2", "max_model_len=5120"]
    assert (levers[-1].gained, levers[-1].kv_cache_bytes) == (0.0, 40 * MIB)
    assert not any("max_model_len" in lever.query for lever in answer(kv_bytes=40 * MIB, max_model_len=8192, want=(1, 8192)).levers)


def test_larger_sets_follow_changes_that_need_more_gpus_or_shorter_requests():
    # a request of 32,768 tokens needs 256 MiB: 100 MiB hold a shorter one, or all of it in 8 bits on two GPUs
    levers = answer(kv_bytes=100 * MIB, max_model_len=32_768).levers
    assert [lever.query for lever in levers] == ["max_model_len=12800", "kv=fp8&tp=2"]
    # a device of 400 MiB holds 4,464 tokens, or in 8 bits with smaller weights all that were allowed
    small = replace(GPU, total_bytes=400 * MIB, context_bytes=0, context_low_bytes=0)
    tight = flags(total_bytes=400 * MIB, util=0.95, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=16_384)
    sets = [lever.query for lever in answer_vllm(decoder(), tight, profiler, small, model="org/model").levers]
    assert sets == ["max_model_len=4464", "kv=fp8&weights=awq", "kv=fp8&weights=fp8"]


def test_what_is_wanted_is_answered_with_what_is_missing():
    # 64 requests of 1,024 tokens are 64 * 64 blocks of 128 KiB, 512 MiB
    held = plan(kv_bytes=512 * MIB)
    assert (wanted(held, decoder(), (64, 1024)).fits, wanted(held, decoder(), (64, 1024)).missing_bytes) == (True, 0)
    more = wanted(held, decoder(), (65, 1024))
    assert (more.fits, more.missing_bytes) == (False, 8 * MIB)
    assert want_line(more) == "No: 65 requests of 1,024 tokens at once; 8.00 MiB of cache are missing."
    assert wanted(held, decoder(), (1, 8193)).fits is False  # longer than max_model_len


def test_auto_is_the_longest_that_surely_fits():
    short = flags(kv_bytes=32 * MIB)
    found = longest_flags(decoder(), replace(short, max_model_len=32_768), profiler, GPU)
    assert found.max_model_len == 4096
    assert make_plan(decoder(), found, profiler, GPU).starts is True


def test_copies_hold_as_many_requests_each():
    one, two = answer(), answer(dp=2)
    assert two.requests_at_once == pytest.approx(2 * one.requests_at_once, abs=0.02)
    assert (two.gpus, two.kv_tokens) == (2, one.kv_tokens)


def test_the_command_has_every_flag():
    found = answer(tp=2, kv="fp8", eager=True, layout="fp8")
    assert found.command == (
        "vllm serve org/model --max-model-len 8192 --max-num-seqs 256 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.9 "
        "--tensor-parallel-size 2 --kv-cache-dtype fp8 --enforce-eager --quantization fp8"
    )
    assert "--kv-cache-memory-bytes 1073741824" in answer(kv_bytes=GIB).command


def test_words_of_an_answer():
    found = answer()
    assert headline(found).startswith(f"Starts. {found.requests_at_once:,.1f} requests of 8,192 tokens at once; ")
    assert sum_line(found, 1000).startswith("21.60 GiB budget = ")
    assert "(sampler: 256 × 1,000 logits)" in sum_line(found, 1000)


def test_every_rule_has_a_value_in_the_oldest_version_and_a_source():
    assert rules_of((0, 9, 0)).util == 0.9
    assert rules_of((0, 33, 0)).util == 0.92
    assert all(rule.source for rule in RULES)


def test_levers_aim_at_what_is_wanted():
    # 64 requests of 1,024 tokens are 512 MiB; 300 MiB hold 37
    asked = {"kv_bytes": 300 * MIB, "max_num_seqs": 256, "want": (64, 1024)}
    found = answer(**asked)
    assert (found.starts, found.want.fits) == (True, False)
    assert {lever.query for lever in found.levers} == {"kv=fp8", "tp=2"}
    assert all(lever.fits is True for lever in found.levers)
    more = answer(kv_bytes=600 * MIB, max_num_seqs=16, want=(64, 1024))
    assert [lever.query for lever in more.levers] == ["max_num_seqs=64"]
    longer = answer(kv_bytes=600 * MIB, max_num_seqs=256, max_model_len=512, want=(64, 1024))
    assert [lever.query for lever in longer.levers] == ["max_model_len=1024"]


def test_what_no_set_holds_leaves_what_gains_requests():
    found = answer(kv_bytes=300 * MIB, want=(64, 8192))
    assert found.want.fits is False and found.levers
    assert not any(lever.fits is True for lever in found.levers) and all(lever.gained > 0 for lever in found.levers)


@pytest.mark.parametrize(
    ("release", "model_type", "second"),
    [
        ((0, 21, 0), "qwen3", False),
        ((0, 22, 1), "qwen3", True),
        ((0, 22, 1), "llama", False),
        ((0, 23, 0), "llama", True),
        ((0, 24, 0), "gemma3", False),
        ((0, 25, 1), "gemma3", True),
        ((0, 28, 0), "qwen3_moe", False),
        ((0, 28, 0), "qwen2_moe", True),
        ((0, 29, 0), "qwen3_moe", True),
    ],
)
def test_the_second_model_runner_runs_what_its_version_says(release: tuple[int, int, int], model_type: str, second: bool):
    model = replace(decoder(), model_type=model_type, experts=8 if "moe" in model_type else 0)
    assert runs_second(rules_of(release), model) is second


def test_the_second_model_runner_estimates_graphs_from_0_29_on():
    for release, counted in (((0, 28, 0), False), ((0, 29, 0), True)):
        found = plan(release=release, second_runner=True)
        assert flags(release=release, second_runner=True).graphs_in_budget is counted
        spent = found.weights_bytes + found.profile_peak_bytes + found.outside_torch_bytes + found.kv_cache_bytes
        assert found.budget_bytes - spent == (found.graphs_bytes if counted else 0)


def test_a_first_start_holds_a_tensor_of_the_embeddings_size():
    few = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    wide = replace(decoder(), vocabulary=1_000_000)
    compiled, eager = (make_plan(wide, flags(release=(0, 20, 0), eager=one, **few), profiler, GPU) for one in (False, True))
    table = -(-1_000_000 // 64) * 64 * 1024 * 2
    assert compiled.profile_peak_bytes == compiled.compiling_bytes == table + 64 * 1024 * 2
    assert eager.compiling_bytes == 0
    assert compiled.band_bytes == compiled.compiling_bytes + DENSE_BAND
    assert "compiles" in compiled.reasons[-1]
    assert compiling_bytes(wide, flags(release=(0, 11, 0), **few)) == 0
    assert compiling_bytes(replace(wide, encoder="visual"), flags(release=(0, 20, 0), **few)) == 0
    assert compiling_bytes(wide, flags(release=(0, 20, 0), tp=2, **few)) == table // 2 + 64 * 1024 * 2
