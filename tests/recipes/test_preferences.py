"""Preference training: the batch, the reference, what is refused, and properties of the estimates."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from sizer.architecture.frozen_parts import WithReference, policy_of
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.estimating.estimator import estimate, estimate_cell
from sizer.query.text import format_query, parse_query
from sizer.recipes import preferences
from sizer.recipes.losses import unfrozen
from sizer.recipes.preferences import (
    check_objective,
    completions_of,
    odds_pairs_of,
    pairs_of,
    without_dropout,
)
from sizer.tape.loops import written
from tests.tracing.cpu_truth import tape_bytes

GPT2 = "arch=hf:gpt2&dtype=bfloat16&batch=2&seq=128&gpu=rtx-4090"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("objective=ppo", "objective: given 'ppo', allowed lm, dpo, kto, orpo, reward"),
        ("objective=dpo&gpu=cpu", "objective: given 'dpo' with gpu=cpu"),
        ("objective=dpo&loss=torch", "loss: given 'torch' with objective=dpo"),
        ("objective=dpo&evaluate=loss", "evaluate: given 'loss' with objective=dpo"),
        ("objective=dpo&reference=adapter", "reference: given 'adapter' without train=adapter"),
        ("objective=dpo&reference=model&train=adapter", "reference: given 'model' with train=adapter"),
        ("objective=dpo&train=adapter&adapter=prefix", "objective: given 'dpo' with adapter=prefix"),
        ("objective=dpo&weights=nf4", "objective: given 'dpo' with weights=nf4"),
        ("objective=dpo&mode=inference", "objective: given 'dpo' without mode=training"),
        ("objective=dpo&parallel=pp&pp=2", "objective: given 'dpo' without parallel=none or ddp or zero1 or fsdp or hsdp"),
        ("objective=dpo&compile=default", "objective: given 'dpo' with compile=default"),
        ("objective=orpo&reference=model", "reference: given 'model' without objective=dpo or objective=kto"),
        ("reference=model", "reference: given 'model' without objective=dpo or objective=kto"),
        ("objective=reward&reference=model", "reference: given 'model' without objective=dpo or objective=kto"),
    ],
)
def test_what_preferences_do_not_take_is_refused(keys: str, said: str):
    with pytest.raises(RequestError) as refused:
        parse_query(f"arch=hf:gpt2&{keys}")
    assert said in str(refused.value)


def test_keys_at_their_defaults_are_not_written():
    assert format_query(parse_query(f"{GPT2}&objective=lm")) == format_query(parse_query(GPT2))
    written = format_query(parse_query(f"{GPT2}&objective=dpo"), complete=True)
    assert "objective=dpo" in written and "reference" not in written


def test_a_package_that_is_missing_is_named():
    with (
        mock.patch.object(preferences, "find_spec", lambda name: None if name == "trl" else mock.DEFAULT),
        pytest.raises(BuildError, match="trl is not installed: given objective=dpo; pip install trl"),
    ):
        estimate(parse_query(f"{GPT2}&objective=dpo"))


def test_a_batch_has_chosen_and_rejected_completions_of_half_of_the_tokens():
    tokens = torch.arange(24).reshape(4, 6)
    pairs = pairs_of(tokens, precomputed=False)
    assert sorted(pairs.kwargs) == ["attention_mask", "completion_mask", "input_ids"] and pairs.targets is None
    assert pairs.kwargs["completion_mask"].tolist() == [[0, 0, 0, 1, 1, 1]] * 4
    known = pairs_of(tokens, precomputed=True).targets
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in known.items()} == {
        "ref_chosen_logps": ((2,), torch.float32),
        "ref_rejected_logps": ((2,), torch.float32),
    }


def test_a_batch_of_kto_has_completions_for_other_prompts_and_labels_of_both_kinds():
    batch = completions_of(torch.arange(12).reshape(2, 6), precomputed=True)
    sequences = ("input_ids", "attention_mask", "completion_mask")
    assert sorted(batch.kwargs) == sorted((*sequences, *(f"KL_{name}" for name in sequences), "label"))
    assert batch.kwargs["label"].tolist() == [True, False]
    assert {name: tensor.shape for name, tensor in batch.targets.items()} == {"ref_logps": (2,), "ref_KL_logps": (2,)}


def test_a_batch_of_orpo_has_labels_of_completions_alone_and_prompts():
    batch = odds_pairs_of(torch.arange(24).reshape(4, 6), precomputed=False).kwargs
    chosen, rejected = batch["chosen_labels"].tolist(), batch["rejected_labels"].tolist()
    assert chosen == [[-100] * 3 + [3, 4, 5], [-100] * 3 + [9, 10, 11]]
    assert rejected == [[-100] * 3 + [15, 16, 17], [-100] * 3 + [21, 22, 23]]
    assert batch["prompt_input_ids"].tolist() == [[0, 1, 2], [6, 7, 8]] == batch["chosen_input_ids"][:, :3].tolist()


def test_a_reward_model_returns_one_reward_for_a_sequence():
    model = mock.Mock(spec=nn.Module, config=mock.Mock(num_labels=2))
    with pytest.raises(RequestError, match="does not return one reward for a sequence: given 'reward'"):
        check_objective("reward", model)


def test_the_reference_beside_a_policy_stays_frozen_and_in_evaluation():
    policy = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    without_dropout(policy)
    assert policy[1].p == 0
    both = WithReference(policy, nn.Linear(2, 2)).train()
    assert policy.training and not both.reference.training
    assert {name for name, p in both.named_parameters() if p.requires_grad} == {"policy.0.weight", "policy.0.bias"}
    assert policy_of(both) is policy and policy_of(policy) is policy


def test_the_weights_of_a_reference_require_gradients_where_autocast_asks():
    reference = nn.Linear(2, 2).requires_grad_(False)
    reference.register_parameter("packed", nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False))
    entered = []
    with unfrozen(reference, lambda: nullcontext(entered.append(True)))():
        assert entered and [p.requires_grad for p in reference.parameters()] == [True, True, False]
    assert not any(p.requires_grad for p in reference.parameters())


def _requested(keys: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes requested at each phase's end and at its peak: without the allocator's rounding."""
    request = parse_query(f"{GPT2}&{keys}")
    return tape_bytes(written(estimate_cell(request, gpu=find_gpu(request.gpu))[1]))


@pytest.mark.full
def test_a_frozen_model_beside_takes_its_weights_and_changes_no_later_phase():
    (ends, peaks), (known_ends, known_peaks) = _requested("objective=dpo"), _requested("objective=dpo&reference=precomputed")
    weights = ends["load"] - known_ends["load"]
    assert weights == known_ends["load"]
    for phase in ("backward", "optimizer", "step2"):
        assert abs(peaks[phase] - known_peaks[phase] - weights) <= 1024


@pytest.mark.full
def test_the_answer_says_what_a_sample_is_and_counts_the_policy_alone():
    found = estimate(parse_query(f"{GPT2}&objective=dpo"))
    assert any("a sample is a pair of sequences; their first half is the prompt" in note for note in found.notes)
    assert found.model.parameters == estimate(parse_query(GPT2)).model.parameters


@pytest.mark.full
def test_sequences_are_compared_by_language_models_alone():
    with pytest.raises(RequestError, match="objective: BertForMaskedLM has no linear head over hidden states"):
        estimate(parse_query("arch=hf:bert-base-uncased&dtype=bfloat16&batch=1&objective=dpo"))
