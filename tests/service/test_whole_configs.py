"""Configs as long as published ones, with every key of their type, go through each mode as whole jobs.

Small configs never showed what long ones did: what is kept was named by the whole config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import closing

import pytest

from sizer.base.config_json import encode_config
from sizer.base.errors import SizerError
from sizer.catalogue.presets import PRESETS
from sizer.service.client import JobClient
from tests.architecture.tiny_configs import TINY

PUBLISHED = 900  # characters, and more, of a published config.json
MODES = {
    "inference": "mode=inference&dtype=bfloat16&batch=1&gpu=h100-80gb",
    "training": "mode=training&dtype=bfloat16&batch=1&gpu=h100-80gb",
    "generate": "mode=generate&dtype=bfloat16&batch=1&seq=16&new=4&gpu=h100-80gb",
}
SAMPLE = ("llama", "qwen3_moe")
NOT_GENERATED = "does not generate text"
# Published configs: one or more of each family of the presets, which are small enough for a job.
REAL = """
    llama-3.2-1b qwen2.5-0.5b qwen3-0.6b qwen3-30b-a3b qwen3-vl-2b-instruct qwen3.5-0.8b gemma-3-270m gemma-3n-e2b gemma-4-e2b-it
    mistral-7b-v0.3 mixtral-8x7b ministral-3-3b-instruct-2512 phi-4-mini-instruct deepseek-r1 kimi-k2-instruct glm-4.7-flash
    minimax-m2.5 gpt-oss-20b granite-4.0-h-micro lfm2-350m lfm2-8b-a1b olmo-3-1025-7b smollm2-135m gpt2 opt-125m pythia-160m
    bloom-560m mamba-130m bert-base-uncased modernbert-base deberta-v3-base t5-small bart-base vit-base-patch16-224
    dinov3-vitb16-pretrain-lvd1689m siglip2-base-patch16-224 smolvlm2-256m-video-instruct whisper-tiny wav2vec2-base-960h
    chronos-t5-tiny timesfm-2.0-500m-pytorch rtdetr_v2_r18vd sam2.1-hiera-tiny parakeet-ctc-0.6b
"""
REAL_SAMPLE = ("smollm2-135m", "bert-base-uncased")
# What a job says of a case that it does not answer, by the config and the mode.
REFUSED = {
    ("rtdetr_v2_r18vd", "training"): "its own code does not run cast to bfloat16",
    ("sam2.1-hiera-tiny", "training"): "it cannot be trained",
}


# What published configs of transformers 4 hold beside the architecture (configuration_utils.py, PretrainedConfig, 4.40).
GENERATION = {
    "return_dict": True, "output_hidden_states": False, "output_attentions": False, "torchscript": False, "use_bfloat16": False,
    "pruned_heads": {}, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "add_cross_attention": False,
    "tie_encoder_decoder": False, "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False,
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "num_return_sequences": 1, "output_scores": False,
    "return_dict_in_generate": False, "forced_bos_token_id": None, "forced_eos_token_id": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "suppress_tokens": None, "begin_suppress_tokens": None, "finetuning_task": None,
    "tokenizer_class": None, "prefix": None, "task_specific_params": None, "problem_type": None,
    "_name_or_path": "org/published-model", "transformers_version": "4.40.0",
}  # fmt: skip


def whole_config(tiny: dict) -> str:
    """Return the config with all keys of its type, and those that published ones of transformers 4 hold."""
    from transformers import AutoConfig

    kind = json.loads(AutoConfig.for_model(**tiny).to_json_string(use_diff=False))
    return json.dumps({**GENERATION, **kind}, separators=(",", ":"))


@pytest.fixture(scope="module")
def client() -> Iterator[JobClient]:
    with closing(JobClient()) as made:
        yield made


def cases(names: Iterable[str], sample: tuple[str, ...]) -> list:
    """Return each config with each mode. Those of the sample are in every run, one mode of each other config in CI's, all in the
    full one (.ci/full)."""
    found = []
    for place, name in enumerate(names):
        for number, mode in enumerate(MODES):
            rare = pytest.mark.exhaustive if (place + number) % len(MODES) == 0 else pytest.mark.full
            found.append(pytest.param(name, mode, marks=() if name in sample else rare))
    return found


def test_the_configs_are_of_published_length():
    assert len(TINY) >= 33
    assert min(len(whole_config(tiny)) for tiny in TINY.values()) > PUBLISHED
    assert len(set(REAL.split())) >= 40
    assert min(len(whole_config(PRESETS[key].config)) for key in REAL.split()) > PUBLISHED


@pytest.mark.parametrize(("kind", "mode"), cases(TINY, SAMPLE))
def test_a_whole_config_is_answered_by_a_job(client: JobClient, kind: str, mode: str):
    check(client, f"arch=config:{encode_config(whole_config(TINY[kind]))}&{MODES[mode]}", REFUSED.get((kind, mode)), mode)


@pytest.mark.parametrize(("key", "mode"), cases(REAL.split(), REAL_SAMPLE))
def test_a_published_config_is_answered_by_a_job(client: JobClient, key: str, mode: str):
    config = encode_config(whole_config(PRESETS[key].config))
    length = "&seq=32" if PRESETS[key].modality in ("text", "seq2seq") and mode != "generate" else ""
    query = f"arch=config:{config}&head={PRESETS[key].head}&{MODES[mode]}{length}"
    check(client, query, REFUSED.get((key, mode)), mode)


def check(client: JobClient, query: str, refusal: str | None, mode: str) -> None:
    """Fail unless a job answers with figures, or is refused in the words that the case names.

    A model that does not generate, or reads no prompt of a length, is refused in the mode "generate" by its own words.
    """
    try:
        report = client.submit(query).result(timeout=600)
    except SizerError as error:
        refused = str(error)
        assert mode == "generate" or refusal, refused
        assert re.search(refusal or f"{NOT_GENERATED}|^seq:", refused), refused
        return
    said = "; ".join(report.failures.values())
    assert bool(report.estimates) == (refusal is None), said
    assert refusal is None or re.search(refusal, said), said
