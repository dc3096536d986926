"""A generation by the CPU's rules against torch.profiler, which watches transformers' own generate: bytes alive, exactly."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor

from sizer.allocator.timeline import running_bytes
from sizer.architecture.blueprint import Blueprint, Example
from sizer.device.readers.cpu_reader import CpuReader
from sizer.device.trial.materialize import build_without_weights, initialize_parameters, load
from sizer.device.trial.trial import generate_on, one_thread
from sizer.tape.loops import written
from sizer.tracing.generation import trace_generation
from sizer.tracing.steps import Work, weight_dtype
from sizer.tracing.token_trace import trace_tokens
from sizer.tracing.trace import repeatable
from tests.tracing.cpu_truth import CPU
from tests.tracing.generations import device, generation, work
from tests.tracing.quantized_caches import four_bit_caches

NEW, EVERY, BATCH = 50, 16, 2  # tokens are looked at when the first is there, and after each 16 more
CASES = [
    ("LlamaForCausalLM", "dynamic", "float32"),
    ("LlamaForCausalLM", "dynamic", "bfloat16"),
    ("LlamaForCausalLM", "static", "float32"),
    ("LlamaForCausalLM", "quantized", "float32"),  # quantized anew after each 20 tokens
    ("GPT2LMHeadModel", "dynamic", "float32"),
    ("Gemma2ForCausalLM", "dynamic", "float32"),
    ("DeepseekV3ForCausalLM", "dynamic", "float32"),
    ("T5ForConditionalGeneration", "dynamic", "float32"),
    ("BartForConditionalGeneration", "dynamic", "float32"),
]


def looked_at(token: int) -> bool:
    return token % EVERY == 1


def measure(blueprint: Blueprint, asked: Work) -> list[int]:
    """Bytes alive with each token that is looked at, by the profiler."""
    dtype = weight_dtype(asked.dtype)
    example = blueprint.example(BATCH, False)
    module = build_without_weights(blueprint, dtype)
    reader = CpuReader(CPU)
    gc.collect()
    with repeatable(), one_thread(), four_bit_caches():
        reader.begin(record=True)
        load(module, reader.device)
        initialize_parameters(module)

        def on_token(number: int, inputs: Example, cache: list[Tensor]) -> None:
            if looked_at(number):
                reader.mark(f"token {number}")

        generate_on(module, example, asked, reader.device, on_token)
        reader.end()
    return [reading.allocated_bytes for reading in reader.phases()]


@pytest.mark.parametrize(("head", "cache", "dtype"), CASES)
def test_bytes_alive_are_those_of_the_profiler(head: str, cache: str, dtype: str) -> None:
    blueprint, module = generation(head)
    asked = work(NEW, cache=cache, dtype=dtype)
    with one_thread(), four_bit_caches():
        tape = written(trace_generation(blueprint, module, asked, batch=BATCH, device=device("cpu")))
        ends = trace_tokens(blueprint, module, asked, batch=BATCH, device=device("cpu"), tokens=NEW, after=0).ends
    levels = running_bytes(tape.order, tape.sizes)
    found = [levels[end] for token, end in enumerate(ends, 1) if looked_at(token)]
    assert found == measure(blueprint, asked)
    assert len(found) == 4
