"""transformers' `generate` as a step of one's own: it ends where it does on a device, and may ask for a second stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import sizer
from sizer.report.report import Report
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from tests.tracing.known import known, under

TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def generate(**options: object) -> Report:
    """Three tokens after a prompt of five, for two sequences."""

    def setup() -> Callable[[], None]:
        model = AutoModelForCausalLM.from_config(TINY).cuda().eval()
        prompt = torch.zeros(2, 5, dtype=torch.long, device="cuda")

        def step() -> None:
            found = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0, **options)
            assert found.shape == (2, 8)

        return step

    return sizer.size_step(setup, steps=1)


def test_generate_ends_at_its_length_whatever_its_eos_token_would_find() -> None:
    plain, stopping = (generate(eos_token_id=token).estimates[0] for token in (None, 7))
    assert 0 < plain.peak_allocated_bytes <= stopping.peak_allocated_bytes


def test_an_offloaded_cache_prefetches_on_a_second_stream_whose_memory_is_kept_apart() -> None:
    plain, offloaded = (generate(cache_implementation=name, eos_token_id=None) for name in (None, "offloaded"))
    assert offloaded.estimates[0].peak_allocated_bytes < plain.estimates[0].peak_allocated_bytes
    assert offloaded.estimates[0].peak_reserved_bytes > plain.estimates[0].peak_reserved_bytes


def test_what_absorbs_every_value_makes_the_result_known() -> None:
    recorder = Recorder(Device("cuda", (8, 0)))
    unknown = under(recorder, lambda: torch.rand(3).mul(5).long())
    results = under(
        recorder,
        lambda: (
            unknown & torch.zeros(3, dtype=torch.bool),
            (unknown > 2) | torch.ones(3, dtype=torch.bool),
            unknown | torch.ones(3, dtype=torch.int64),
            (unknown > 2) & torch.tensor([True, False, True]),
        ),
    )
    assert [known(recorder, result) for result in results] == [[0, 0, 0], [True, True, True], None, None]
