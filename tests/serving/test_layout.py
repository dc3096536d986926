"""Weights by hand: merged, padded, split, replicated, quantized, and rounded by the allocator."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from sizer.base.units import GIB, MIB
from sizer.serving.architecture import Weight
from sizer.serving.layout import allocated, offloaded_bytes, stage_layers, tensors, weights_bytes, weights_of
from tests.serving.logs import architecture_of
from tests.serving.models import decoder, flags

MLP = 1024 * 4096


def test_matrices_are_merged_and_the_vocabulary_padded():
    sizes = list(tensors(decoder(), flags()))
    # embedding and head 1,024 * 1,024 * 2 bytes; 4 norms; of each layer qkv 2,048 rows, o, gate_up 8,192 rows, down
    layer = [2048 * 1024 * 2, 1024 * 1024 * 2, 2 * MLP * 2, MLP * 2]
    assert sizes == [1024 * 1024 * 2, *[2048] * 4, 1024 * 1024 * 2, *layer * 4, 32_768 * 128 * 2]


def test_two_ranks_split_matrices_and_replicate_norms():
    whole, half = (list(tensors(decoder(), flags(tp=tp))) for tp in (1, 2))
    assert [size for size in half if size == 2048] == [2048] * 4
    assert half[-1] == whole[-1]  # the table of rotations
    assert all(a * 2 == b for a, b in zip(half[:-1], whole[:-1], strict=True) if b != 2048)


def test_eight_ranks_replicate_four_key_heads():
    # a rank has 1 of 8 query heads, and one key and one value head: 3 * 128 rows
    assert 3 * 128 * 1024 * 2 in list(tensors(decoder(), flags(tp=8)))


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        # of the 4,096 x 1,024 down matrix: elements, then scales, then zero points or a workspace
        ("awq", [MLP // 2, 32 * 1024 * 2, 32 * 1024 // 2, 4 * 108]),
        ("gptq", [MLP // 2, 32 * 1024 * 2, 4 * 108]),
        ("fp8", [MLP, 32 * 8 * 4]),
        ("w8a8", [MLP, 1024 * 4]),
        ("nvfp4", [MLP // 2, 256 * 1024]),
    ],
)
def test_layouts_of_a_matrix(layout: str, sizes: list[int]):
    plain, quantized = (list(tensors(decoder(), flags(layout=one))) for one in (None, layout))
    assert quantized[-1 - len(sizes) : -1] == sizes
    assert quantized[:6] == plain[:6]  # neither vocabulary nor norms are quantized


def test_layers_that_a_checkpoint_leaves_out_are_not_quantized():
    left = replace(decoder(), unquantized=("model.layers.0.mlp", "re:.*o_proj$"))
    sizes = list(tensors(left, flags(layout="fp8")))
    assert (sizes.count(MLP * 4), sizes.count(MLP)) == (1, 3)  # gate_up of the first layer, down of the others
    assert sizes.count(1024 * 1024) == 0  # o_proj of each layer keeps 2 bytes an element


def test_experts_are_split_by_width_or_whole():
    experts = Weight(name="model.layers.0.mlp.experts.gate_up_proj", shape=(8, 512, 1024))
    sparse = replace(decoder(), weights=(experts,), experts=8, expert_width=256, rotary_rows=())
    whole = 8 * 512 * 1024 * 2
    assert [list(tensors(sparse, flags(tp=tp, ep=ep))) for tp, ep in ((1, False), (4, False), (4, True))] == [
        [whole],
        [whole // 4],
        [whole // 4],
    ]
    # 3 ranks: 8 experts are 3 on a rank; a width of 256 is 86
    assert list(tensors(sparse, flags(tp=3, ep=True))) == [3 * 512 * 1024 * 2]
    assert list(tensors(sparse, flags(tp=3))) == [8 * 172 * 1024 * 2]


def test_marlin_pads_mxfp4():
    experts = Weight(name="model.layers.0.mlp.experts.down_proj", shape=(2, 2880, 2880))
    sparse = replace(decoder(), weights=(experts,), hidden=2880, experts=2, expert_width=2880, rotary_rows=())
    # 2,880 is padded to 3,072 and 2,944; others keep it: 4 bits an element and a byte for 32
    for marlin, elements in ((True, 2 * 3072 * 2944), (False, 2 * 2880 * 2880)):
        assert list(tensors(sparse, flags(layout="mxfp4", marlin=marlin))) == [elements // 2, elements // 32]


def test_the_allocator_rounds_by_block():
    assert allocated([1]) == 512
    assert allocated([20 * MIB + 1]) == 20 * MIB + 512  # of a segment of 22 MiB more than 1 MiB is left over
    assert allocated([21 * MIB + 1]) == 22 * MIB  # less is left over, and stays with the block
    assert allocated([2 * MIB] * 10) == 20 * MIB
    # 15 MiB and 3 MiB: the first has a segment of 16 MiB and all of it, so the second has one of 20 MiB
    assert allocated([15 * MIB, 3 * MIB]) == 19 * MIB


def test_more_ranks_never_hold_more():
    sizes = [weights_bytes(decoder(), flags(tp=tp)) for tp in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


def test_stages_hold_all_layers_once():
    assert [list(one) for one in stage_layers(10, 4)] == [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9]]
    whole = weights_bytes(replace(decoder(), rotary_rows=()), flags())
    stages = [weights_bytes(replace(decoder(), rotary_rows=()), flags(pp=2), stage) for stage in (0, 1)]
    assert sum(stages) == whole


def test_experts_of_nemotron_have_no_gate_and_those_of_granite_are_split():
    up = Weight(name="backbone.layers.0.mixer.experts.up_proj", shape=(8, 256, 1024))
    joined = Weight(name="model.layers.0.block_sparse_moe.input_linear.weight", shape=(8, 512, 1024))
    for weight, size in ((up, 8 * 256 * 1024 * 2), (joined, 8 * 512 * 1024 * 2)):
        sparse = replace(decoder(), weights=(weight,), experts=8, expert_width=256, rotary_rows=())
        assert [list(tensors(sparse, flags(tp=tp))) for tp in (1, 2)] == [[size], [size // 2]]


def test_experts_may_have_a_hidden_size_of_their_own():
    up = Weight(name="model.layers.1.mixer.experts.up_proj", shape=(8, 256, 128))
    down = Weight(name="model.layers.1.mixer.experts.down_proj", shape=(8, 128, 256))
    sparse = replace(decoder(), weights=(up, down), experts=8, expert_width=256, rotary_rows=())
    assert list(tensors(sparse, flags(tp=2))) == [8 * 128 * 128 * 2] * 2


def test_each_layers_embedding_is_split_and_tables_of_rotations_have_a_heads_elements():
    gemma, olmo = (architecture_of(name) for name in ("gemma-3n-e2b", "olmo-3-1025-7b"))
    sizes = [max(tensors(gemma, flags(tp=tp))) for tp in (1, 2)]
    assert sizes == [262_144 * 30 * 256 * 2, 262_144 * 30 * 256]  # 30 layers of 256 elements
    assert olmo.rotary_widths == (128, 128)  # q_norm has 4,096, of 32 heads


def test_layers_of_gemma_4_have_key_heads_of_their_own():
    layers = architecture_of("gemma-4-31b").layers
    heads = {(layer.window, layer.elements, layer.kv_heads) for layer in layers}
    assert heads == {(1024, 2 * 16 * 256, 16), (0, 2 * 4 * 512, 4)}


def test_layers_that_use_the_cache_of_others_have_no_keys_from_0_30_on():
    idle = (Weight(name="model.layers.3.self_attn.k_proj.weight", shape=(512, 1024)),)
    full = decoder().layers
    shared = replace(decoder(), idle_weights=idle, layers=(*full[:3], replace(full[3], elements=0)))
    counts = [len(list(weights_of(shared, flags(release=release), 0))) for release in ((0, 28, 0), (0, 30, 0))]
    assert counts[0] - counts[1] == 1
    assert len(list(weights_of(replace(shared, layers=full), flags(release=(0, 30, 0)), 0))) == counts[0]


def test_weights_on_the_host_are_whole_parameters_from_the_first_layer_on():
    layer = [2048 * 1024 * 2, 1024 * 1024 * 2, 2 * MLP * 2, MLP * 2, 1024 * 2]  # qkv, o, gate_up, down, norm
    for asked, expected in ((1, layer[0]), (layer[0], layer[0]), (layer[0] + 1, sum(layer[:2])), (10**12, 4 * sum(layer))):
        assert offloaded_bytes(decoder(), flags(offload_bytes=asked)) == expected
    assert offloaded_bytes(decoder(), flags()) == 0
    # the second of two stages has its own two layers
    assert offloaded_bytes(decoder(), flags(offload_bytes=10**12, pp=2), 1) == 2 * sum(layer)
    assert offloaded_bytes(decoder(), flags(offload_bytes=10**12, tp=2)) == 4 * (sum(layer[:4]) // 2 + layer[4])


def test_weights_on_the_host_are_those_of_a_published_log():
    # docs/serving.md: `Total CPU offloaded parameters: 24.36`, gemma-4-31B-it with --cpu-offload-gb 24; the version is not said
    architecture = architecture_of("gemma-4-31b")
    before, since = (flags(release=one, offload_bytes=24 * GIB) for one in ((0, 28, 0), (0, 30, 0)))
    assert f"{offloaded_bytes(architecture, before) / GIB:.2f}" == "24.36"
    # from 0.30 on the encoder goes first
    tower = sum(weight.itemsize * prod(weight.shape) for weight in architecture.weights if "vision" in weight.name)
    assert 24 * GIB <= offloaded_bytes(architecture, since) < 25 * GIB
    assert offloaded_bytes(architecture, replace(since, offload_bytes=1)) < tower // 10


def test_halves_of_a_latents_matrix_are_copied_if_it_is_quantized():
    # mla_attention.py, split_kv_b_proj: 6 heads of 128 + 128 elements from a latent of 512; in 16 bits they are views
    latent = Weight(name="model.layers.0.self_attn.kv_b_proj.weight", shape=(6 * 256, 512))
    model = replace(decoder(), latent=(512, 128, 128), weights=(*decoder().weights, latent))
    size, left = 6 * 256 * 512, replace(model, unquantized=("self_attn",))
    for one, found, sizes in (
        (model, flags(), [0, 1]),
        (model, flags(layout="fp8"), [1, 1]),
        (left, flags(layout="fp8"), [0, 1]),
        (model, flags(copies_latent=True), [0, 2]),  # SGLang copies them in 16 bits, too
    ):
        assert [[*tensors(one, found)].count(size * itemsize) for itemsize in (1, 2)] == sizes, found.layout
