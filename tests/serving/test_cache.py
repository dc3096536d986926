"""The KV cache by hand: pages, groups, blocks, tokens and requests at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.text import parse_query
from sizer.serving.architecture import CHUNKED, COMPRESSED, FULL, Architecture, Layer
from sizer.serving.cache import longest_request, plan_cache
from sizer.serving.command import vllm_command
from sizer.serving.flags import resolve_flags
from tests.serving.logs import architecture_of
from tests.serving.models import attention, decoder, flags, states

KIB = 1024


def test_blocks_of_one_group():
    # a token has 1,024 elements in each of 4 layers, 2 bytes each: 8 KiB; a block of 16 tokens 128 KiB; 1 MiB holds 8 blocks
    plan = plan_cache(decoder(), flags(max_model_len=64), 1024 * KIB)
    assert (plan.block_bytes, plan.blocks, plan.kv_tokens) == (128 * KIB, 8, 128)
    assert (plan.blocks_per_request, plan.requests_at_once) == (4, 2.0)
    assert plan_cache(decoder(), flags(), 128 * KIB - 1).blocks == 0
    assert plan_cache(decoder(), flags(), -1).blocks == 0


def test_an_indexer_keeps_a_key_beside_each_latent():
    # a latent of 576 elements in 16 bits and 132 bytes; in 8 bits vLLM's own layout of 656 bytes, and the same 132
    sparse = decoder(layers=tuple(Layer(kind=FULL, elements=576, shared=True, index_bytes=132) for _ in range(2)))
    sizes = [plan_cache(sparse, flags(kv=kv, tp=tp), 2**30).block_bytes for kv in ("auto", "fp8") for tp in (1, 8)]
    assert sizes == [2 * 16 * (1152 + 132)] * 2 + [2 * 16 * (656 + 132)] * 2


def test_ranks_that_share_the_tokens_of_a_request_hold_as_many_times_more():
    # a published log of a model with 61 layers of MLA on 8 GPUs, "Multiplying the GPU KV cache size by the dcp_world_size 8":
    # 46.80 GiB are 715,072 tokens, with decode context parallel of 8 5,721,088
    latent = decoder(layers=tuple(Layer(kind=FULL, elements=576, shared=True) for _ in range(61)))
    plans = [plan_cache(latent, flags(tp=8, dcp=dcp, block=64, max_model_len=8192), round(46.8 * 2**30)) for dcp in (1, 8)]
    assert plans[0].kv_tokens == 715_072
    assert plans[1].kv_tokens == 8 * 715_072 == pytest.approx(5_721_088, rel=1e-4)
    assert [plan.blocks_per_request for plan in plans] == [128, 16]


def test_windows_have_groups_of_their_own():
    # 2 full and 6 sliding layers: groups of 2, one full and three sliding; a block 2 layers * 16 tokens * 2 KiB = 64 KiB
    mixed = decoder(layers=(*attention(2), *attention(6, window=100)))
    plan = plan_cache(mixed, flags(max_model_len=8192, max_num_batched_tokens=1000), 64 * KIB * 1000)
    assert ([group.kind for group in plan.groups], plan.block_bytes) == (["full", *["sliding"] * 3], 64 * KIB)
    # full 8,192 / 16 = 512; a window keeps 99 tokens and a step of 1,000: 69 blocks, and one where it begins in the middle
    assert plan.blocks_per_request == 512 + 3 * 70
    assert plan.kv_tokens == 1000 // 4 * 16  # up to 0.20 the blocks of a group


def test_chunks_are_kept_alone_in_versions_that_allow_it():
    # 1 full and 3 chunked layers, in a group each; up to 0.9 and from 0.10.1 to 0.13 all four keep the whole request
    layers = (*attention(1), *(replace(layer, kind=CHUNKED) for layer in attention(3, window=1000)))
    releases = ((0, 9, 2), (0, 10, 0), (0, 13, 0), (0, 14, 0), (0, 26, 0))
    plans = [plan_cache(decoder(layers=layers), flags(release=release), 2**30) for release in releases]
    assert [len(plan.groups) for plan in plans] == [1, 4, 1, 4, 4]
    # a chunk of 1,000 and a step of 2,048: 191 blocks; from 0.26 on two steps
    assert [plan.blocks_per_request for plan in plans] == [512, 512 + 3 * 191, 512, 512 + 3 * 191, 512 + 3 * 319]


# vLLM's own planners on the cache specs of both models in 20 GiB: 0.22.0, 0.26.0 and 0.33.0, max_in_flight_tokens of 8,192 or twice
# as many. The first row of 0.22 with 30,000 tokens is a published error, too: 6.66 GiB are needed (vllm-project/vllm/issues/44376).
COMPRESSED_PLANS = (
    ("flash", "0.22.0", 1_048_576, 8192, 20_417, 7_835_731_200, 3_030_258),
    ("flash", "0.22.0", 30_000, 16_384, 20_417, 7_152_076_800, 101_492),
    ("pro", "0.22.0", 1_048_576, 8192, 14_489, 11_041_257_600, 2_133_523),
    ("flash", "0.26.0", 30_000, 16_384, 20_655, 12_947_362_560, 56_754),
    ("pro", "0.26.0", 1_048_576, 8192, 14_574, 15_973_513_344, 1_509_477),
    ("flash", "0.33.0", 1_048_576, 8192, 21_426, 10_802_142_720, 2_084_504),
    ("pro", "0.33.0", 30_000, 16_384, 14_954, 17_676_766_080, 36_443),
)


def compressed(model: str) -> Architecture:
    """A decoder with the layers of DeepSeek-V4-Flash or Pro."""
    rates = [1, 1, *[4, 128] * 20, 4] if model == "flash" else [128, 128, *[4, 128] * 29, 4]
    layers = (
        Layer(kind=COMPRESSED, elements=512, shared=True, window=128, ratio=rate, index_bytes=132 * (rate == 4)) for rate in rates
    )
    return decoder(layers=tuple(layers))


@pytest.mark.parametrize("row", COMPRESSED_PLANS, ids=lambda row: "-".join(map(str, row[:3])))
def test_compressed_entries_windows_and_states_are_packed_as_vllm_does(row: tuple[str, str, int, int, int, int, int]):
    model, version, length, step, blocks, needed, tokens = row
    release = tuple(map(int, version.split(".")))
    asked = flags(release=release, block=256, max_model_len=length, max_num_batched_tokens=step)
    plan = plan_cache(compressed(model), asked, 20 * 2**30)
    assert (len(plan.groups), plan.blocks, plan.needed_bytes, plan.kv_tokens) == (5, blocks, needed, tokens)


def test_compressed_entries_are_those_of_published_logs():
    # vllm-project/vllm/issues/51041, 0.26.0: "only 150K tokens in 7.7 GiB"; issues/44376, 0.22: the longest of 5.44 GiB is 13,528
    asked = flags(release=(0, 26, 0), block=256, max_model_len=121_344, max_num_batched_tokens=8192)
    assert plan_cache(compressed("flash"), asked, round(7.7 * 2**30)).kv_tokens == pytest.approx(150_000, rel=0.01)
    asked = flags(release=(0, 22, 0), block=256, max_model_len=30_000, max_num_batched_tokens=16_384)
    plan = plan_cache(compressed("flash"), asked, round(5.44 * 2**30))
    assert longest_request(plan, asked, 30_000) == pytest.approx(13_528, abs=8)  # the log's memory has two decimals


def test_later_versions_hold_a_block_back():
    # a request of 64 tokens needs four blocks: up to 0.28 they are enough, from 0.29 on the server asks for a fifth
    usable = [plan_cache(decoder(), flags(release=(0, minor, 0)), 512 * KIB).usable for minor in (28, 29)]
    assert usable == [4, 3]


def test_later_versions_say_tokens_of_whole_requests():
    plan = plan_cache(decoder(layers=(*attention(2), *attention(6, window=100))), flags(release=(0, 25, 0)), 64 * KIB * 10_000)
    # a window of 99 and a step of 2,048: 135 blocks, and one more
    assert plan.blocks_per_request == 512 + 3 * 136
    assert plan.kv_tokens == 10_000 * 8192 // 920


def test_two_steps_are_in_flight_from_0_30_on():
    mixed = decoder(layers=(*attention(2), *attention(2, window=100)))
    each = [plan_cache(mixed, flags(release=release), 2**30).blocks_per_request for release in ((0, 25, 1), (0, 26, 0))]
    # (99 + 2,048) / 16 is 135 blocks, (99 + 4,096) / 16 is 263, and one more each
    assert each == [512 + 136, 512 + 264]


def test_groups_are_padded_from_0_12_on():
    # 4 full and 5 sliding layers: 5 are less than 1.5 times 4, so a group has 5; before, 4, and sliding ones have two groups
    uneven = decoder(layers=(*attention(4), *attention(5, window=100)))
    assert [len(plan_cache(uneven, flags(release=(0, minor, 0)), 2**30).groups) for minor in (11, 12)] == [3, 2]


def test_attention_blocks_grow_until_a_page_holds_a_state():
    # a state of 50,000 elements of 4 bytes, 200,000 bytes; a token has 2,048: 98 tokens, in steps of 16 112
    mixed = replace(decoder(layers=(*states(3, 50_000), *attention(1))), state_itemsize=4)
    plan = plan_cache(mixed, flags(max_model_len=1120), 112 * 2048 * 100)
    assert (plan.block_tokens, plan.block_bytes, plan.blocks) == (112, 112 * 2048, 100)
    assert [group.kind for group in plan.groups] == ["full", "state", "state", "state"]
    assert plan.blocks_per_request == 10 + 3 * 2  # with prefix caching a state is kept twice
    once = plan_cache(mixed, flags(max_model_len=1120, prefix_caching=False), 112 * 2048 * 100)
    assert once.blocks_per_request == 10 + 3


def test_states_alone_do_not_grow_with_a_request():
    plans = [plan_cache(decoder(layers=states(4, 1000)), flags(max_model_len=length), 2**20) for length in (16, 8192)]
    assert plans[0].requests_at_once == plans[1].requests_at_once > 0


@pytest.mark.parametrize(("tp", "elements"), [(1, 1024), (2, 512), (4, 256), (8, 256)])
def test_heads_are_split_and_then_replicated(tp: int, elements: int):
    plan = plan_cache(decoder(), flags(tp=tp), 2**30)
    assert plan.block_bytes == elements * 2 * 16 * 4


def test_fp8_holds_twice_the_tokens_within_a_block():
    for available in (10**6, 123_456_789, 2**33):
        plain, small = (plan_cache(decoder(), flags(kv=kv), available) for kv in ("auto", "fp8"))
        assert 0 <= small.blocks - 2 * plain.blocks <= 1


def test_the_longest_request_is_the_last_that_fits():
    plan = plan_cache(decoder(), flags(), 128 * KIB * 100)
    assert longest_request(plan, flags(), 32_768) == 1600
    assert longest_request(plan, flags(), 1000) == 1000
    assert longest_request(plan_cache(decoder(), flags(), 0), flags(), 1000) == 0


def test_stages_plan_their_own_layers():
    whole, first = (plan_cache(decoder(), flags(pp=pp), 2**30) for pp in (1, 2))
    assert first.block_bytes * 2 == whole.block_bytes


def test_prefixes_of_models_with_states_are_cached_if_that_is_asked_for():
    mixed, plain = decoder(layers=(*states(3, 1000), *attention(1))), decoder()
    alone = decoder(layers=states(4, 1000))
    older = "&engine_version=0.25.1"
    cases = ((older, (False, False, True)), ("", (False, True, True)))
    for keys, expected in (*cases, ("&prefix_caching=1", (True, True, True)), ("&prefix_caching=0", (False, False, False))):
        request = parse_query(f"arch=hf:qwen3-8b&mode=serve{keys}")
        found = [resolve_flags(request, one, find_gpu("l4"), 58).prefix_caching for one in (alone, mixed, plain)]
        assert tuple(found) == expected
    both = [(usual, on) for usual in (True, False) for on in (True, False)]
    asked = [vllm_command("m", flags(prefix_caching=on), quantizes=False, caches_prefixes=usual) for usual, on in both]
    assert ["prefix" in command for command in asked] == [False, True, True, False]


@pytest.mark.parametrize(
    ("release", "pp", "second", "steps"),
    [
        ((0, 25, 1), 4, True, 1),
        ((0, 26, 0), 1, False, 2),
        ((0, 26, 0), 4, False, 4),
        ((0, 26, 0), 1, True, 2),
        ((0, 26, 0), 4, True, 5),
    ],
)
def test_a_pipeline_has_several_steps_under_way(release: tuple[int, int, int], pp: int, second: bool, steps: int):
    assert flags(release=release, pp=pp, second_runner=second).steps_in_flight == steps


@pytest.mark.parametrize(
    ("preset", "version", "gpu", "more", "found"),
    [
        ("qwen3.5-4b", "0.32.0", "h100-80gb", "", (0, 16)),
        ("qwen3.5-4b", "0.33.0", "h100-80gb", "", (1, 64)),
        ("qwen3.5-4b", "0.33.0", "a100-80gb", "", (0, 16)),
        ("qwen3.5-4b", "0.33.0", "mi300x", "", (0, 16)),
        ("qwen3.5-4b", "0.33.0", "h100-80gb", "&prefix_caching=0", (0, 16)),
        ("granite-4.0-h-micro", "0.31.0", "h100-80gb", "", (0, 16)),
        ("granite-4.0-h-micro", "0.32.0", "a100-80gb", "", (1, 16)),
        ("qwen3-8b", "0.33.0", "h100-80gb", "", (0, 16)),
    ],
)
def test_prefills_write_a_state_at_the_end_of_a_block(preset: str, version: str, gpu: str, more: str, found: tuple[int, int]):
    request = parse_query(f"arch=hf:{preset}&mode=serve&gpu={gpu}&engine_version={version}{more}")
    asked = resolve_flags(request, architecture_of(preset), find_gpu(gpu), 132)
    assert (asked.state_blocks, asked.state_step) == found
