"""Deep models of which a few layers are traced: their tapes are those of a trace of all, wherever they are unfolded."""

from __future__ import annotations

import json
from array import array
from dataclasses import fields, replace
from functools import partial

import pytest
from torch import nn

from sizer.allocator.allocator import replay
from sizer.base.config_json import encode_config
from sizer.catalogue.gpus import GPUS
from sizer.estimating.store import ResultStore
from sizer.estimating.tracer import Tracer
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tape.size_queries import by_block
from sizer.tape.tape import Tape
from sizer.tracing import depth
from sizer.tracing.depth import DeepTraces, find_repeated, shortened
from sizer.tracing.modules import Loading
from sizer.tracing.trace import Ends, build_loaded, trace
from tests.architecture.tiny_configs import BERT, CLIP_VISION, CONV_SOUND, LLAMA, SPECIAL, VISION

GPU = GPUS["a100-40gb"]
DEEP = {"num_hidden_layers": 14}
WHISPER = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 16, "decoder_layers": 16, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 8, "max_source_positions": 32,
}  # fmt: skip
MIXED = {  # three dense layers before those with experts
    **LLAMA, "num_hidden_layers": 26, "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 4, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
}  # fmt: skip
TURNS = {**LLAMA, "num_hidden_layers": 20, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {**LLAMA, **DEEP, "hidden_size": 128, "intermediate_size": 256}  # sides that blocks of weights divide
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}, "torch_dtype": "float16"}
TWO_LISTS = {  # the tower's hidden states are counted from its last layer
    "model_type": "llava", "text_config": {**LLAMA, "num_hidden_layers": 24}, "image_token_index": 100,
    "vision_config": {**CLIP_VISION, "num_hidden_layers": 30}, "vision_feature_layer": -2,
}  # fmt: skip
WINDOWS = {  # of three layers of four; the sequences of these tests are shorter than 60
    **LLAMA, "num_hidden_layers": 40, "model_type": "olmo3", "num_key_value_heads": 4, "sliding_window": 60,
    "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(40)],
}  # fmt: skip
TAIL = {  # the last layers of both kinds keep their keys
    **LLAMA, "num_hidden_layers": 22, "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 16,
    "num_global_key_value_heads": 2, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(22)],
}  # fmt: skip
SAME_SIZES = {  # the states of the tower's adapters are as large as some of the decoder's
    **TWO_LISTS, "text_config": {**LLAMA, "num_hidden_layers": 24, "head_dim": 12, "num_key_value_heads": 4},
}  # fmt: skip
EXHAUSTIVE = pytest.mark.exhaustive

