"""Contrastive training: batches of two columns, what is refused, and what cached gradients save."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.decision.lever_table import LEVERS
from sizer.decision.levers import levers
from sizer.estimating.estimator import estimate
from sizer.query.text import format_query, parse_query
from sizer.recipes import preferences
from sizer.recipes.preferences import check_objective, columns_of
from sizer.report.estimate import Estimate
from tests.architecture.tiny_configs import TINY

_SIZES = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT = f"arch=config:{encode_config(json.dumps({'model_type': 'bert', **_SIZES}))}&dtype=float32&seq=64&gpu=rtx-4090"
LEVER = next(lever for lever in LEVERS if lever.key == "cached")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("objective=contrastive:0", "objective: given 'contrastive:0', allowed contrastive:1 to contrastive:65536"),
        ("objective=contrastive:", "objective: given 'contrastive:', allowed contrastive:1 to contrastive:65536"),
        ("objective=contrast", "objective: given 'contrast', allowed lm, dpo"),
        ("objective=contrastive&gpu=cpu", "objective: given 'contrastive' with gpu=cpu"),
        ("objective=contrastive&loss=torch", "loss: given 'torch' with objective=contrastive"),
        ("objective=contrastive&evaluate=loss", "evaluate: given 'loss' with objective=contrastive"),
        ("objective=contrastive&activations=offload", "activations: given 'offload' with objective=contrastive"),
        ("objective=contrastive:8&step=in_backward", "step: given 'in_backward' with objective=contrastive:8"),
        ("objective=contrastive:8&optimizer_offload=1", "optimizer_offload: given '1' with objective=contrastive:8"),
        ("objective=contrastive&reference=model", "reference: given 'model' without objective=dpo"),
        ("objective=contrastive&weights=nf4", "objective: given 'contrastive' with weights=nf4"),
        ("objective=contrastive&mode=inference", "objective: given 'contrastive' without mode=training"),
        ("objective=contrastive&parallel=fsdp", "objective: given 'contrastive' with parallel=fsdp"),
    ],
)
def test_what_contrastive_training_does_not_take_is_refused(keys: str, said: str):
    with pytest.raises(RequestError) as refused:
        parse_query(f"arch=hf:bert-base-uncased&{keys}")
    assert said in str(refused.value)


def test_a_number_of_texts_is_written_as_it_was_asked_for():
    for objective in ("contrastive", "contrastive:32"):
        assert f"objective={objective}" in format_query(parse_query(f"{BERT}&objective={objective}")).replace("%3A", ":")


def test_a_batch_has_a_column_of_anchors_and_one_of_positives():
    tensors = {"input_ids": torch.arange(12).reshape(4, 3), "attention_mask": torch.ones(4, 3), "labels": torch.zeros(4)}
    columns = columns_of({**tensors, "use_cache": False}).kwargs
    assert {name: sorted(column) for name, column in columns.items()} == {
        "anchor": ["attention_mask", "input_ids"], "positive": ["attention_mask", "input_ids"],
    }  # fmt: skip
    assert columns["anchor"]["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert columns["positive"]["input_ids"].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_model_with_a_head_has_no_embeddings():
    with pytest.raises(RequestError, match="objective: BertForMaskedLM does not return hidden states of a text alone"):
        check_objective("contrastive", type("BertForMaskedLM", (torch.nn.Module,), {})())


def test_a_package_that_is_missing_is_named():
    with (
        mock.patch.object(preferences, "find_spec", lambda name: None if name == "sentence_transformers" else 1),
        pytest.raises(BuildError, match="sentence_transformers is not installed: given objective=contrastive:8; pip"),
    ):
        estimate(parse_query(f"{BERT}&batch=4&objective=contrastive:8"))


def test_cached_gradients_are_offered_for_contrastive_training_alone():
    def offered(query: str) -> str | None:
        found = LEVER.change(parse_query(f"{BERT}&{query}"), None)
        return found and found.objective

    assert offered("batch=128&objective=contrastive") == "contrastive:32"
    assert offered("batch=8&objective=contrastive") == "contrastive:4"
    for query in ("batch=1&objective=contrastive", "batch=8&objective=contrastive:2", "batch=8"):
        assert offered(query) is None
    code = LEVER.code(parse_query(f"{BERT}&batch=8&objective=contrastive:4"))
    assert "CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)" in code
    compile(code, "change", "exec")


# ------------------------------------------------------------------------------------------- with sentence-transformers


def _estimate(keys: str) -> Estimate:
    (found,) = estimate(parse_query(f"{BERT}&{keys}")).estimates
    return found


@pytest.mark.full
def test_smaller_mini_batches_take_less_and_the_states_stay():
    whole, *cached = (_estimate(f"batch=64&objective=contrastive{size}") for size in ("", ":32", ":8"))
    peaks = [row.peak_allocated_bytes for row in (whole, *cached)]
    assert peaks == sorted(peaks, reverse=True) and len({*peaks}) == 3
    for row in cached:
        for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
            assert getattr(row, name) == getattr(whole, name)
        assert row.activations_bytes < whole.activations_bytes / 10  # the embeddings, their gradients and random states


@pytest.mark.full
def test_the_model_has_no_head_and_the_answer_says_what_a_sample_is():
    report = estimate(parse_query(f"{BERT}&batch=4&objective=contrastive:2"))
    assert report.model.class_name == "BertModel"
    assert any("2 texts at once, with cached gradients: a sample is a pair of texts" in note for note in report.notes)


@pytest.mark.full
def test_scores_of_all_pairs_grow_with_the_square_of_the_batch():
    one, two, four = (_estimate_short(batch) for batch in (256, 512, 1024))
    assert four - two > 2 * (two - one)


def _estimate_short(batch: int) -> int:
    query = BERT.replace("seq=64", "seq=1")
    return estimate(parse_query(f"{query}&batch={batch}&objective=contrastive")).estimates[0].activations_bytes


@pytest.mark.full
def test_a_model_with_a_head_or_a_decoder_is_refused():
    with pytest.raises(RequestError, match="objective: BertForMaskedLM does not return hidden states"):
        estimate(parse_query(f"{BERT}&head=BertForMaskedLM&batch=2&objective=contrastive"))
    with pytest.raises(RequestError, match="objective: T5Model does not return hidden states"):
        estimate(parse_query("arch=hf:t5-small&batch=2&dtype=float32&objective=contrastive"))
    with pytest.raises(RequestError, match=r"objective: given 'contrastive' with CLIPModel, allowed .* returns CLIPOutput"):
        estimate(parse_query(f"arch=config:{encode_config(json.dumps(TINY['clip']))}&batch=2&dtype=float32&objective=contrastive"))


@pytest.mark.full
def test_levers_compare_the_cached_loss():
    rows = {row.key: row for row in list(levers(parse_query(f"{BERT}&batch=64&objective=contrastive")))[-1].rows}
    assert rows["cached"].cell.process_bytes < rows["checkpointing"].cell.process_bytes
    assert "batch" not in rows
