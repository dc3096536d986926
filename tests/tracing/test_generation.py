"""A generation written from a few traced steps is the one that is traced step by step, event for event."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache

import pytest

from sizer.allocator.allocator import replay
from sizer.allocator.timeline import live_by_category
from sizer.base.errors import TraceError
from sizer.tape.archive import Traced, pack, unpack
from sizer.tape.family import TapeFamily
from sizer.tape.loops import DEPTH, NotRepeatedError, check_affine, check_follows, written
from sizer.tape.size_queries import SizeQuery
from sizer.tape.tape import CATEGORIES, Loop, Tape
from sizer.tracing.generation import trace_generation
from sizer.tracing.token_trace import trace_tokens
from tests.tracing.generations import CONFIGS, device, generation, work

CASES = [
    ("LlamaForCausalLM", "static", "sdpa", "bfloat16"),
    ("Gemma2ForCausalLM", "dynamic", "sdpa", "bfloat16"),
    ("MistralForCausalLM", "dynamic", "eager", "float32"),
    ("MambaForCausalLM", "dynamic", "sdpa", "bfloat16"),
]
OTHERS = [
    *((head, "dynamic", "sdpa", "bfloat16") for head in CONFIGS),
    ("T5ForConditionalGeneration", "static", "sdpa", "bfloat16"),
]

# small blocks alone; blocks of the cache that become large on the way; large ones throughout; windows that fill
REPLAYED = [
    ("LlamaForCausalLM", "dynamic", 1, 16),
    ("LlamaForCausalLM", "dynamic", 32, 64),
    ("LlamaForCausalLM", "dynamic", 64, 200),
    ("LlamaForCausalLM", "static", 64, 200),
    ("Gemma2ForCausalLM", "dynamic", 16, 24),
    ("GPT2LMHeadModel", "dynamic", 8, 64),
]
WHERE: list[dict] = [
    {"backend": "cuda"},
    {"backend": "cuda", "expandable_segments": True},
    {"backend": "mps"},
    {"backend": "cpu"},
]


def rows(tape: Tape) -> list[tuple[str, str, int, int]]:
    """What is said of each block."""
    return [
        (tape.op_names[op], tape.module_names[module], category, size)
        for op, module, category, size in zip(tape.ops, tape.modules, tape.categories, tape.sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("head", "kind", "attention", "dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS if case not in CASES)],
)
def test_a_written_generation_is_the_traced_one(head: str, kind: str, attention: str, dtype: str) -> None:
    blueprint, module = generation(head, attention=attention)
    asked = work(256, cache=kind, dtype=dtype)
    short = trace_generation(blueprint, module, asked, batch=2, device=device())
    whole = trace_tokens(blueprint, module, asked, batch=2, device=device(), tokens=256, after=0).tape.validate()
    assert len(short.order) < len(whole.order) // 4
    found = written(short)
    assert found.order == whole.order
    assert found.marks == whole.marks
    assert rows(found) == rows(whole)


@pytest.mark.parametrize("kind", ["offloaded", pytest.param("offloaded_static", marks=pytest.mark.exhaustive)])
def test_an_offloaded_generation_is_written_out_as_it_is_traced(kind: str) -> None:
    blueprint, module = generation("LlamaForCausalLM")
    asked = work(24, cache=kind)
    found = trace_generation(blueprint, module, asked, batch=2, device=device()).validate()
    whole = trace_tokens(blueprint, module, asked, batch=2, device=device(), tokens=24, after=0).tape.validate()
    assert found.streams == whole.streams
    assert set(found.streams) == {0, 1}
    assert not found.loops
    assert found.order == whole.order
    assert rows(found) == rows(whole)


def test_too_many_steps_of_two_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sizer.tracing.generation.WRITTEN_AT_MOST", 1000)
    blueprint, module = generation("LlamaForCausalLM")
    with pytest.raises(TraceError, match=r"two streams, and .* events to be written out: allowed 1,000; ask for fewer"):
        trace_generation(blueprint, module, work(256, cache="offloaded"), batch=1, device=device())


def test_the_cache_is_a_category_of_its_own() -> None:
    # 2 layers, keys and values of 2 heads of 32 elements in bfloat16: 512 bytes a token and sequence
    blueprint, module = generation("LlamaForCausalLM")
    tape = trace_generation(blueprint, module, work(8), batch=3, device=device())
    assert live_by_category(tape)["prefill"]["kv cache"] == 3 * 24 * 512
    assert live_by_category(written(tape))["decode"]["kv cache"] == 3 * (24 + 7) * 512


def test_a_long_prompt_needs_no_mask() -> None:
    """However many ids are drawn, none is the one that `generate` takes for padding: attention would have to leave that out."""
    untold = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    blueprint, module = generation("LlamaForCausalLM", prompt=4096, num_key_value_heads=8, **untold)
    tape = trace_tokens(blueprint, module, work(2), batch=2, device=device(), tokens=2, after=0).tape
    blocks = zip(tape.sizes, tape.categories, strict=True)
    largest = max(size for size, category in blocks if category != CATEGORIES.index("workspace"))
    assert largest < 2 * 4096 * 4096, "a mask has a byte or more for each pair of tokens"


def test_few_tokens_are_traced_one_by_one() -> None:
    blueprint, module = generation("GPT2LMHeadModel")
    for new in (1, 2, 6):
        tape = trace_generation(blueprint, module, work(new), batch=1, device=device()).validate()
        assert not tape.loops
        assert [phase for _, phase in tape.marks] == ["load", "prefill", "decode"]


def steps(*sizes: int, released: int = 1) -> Tape:
    """Steps that each make a block and release the one that was made so many steps before."""
    order, bounds = [], []
    for block in range(len(sizes)):
        order.append(block)
        if block >= released:
            order.append(~(block - released))
        bounds.append(len(order))
    count = len(sizes)
    return Tape(
        batch=1,
        order=array("q", order),
        sizes=array("q", sizes),
        categories=bytes(count),
        ops=array("l", [0] * count),
        modules=array("l", [0] * count),
        op_names=("cat",),
        module_names=("",),
        marks=((len(order), "decode"),),
    )


def test_steps_that_do_not_grow_alike_are_no_loop() -> None:
    check_affine(steps(10, 20, 30, 40), Loop(begin=5, end=7, count=9))
    with pytest.raises(NotRepeatedError, match="does not grow by the same bytes"):
        check_affine(steps(10, 20, 30, 41), Loop(begin=5, end=7, count=9))
    with pytest.raises(NotRepeatedError, match="was not made in those before"):
        check_affine(steps(*range(10, 100, 10), released=DEPTH + 1), Loop(begin=13, end=15, count=9))


def test_sizes_that_a_library_decides_stay_as_they_are() -> None:
    asked = (SizeQuery(kind="x", words=(), numbers=(7,), blocks=(3,)),)
    tape = replace(steps(10, 20, 30, 40), size_queries=asked, loops=(Loop(begin=5, end=7, count=2),))
    assert written(tape).sizes.tolist() == [10, 20, 30, 40, 40, 40]
    assert written(replace(tape, size_queries=())).sizes.tolist() == [10, 20, 30, 40, 50, 60]


def test_a_step_traced_by_itself_must_be_what_the_loop_leads_to() -> None:
    for size, count in ((70, 3), (60, 2)):  # 20, 30 and then 40, 50, 60 or 40, 50
        tape = replace(steps(0, 10, 20, 30, size), loops=(Loop(begin=5, end=7, count=count),))
        check_follows(tape, (7, 9))
    tape = replace(steps(0, 10, 20, 30, 60), loops=(Loop(begin=5, end=7, count=3),))
    with pytest.raises(NotRepeatedError, match="does not continue the steps before it"):
        check_follows(tape, (7, 9))


def test_a_loop_is_written_between_what_stands_before_and_behind_it() -> None:
    for released in (1, DEPTH):
        short = steps(*range(0, 70, 10), 100, released=released)
        whole = steps(*range(0, 110, 10), released=released)
        end = short.order.index(6) + 2
        assert written(replace(short, loops=(Loop(begin=end - 2, end=end, count=3),))) == whole


@pytest.mark.parametrize(("head", "kind", "batch", "prompt"), REPLAYED)
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_the_replay_of_a_loop_is_that_of_its_steps(head: str, kind: str, batch: int, prompt: int, where: dict) -> None:
    tape = _tape(head, kind, batch, prompt)
    found, whole = (replay(one, **where) for one in (tape, written(tape)))
    assert replace(found, curve=()) == replace(whole, curve=())
    assert max(sum(point.by_category) for point in found.curve) == found.peak_allocated_bytes
    assert live_by_category(tape) == live_by_category(written(tape))


@pytest.mark.parametrize("where", WHERE[:2], ids=str)
def test_a_device_that_is_too_small_ends_a_loop_where_it_ends_its_steps(where: dict) -> None:
    tape = _tape("LlamaForCausalLM", "dynamic", 128, 8)
    allocated = replay(tape, **where).peak_allocated_bytes
    ends = []
    for share in (120, 104, 101, 99, 90):  # percent of what is allocated at most
        found, whole = (replay(one, **where, capacity_bytes=allocated * share // 100) for one in (tape, written(tape)))
        assert found.out_of_memory == whole.out_of_memory
        assert found.retries == whole.retries
        if found.out_of_memory is None:
            assert replace(found, curve=()) == replace(whole, curve=())
        ends.append(found.out_of_memory and found.out_of_memory.phase)
    assert any(ends)


@cache
def _tape(head: str, implementation: str, batch: int, prompt: int) -> Tape:
    blueprint, module = generation(head, prompt=prompt)
    return trace_generation(blueprint, module, work(300, cache=implementation), batch=batch, device=device())


def test_a_tape_with_loops_is_read_back_as_it_was_kept() -> None:
    tape = _tape("LlamaForCausalLM", "dynamic", 1, 16)
    traced = Traced(family=TapeFamily(exact=(tape,)))
    assert unpack(pack(traced)) == traced
    longer = replace(tape, loops=tuple(replace(loop, count=loop.count + 1) for loop in tape.loops))
    assert TapeFamily(exact=(longer,)).digest() != traced.family.digest()
