"""Configs as long as published ones, with every key of their type, go through each mode as whole jobs.

Small configs never showed what long ones did: what is kept was named by the whole config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from sizer.config_json import encode_config
from sizer.errors import SizerError
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


def kinds() -> list:
    """Return the types, of which a sample is in every run."""
    return [pytest.param(one, marks=() if one in SAMPLE else pytest.mark.exhaustive) for one in TINY]


def test_the_configs_are_of_published_length():
    assert len(TINY) >= 33
    assert min(len(whole_config(tiny)) for tiny in TINY.values()) > PUBLISHED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", kinds())
def test_a_whole_config_is_answered_by_a_job(client: JobClient, kind: str, mode: str):
    query = f"arch=config:{encode_config(whole_config(TINY[kind]))}&{MODES[mode]}"
    try:
        report = client.submit(query).result(timeout=300)
    except SizerError as error:
        # what a model cannot do is said in its own words; a job never ends for what it keeps
        assert mode == "generate" and (NOT_GENERATED in str(error) or str(error).startswith("seq:")), error
        return
    assert report is not None and (report.estimates or report.failures)