UNFOLDED = [
    pytest.param({**LLAMA, **DEEP}, "", id="llama"),
    pytest.param(
        {**LLAMA, **DEEP, "hidden_act": "gelu_pytorch_tanh"}, "", id="an activation that each layer binds anew"
    ),
    pytest.param(WHISPER, "", id="encoder and decoder", marks=EXHAUSTIVE),  # traced as a whole with transformers 5.17
    pytest.param(LINEAR, "&train=adapter&weights=nf4-dq", id="nf4-dq"),
    pytest.param(LINEAR, "&train=adapter&weights=nf4-dq&checkpointing=1", id="nf4-dq, checkpointed", marks=EXHAUSTIVE),
    pytest.param(LINEAR, "&train=adapter&weights=nf4&accumulate=2", id="nf4", marks=EXHAUSTIVE),
    pytest.param(LINEAR, "&train=adapter&weights=int8", id="int8", marks=EXHAUSTIVE),  # as a whole with torch 2.11
    pytest.param(LINEAR, "&mode=inference&weights=int8", id="int8, inference", marks=EXHAUSTIVE),
    pytest.param(LINEAR, "&mode=inference&weights=fp8", id="fp8", marks=EXHAUSTIVE),
    pytest.param({**BERT, **DEEP}, "&train=adapter&weights=nf4", id="nf4 with biases", marks=EXHAUSTIVE),
    pytest.param({**LINEAR, **GPTQ}, "&mode=inference", id="a checkpoint's", marks=EXHAUSTIVE),
    pytest.param({**LLAMA, **DEEP}, "&mode=inference", id="inference", marks=EXHAUSTIVE),
    pytest.param({**LLAMA, **DEEP}, "&checkpointing=1&accumulate=4", id="checkpointed", marks=EXHAUSTIVE),
    pytest.param({**LLAMA, **DEEP}, "&train=adapter&optimizer=lion", id="adapters", marks=EXHAUSTIVE),
    pytest.param({**LLAMA, **DEEP}, "&parallel=fsdp&ranks=4&offload=1", id="offloaded", marks=EXHAUSTIVE),
    pytest.param({**LLAMA, **DEEP}, "&parallel=tp&tp=2&sp=1&lp=1&seq=64", id="tp+sp+lp", marks=EXHAUSTIVE),
    pytest.param({**LLAMA, **DEEP}, "&parallel=fsdp&ranks=2&cp=2&seq=64", id="fsdp+cp", marks=EXHAUSTIVE),
    pytest.param(MIXED, "", id="dense before experts", marks=EXHAUSTIVE),
    pytest.param(TURNS, "", id="layers by turns", marks=EXHAUSTIVE),
    pytest.param({**BERT, **DEEP}, "&optimizer=adafactor&optimizer_impl=loop", id="bert", marks=EXHAUSTIVE),
    pytest.param({"model_type": "vit", **VISION, **DEEP}, "", id="vit", marks=EXHAUSTIVE),
    pytest.param(TWO_LISTS, "", id="lists of different lengths", marks=EXHAUSTIVE),  # as a whole with transformers 5.17
    pytest.param(TWO_LISTS, "&train=adapter&checkpointing=1", id="two lists, adapters", marks=EXHAUSTIVE),
    pytest.param(
        {**TWO_LISTS, "vision_feature_layer": -1}, "&mode=inference", id="two lists, inference", marks=EXHAUSTIVE
    ),
    pytest.param(SAME_SIZES, "&train=adapter&targets=all-linear", id="two lists, states of one size", marks=EXHAUSTIVE),
    pytest.param(TAIL, "", id="others at the end"),
    pytest.param(WINDOWS, "&seq=32", id="windows that are longer than the sequence"),
    pytest.param(
        WINDOWS, "&seq=32&train=adapter&weights=nf4&checkpointing=1", id="windows, adapters", marks=EXHAUSTIVE
    ),
    pytest.param(WINDOWS, "&seq=32&mode=inference", id="windows, inference", marks=EXHAUSTIVE),
    pytest.param({**WINDOWS, "sliding_window": 8}, "&seq=32", id="windows that are shorter", marks=EXHAUSTIVE),
]


