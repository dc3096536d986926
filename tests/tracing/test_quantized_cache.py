"""A generation whose cache is quantized anew again and again, written from few steps, is the one that is traced step by step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from sizer.base.errors import RequestError, TraceError
from sizer.tape.loops import NotRepeatedError, append_windows, kept_blocks, written
from sizer.tape.tape import Tape
from sizer.tracing.cache_growth import trace_kv_cache
from sizer.tracing.generation import AROUND, UNUSUAL, trace_generation
from sizer.tracing.meta.quantized_operators import HANDLERS
from sizer.tracing.token_trace import TokenTrace, trace_tokens
from tests.tracing.generations import device, generation, work
from tests.tracing.quantized_caches import RESIDUAL, four_bit_caches
from tests.tracing.test_generation import rows

LONGEST = 6 * RESIDUAL  # tokens; the steps around the first three times are traced
LENGTHS = (RESIDUAL - 1, 3 * RESIDUAL + 2, 4 * RESIDUAL - 1, 4 * RESIDUAL, 5 * RESIDUAL + 9)


@pytest.fixture(autouse=True)
def quantized() -> Iterator[None]:
    with four_bit_caches():
        yield


@pytest.fixture(scope="module")
def traced() -> TokenTrace:
    with four_bit_caches():
        blueprint, module = generation("LlamaForCausalLM")
        module.to(torch.bfloat16)
        asked = work(LONGEST, cache="quantized", dtype="bfloat16")
        return trace_tokens(blueprint, module, asked, batch=2, device=device(), tokens=LONGEST, after=0)


@pytest.mark.parametrize(
    "new", [LONGEST, LENGTHS[0], *(pytest.param(new, marks=pytest.mark.exhaustive) for new in LENGTHS[1:])]
)
def test_a_written_generation_is_the_traced_one(new: int, traced: TokenTrace) -> None:
    blueprint, module = generation("LlamaForCausalLM")
    asked = work(new, cache="quantized", dtype="bfloat16")
    found = written(trace_generation(blueprint, module, asked, batch=2, device=device()).validate())
    assert found.order == traced.tape.order[: traced.ends[new - 1]]
    assert found.sizes == traced.tape.sizes[: len(found.sizes)]
    if new == LONGEST:
        assert found.marks == traced.tape.marks
        assert rows(found) == rows(traced.tape)


def test_few_steps_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []

    def counted(*args: object, **kwargs: object) -> TokenTrace:
        tokens.append(kwargs["tokens"])
        return trace_tokens(*args, **kwargs)

    monkeypatch.setattr("sizer.tracing.generation.trace_tokens", counted)
    blueprint, module = generation("LlamaForCausalLM")
    for new in (10 * RESIDUAL, 20 * RESIDUAL):
        tokens.clear()
        tape = trace_generation(blueprint, module, work(new, cache="quantized"), batch=2, device=device()).validate()
        assert (len(tokens), sum(tokens)) == (4, 7 + 3 * (AROUND + UNUSUAL))
        assert len(tape.loops) == new // RESIDUAL
    monkeypatch.setattr("tests.tracing.quantized_caches.RESIDUAL", AROUND)
    with pytest.raises(TraceError, match=f"follow no rule .*quantized anew after {AROUND} tokens, in the midst"):
        trace_generation(blueprint, module, work(new, cache="quantized"), batch=2, device=device())
    monkeypatch.undo()
    monkeypatch.setattr("sizer.tracing.generation.WRITTEN_AT_MOST", 1000)
    with pytest.raises(TraceError, match=r"has 20 steps that stand apart, .* events: allowed 1,000; ask for fewer new tokens"):
        trace_generation(blueprint, module, work(new, cache="quantized"), batch=2, device=device())


def test_a_cache_of_a_quarter_of_the_bytes_and_scales() -> None:
    # 2 layers, keys and values of 2 heads of 32 elements: 256 elements a token, in 4 bits; and of each 64 a scale and a least one
    blueprint, module = generation("LlamaForCausalLM")
    (line,) = trace_kv_cache(blueprint, module, work(8, cache="quantized", dtype="bfloat16"), device=device())
    assert (line.constant_bytes, line.token_bytes) == (0, 256 // 2 + 256 // 64 * 2 * 2)


def test_what_has_no_quantized_cache_is_refused() -> None:
    blueprint, module = generation("Gemma2ForCausalLM")
    with pytest.raises(RequestError, match=r"^cache: Gemma2ForCausalLM has none: given .*only full attention layers"):
        trace_generation(blueprint, module, work(8, cache="quantized"), batch=1, device=device())
    missing = mock.Mock(side_effect=ImportError("not here"))
    blueprint, module = generation("LlamaForCausalLM")
    with (
        mock.patch("transformers.cache_utils.QuantoQuantizedLayer", missing),
        pytest.raises(RequestError, match=r"given 'quantized': not here, .*; pip install optimum-quanto, or ask"),
    ):
        trace_kv_cache(blueprint, module, work(8, cache="quantized"), device=device())


def windows(*sizes: tuple[int, int], released: int = 2) -> tuple[Tape, list[int]]:
    """Windows that each make two blocks and release the one of two before the first."""
    order, flat, begins = array("q"), [], []
    for window, pair in enumerate(sizes):
        begins.append(len(order))
        order.extend([2 * window, 2 * window + 1])
        if window:
            order.append(~(2 * window - released))
        flat += pair
    count = len(flat)
    tape = Tape(
        batch=1,
        order=order,
        sizes=array("q", flat),
        categories=bytes(count),
        ops=array("l", [0] * count),
        modules=array("l", [0] * count),
        op_names=("cat",),
        module_names=("",),
        marks=((len(order), "decode"),),
    )
    return tape, begins[-3:]


def test_windows_on_a_line_come_again() -> None:
    tape, begins = windows((1, 5), (2, 5), (4, 5), (6, 5))
    assert append_windows(tape, begins, 2) == windows((1, 5), (2, 5), (4, 5), (6, 5), (8, 5), (10, 5))[0]
    longer = append_windows(tape, begins, 1, rest=1).validate()
    assert [*longer.sizes] == [1, 5, 2, 5, 4, 5, 6, 5, 8, 5, 10]
    assert longer.marks == ((len(longer.order), "decode"),)


def test_windows_that_are_not_alike_do_not_come_again() -> None:
    tape, begins = windows((1, 5), (2, 5), (4, 5), (7, 5))
    with pytest.raises(
        NotRepeatedError, match=r"cat .*block 6.* does not grow by the same bytes from window to window"
    ):
        append_windows(tape, begins, 1)
    tape, begins = windows((1, 5), (2, 5), (4, 5), (6, 5))
    other = replace(tape, ops=array("l", [0] * 7 + [1]), op_names=("cat", "add"))
    with pytest.raises(NotRepeatedError, match="does not repeat the window before it"):
        append_windows(other, begins, 1)


def test_what_is_held_is_told_by_its_bytes() -> None:
    tape, _ = windows((1, 5), (2, 5))
    of = {"of": "parameter", "before": (4, 4), "at": (5, 5)}
    assert kept_blocks(tape, tape, **of) == {1: 1, 2: 2, 3: 3}
    with pytest.raises(NotRepeatedError, match="blocks of the parameter at event 5 differ"):
        kept_blocks(tape, windows((1, 5), (3, 5))[0], **of)


@pytest.mark.parametrize(("bits", "values"), [(4, [[1], [3], [2], [4]]), (2, [[1], [3], [0], [0], [2], [0], [0], [1]])])
def test_quantos_operator_unpacks_as_its_source_does(bits: int, values: list[list[int]]) -> None:
    packed = torch.tensor([[0x21], [0x43]], dtype=torch.uint8)  # 0b0010_0001, 0b0100_0011
    for kind in ("cpu", "cuda"):
        recorder = mock.MagicMock()
        recorder.device.kind = kind
        found = HANDLERS["quanto.unpack.default"](recorder, None, (packed, bits), {})
        assert (found.shape, found.dtype) == (torch.Size([16 // bits, 1]), torch.uint8)
        if kind == "cpu":
            assert found.tolist() == values