@pytest.fixture(autouse=True)
def small_modules_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lists of a few parts be worth being shortened."""
    monkeypatch.setattr(depth, "FIXED", 0)


class InMemoryStore(dict):
    """What is kept of one architecture."""

    def put(self, name: str, data: bytes) -> None:
        self[name] = data


def tracer_of(config: dict, more: str, kept: ResultStore | None = None) -> Tracer:
    return Tracer(parse_query(f"arch=config:{encode_config(json.dumps(config))}&dtype=bfloat16{more}"), GPU, store=kept)


class Traces:
    """Traces of one work, and how many layers each of them had."""

    def __init__(self, config: dict, more: str = "") -> None:
        self._tracer = tracer_of(config, more)
        self._blueprint, self.module = self._tracer.built()
        self._loaded: dict[str, tuple[nn.Module, Loading | None]] = {}
        self.layers: list[tuple[int, bool]] = []
        self.device = self._tracer.device()

    def built(self, dtype: str = "bfloat16") -> tuple[nn.Module, Loading | None]:
        """The module for the traces of a dtype, and how it was loaded, where it is quantized."""
        request = self._tracer.request
        if self._blueprint.replace_layers is None:
            return self.module, None
        if dtype not in self._loaded:
            told = {"checkpointing": request.checkpointing, "device": self._tracer.device()}
            tell_frozen = request.train != "all"
            self._loaded[dtype] = build_loaded(self._blueprint, dtype=dtype, tell_frozen=tell_frozen, **told)
        return self._loaded[dtype]

    def at(self, batch: int = 2, *, dtype: str = "bfloat16", forward_alone: Ends = False, **more: bool) -> Tape:
        module, loading = self.built(dtype)
        lists = [len(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
        self.layers.append((max(lists), bool(forward_alone)))
        work = work_of(self._tracer.request, dtype)
        told = {
            "batch": batch,
            "device": self.device,
            "forward_alone": forward_alone,
            "loading": loading,
            **more,
        }
        return trace(self._blueprint, module, work, **told)


def assert_same(one: Tape, other: Tape) -> None:
    assert by_block(one.size_queries) == by_block(other.size_queries)
    names = (field.name for field in fields(one) if field.name != "size_queries")
    assert [
        name for name in names if getattr(one, name) != getattr(other, name)
    ] == []  # a tape in a message takes minutes


def settled(tape: Tape) -> Tape:
    """The tape with releases that follow each other within a phase in the order of their blocks.

    What a graph over checkpoints holds goes when the loss is dropped, each layer's part from within the one after it. CPython puts
    off what is nested more than 50 deep (Include/cpython/object.h, Py_TRASHCAN_BEGIN, 3.11), so that from some depth on, here 12
    layers, the same blocks are released in another order, on a device, too. Nothing is allocated between them: an allocator
    is in the same state after them.
    """
    cuts = {0, len(tape.order), tape.second_forward, *(at for at, _ in tape.marks)}
    order, run = array("q"), []
    for at, event in enumerate(tape.order):
        if event >= 0 or at in cuts:
            order.extend(sorted(run))
            run = []
        if event >= 0:
            order.append(event)
        else:
            run.append(event)
    order.extend(sorted(run))
    return replace(tape, order=order)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(("config", "more"), UNFOLDED)
def test_a_few_layers_give_the_tape_of_all(config: dict, more: str):
    traces = Traces(config, more)
    module, _ = traces.built()
    repeated = find_repeated(module)
    deep = DeepTraces(repeated)
    unfolded = [deep.trace(module, partial(traces.at, batch), traces.device) for batch in (2, 7)]
    whole = max(one.layers for one in repeated[0])
    assert all(layers <= whole / 2 for layers, forward_alone in traces.layers if not forward_alone)
    assert [forward_alone for layers, forward_alone in traces.layers if layers == whole] == [True]
    for tape, batch in zip(unfolded, (2, 7), strict=True):
        of_all = traces.at(batch)
        if "weights" in more and "checkpointing" in more:
            for expandable in (False, True):
                told = {"backend": "cuda", "expandable_segments": expandable}
                assert replay(tape, **told).phases == replay(of_all, **told).phases
            tape, of_all = settled(tape), settled(of_all)
        assert_same(tape.validate(), of_all)


def test_the_tracer_unfolds_what_it_traces():
    tracer = tracer_of({**LLAMA, **DEEP}, "&batch=2")
    tape = tracer.trace("bfloat16", (2,)).family.evaluate(2)
    whole = Traces({**LLAMA, **DEEP})
    assert_same(tape, whole.at(2))
    assert tracer.trace("bfloat16", (2,)).kernels == whole.device.kernels()
    assert "model.layers.13.mlp" in {name.rpartition(".")[0] for name in tape.module_names}


def test_what_was_shown_once_is_kept_for_later_questions(monkeypatch):
    kept, searches, find = InMemoryStore(), [], DeepTraces._find
    monkeypatch.setattr(DeepTraces, "_find", lambda *arguments: searches.append(0) or find(*arguments))
    config = {**LLAMA, **DEEP}
    tracer_of(config, "&optimizer=sgd", kept).trace("float32", (2,))
    assert len(searches) == 1  # three depths, and the forward pass of the whole model
    tape = tracer_of(config, "", kept).trace("bfloat16", (2,)).family.evaluate(2)
    assert len(searches) == 1
    assert_same(tape, Traces(config).at(2))
    (name,) = (name for name in kept if "\ndepths" in name)
    kept[name] = kept[name][:-20]  # as another version, or a disk, may leave it
    tracer_of(config, "&optimizer=adam", kept).trace("bfloat16", (2,))
    assert len(searches) == 2


@pytest.mark.exhaustive
def test_kept_depths_are_those_of_the_choice_that_was_shown(monkeypatch):
    """Two choices shorten the same list: one by single layers, whose windows differ here, and one by periods of four."""
    kept, config = InMemoryStore(), {**WINDOWS, "sliding_window": 8}
    tracer_of(config, "&seq=32&optimizer=sgd", kept).trace("bfloat16", (2,))
    depths: list[int] = []

    def noted(blueprint, module: nn.Module, *told, **more) -> Tape:
        depths.append(len(module.model.layers))
        return trace(blueprint, module, *told, **more)

    monkeypatch.setattr("sizer.tracing.trace.trace", noted)
    tape = tracer_of(config, "&seq=32", kept).trace("bfloat16", (2,)).family.evaluate(2)
    assert max(depths) == 12
    assert_same(tape, Traces(config, "&seq=32").at(2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", ["", "&train=adapter&weights=int8"])
def test_what_one_dtype_has_shown_is_not_shown_again_for_others(more: str):
    traces = Traces(LINEAR, more)
    deep = DeepTraces(find_repeated(traces.built()[0]))
    depths = []
    for dtype in ("bfloat16", "float32", "amp-bfloat16", "float16", "amp-float16"):
        traces.layers.clear()
        tape = deep.trace(traces.built(dtype)[0], partial(traces.at, dtype=dtype), traces.device)
        depths.append([layers for layers, _ in traces.layers])
        assert_same(tape, traces.at(dtype=dtype))
    assert depths[0] == [14, 2, 3, 4]
    assert max(map(max, depths[1:])) == 3
    assert depths[3] == [3]  # float16 has bfloat16's kernels; LLM.int8() casts its input to it, outside the layers


@pytest.mark.exhaustive
def test_what_ends_in_the_middle_of_layers_is_traced_as_a_whole():
    """DDP's buckets of 25 MiB hold two layers of these and a part of a third, of which three depths show nothing."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = {**LLAMA, **wide, "num_hidden_layers": 24}
    tape = tracer_of(config, "&batch=2&parallel=ddp&ranks=2").trace("bfloat16", (2,)).family.evaluate(2)
    traces = Traces(config, "&parallel=ddp&ranks=2")
    assert_same(tape, traces.at(2))
    assert DeepTraces(find_repeated(traces.module)).trace(traces.module, traces.at, traces.device) != tape


def test_a_model_that_treats_one_layer_otherwise_is_traced_as_a_whole():
    """wav2vec2's encoder leaves out layers at random: what they are says nothing of it."""
    config = {"model_type": "wav2vec2", **CONV_SOUND, **SPECIAL, **DEEP, "layerdrop": 0.4, "vocab_size": 32}
    traces = Traces(config | {"num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 8})
    deep = DeepTraces(find_repeated(traces.module))
    assert deep.trace(traces.module, traces.at, traces.device) == traces.at()
    assert (14, False) in traces.layers[:-1]


def test_layers_are_alike_by_what_they_are():
    alike = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    ((found,),) = find_repeated(nn.ModuleDict({"stack": alike}))
    assert (found.stacks, found.layers, found.period, found.fewest) == (("stack",), 20, 1, 2)
    turns = nn.Sequential(*(nn.Linear(8, 8, bias=at % 2 == 0) for at in range(20)))
    ((found,),) = find_repeated(nn.ModuleDict({"stack": turns}))
    assert (found.period, found.fewest) == (2, 2)
    alike[16] = nn.Linear(8, 8, bias=False)
    assert find_repeated(nn.ModuleDict({"stack": alike})) == ()
    shared = nn.Linear(8, 8)
    assert find_repeated(nn.ModuleDict({"stack": nn.Sequential(*[shared] * 20)})) == ()
    dropping = nn.Sequential(*(nn.Dropout(at / 20) for at in range(20)))
    assert find_repeated(nn.ModuleDict({"stack": dropping})) == ()


def test_what_the_config_says_of_each_layer_counts():
    model = nn.Module()
    model.stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    model.config = type("Config", (), {})()
    model.config.layer_types = ["full"] * 13 + ["sliding"] * 7
    assert find_repeated(model) == ()
    model.config.layer_types = ["full"] * 20
    assert find_repeated(model)


def test_layers_with_other_settings_count_as_alike_where_they_do_the_same():
    traces = Traces(WINDOWS, "&seq=32")
    alike, *_ = find_repeated(traces.module)
    assert [(one.period, one.kinds) for one in alike] == [(1, 4)]
    shorter = Traces({**WINDOWS, "sliding_window": 8}, "&seq=32")
    deep = DeepTraces(find_repeated(shorter.module))
    tape = deep.trace(shorter.module, shorter.at, shorter.device)
    assert_same(tape, shorter.at())
    assert [layers for layers, _ in shorter.layers[:3]] == [40, 6, 8]  # of each kind, which differ; then whole periods


def test_other_settings_are_checked_at_each_trace():
    config = {**WINDOWS, "sliding_window": 24}
    short, long = (Traces(config, f"&seq={seq}") for seq in (16, 48))
    deep = DeepTraces(find_repeated(short.module))
    assert_same(deep.trace(short.module, short.at, short.device), short.at())
    assert_same(deep.trace(long.module, long.at, long.device), long.at())  # where windows are shorter than the sequence


def test_the_config_of_another_tower_says_nothing_of_a_list():
    model = nn.ModuleDict({name: nn.Module() for name in ("tower", "language")})
    for part, layers in zip(model.values(), (40, 200), strict=True):
        part.stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        part.config = type("Config", (), {})()
    model["tower"].config.taken_indices = [1, 3, 7, 15, 23, 30, 36, 38, 39]
    model["tower"].config.aspect_ratios = [[1, 1]] * 20 + [[2, 1]] * 20  # as many as layers, but pairs
    model["language"].config.layers_with_experts = [*range(200)]
    assert {one.stacks for (one,) in find_repeated(model)} == {("language.stack",)}
    model["tower"].config.taken_indices = []
    assert [one.stacks for one in find_repeated(model)[0]] == [("tower.stack",), ("language.stack",)]


def test_numbers_of_layers_in_a_config_make_them_differ():
    model = nn.Module()
    model.stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    model.config = type("Config", (), {})()
    model.config.global_layers = [4, 9, 14, 19, 24, 29, 34, 39]
    found = [one for (one,) in find_repeated(model)]
    assert {(one.period, one.kinds) for one in found} == {(1, 5), (5, 0)}
    model.config.global_layers, model.config.durations = [], [0, 1, 2, 3, 4]  # Parakeet's, of its decoder
    ((found,),) = find_repeated(model)
    assert (found.period, found.alike_from) == (1, 0)


def test_layers_that_cost_little_are_left_in():
    """The number of parts says little: here nearly all blocks are made beside the layers, which the forward pass shows."""
    traces = Traces({**LLAMA, **DEEP})
    forward = traces.at(forward_alone=True)
    beside = forward.module_names.index("") if "" in forward.module_names else 0
    heavy = replace(forward, modules=array("l", [*forward.modules, *[beside] * 100_000]))
    tapes = {True: heavy, False: traces.at()}
    traces.layers.clear()
    deep = DeepTraces(find_repeated(traces.module))
    tape = deep.trace(traces.module, lambda *, forward_alone=False: tapes[bool(forward_alone)], traces.device)
    assert tape is tapes[False]
    assert traces.layers == []


def test_a_forward_pass_after_which_no_layers_are_left_out_goes_on(monkeypatch: pytest.MonkeyPatch):
    traces = Traces({**LLAMA, **DEEP})
    deep = DeepTraces(find_repeated(traces.module))
    monkeypatch.setattr(depth, "WORTH", 0)
    tape = deep.trace(traces.module, traces.at, traces.device)
    assert len(traces.layers) == 1, "one trace"
    assert_same(tape, traces.at())
    ended = traces.at(forward_alone=lambda begun: traces.layers.append((len(begun.marks), True)) is None)
    assert_same(ended, traces.at(forward_alone=True))


def test_one_depth_of_two_lists_is_enough_at_another_batch_size():
    traces = Traces(TWO_LISTS)
    deep = DeepTraces(find_repeated(traces.module))
    deep.trace(traces.module, traces.at, traces.device)
    traces.layers.clear()
    tape = deep.trace(traces.module, partial(traces.at, 5), traces.device)
    assert len(traces.layers) == 1
    assert_same(tape, traces.at(5))


def test_hooks_of_a_few_layers_do_not_stand_for_all():
    traces = Traces(TWO_LISTS)
    tower = traces.module.model.vision_tower
    (candidate, *_) = find_repeated(traces.module)
    (one,) = (one for one in candidate if "vision" in one.stacks[0])
    with shortened(traces.module, [one], [0]):
        assert tower.config.num_hidden_layers == 2
        traces.at()  # installs transformers' hooks on hidden states
    assert tower.config.num_hidden_layers == 30
    hooks = [layer._forward_hooks for layer in tower.modules() if type(layer).__name__ == "CLIPEncoderLayer"]
    assert len(hooks) == 30
    assert not any(hooks)
    traces.at()
    assert all(hooks)


def test_the_lists_are_whole_again_after_an_error():
    stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    module = nn.ModuleDict({"stack": stack})
    ((found,),) = find_repeated(module)
    with pytest.raises(KeyError, match="mine"), shortened(module, [found], [1]):
        assert len(module["stack"]) == 3
        raise KeyError("mine")
    assert module["stack"] is stack
