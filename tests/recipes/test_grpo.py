"""GRPO: what is refused, batches of whole groups, rollouts whose tokens follow from others, and a server's share."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.decision.cells import Cells
from sizer.decision.lever_code import new_tokens, without_reference
from sizer.decision.lever_table import LEVERS
from sizer.decision.limits import _traced_batches
from sizer.decision.peak import peak
from sizer.estimating.estimator import estimate, estimate_cell
from sizer.query.request import gpu_of
from sizer.query.text import format_query, parse_query
from sizer.recipes.preferences import prompts_of
from sizer.tape.loops import written
from sizer.tape.tape import Tape
from sizer.tracing import rollouts
from sizer.tracing.steps import Work

GPT2 = "arch=hf:gpt2&dtype=bfloat16&gpu=rtx-4090&objective=grpo"
_SIZES = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _tiny(**config: object) -> str:
    text = json.dumps({"model_type": "llama", **_SIZES, **_HEADS, **config})
    return f"arch=config:{encode_config(text)}&dtype=bfloat16&gpu=rtx-4090&objective=grpo&group=2&batch=2"


LLAMA = _tiny()
MISTRAL = _tiny(model_type="mistral", sliding_window=24)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            "batch=12",
            "batch: given 12 with group=8, allowed multiples of 8: a batch has all completions of each prompt; ask for batch=16",
        ),
        ("batch=6&group=4", "batch: given 6 with group=4"),
        ("group=1", "group: given '1', allowed whole numbers from 2 to 1,024"),
        ("rollout=vllm", "rollout: given 'vllm', allowed transformers, colocated"),
        ("rollout=colocated", "rollout: given 'colocated', allowed colocated:<share>"),
        ("rollout=colocated:1", "rollout: given 'colocated:1', allowed colocated:<share>"),
        ("rollout=colocated:0.0", "rollout: given 'colocated:0.0', allowed colocated:<share>"),
        ("reference=precomputed", "reference: given 'precomputed' with objective=grpo"),
        ("reference=adapter", "reference: given 'adapter' without train=adapter"),
        (
            "batch=3&accumulate=4",
            "batch: given 3 with group=8 and accumulate=4, allowed multiples of 2: a step has all completions of each prompt; "
            "ask for batch=4",
        ),
        ("activations=offload", "activations: given 'offload' with objective=grpo"),
        ("loss=torch", "loss: given 'torch' with objective=grpo"),
        ("mode=generate", "objective: given 'grpo' without mode=training"),
        ("gpu=cpu", "objective: given 'grpo' with gpu=cpu"),
        ("parallel=fsdp", "objective: given 'grpo' with parallel=fsdp"),
    ],
)
def test_what_grpo_does_not_take_is_refused(keys: str, said: str):
    with pytest.raises(RequestError) as refused:
        parse_query(f"arch=hf:gpt2&objective=grpo&{keys}")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("group=4", "group: given '4' without objective=grpo"),
        ("objective=dpo&rollout=colocated:0.3", "rollout: given 'colocated:0.3' without objective=grpo"),
        ("new=16", "new: given '16' without mode=generate or objective=grpo"),
        ("objective=dpo&reference=none", "reference: given 'none' with objective=dpo"),
        ("objective=kto&reference=none", "reference: given 'none' with objective=kto"),
        ("reference=none", "reference: given 'none' without objective=dpo or objective=kto or objective=grpo"),
    ],
)
def test_keys_of_grpo_need_grpo(keys: str, said: str):
    with pytest.raises(RequestError) as refused:
        parse_query(f"arch=hf:gpt2&{keys}")
    assert said in str(refused.value)


def test_a_question_that_names_no_batches_has_whole_groups_of_256_tokens():
    request = parse_query(GPT2)
    assert (request.batches, request.new) == ((8, 16, 32, 64), 256)
    assert parse_query(f"{GPT2}&group=6").batches == (6, 12, 24, 48)
    for keys in ("", "&new=512", "&new=16&group=4&batch=4,8&rollout=colocated:0.25&reference=none"):
        asked = parse_query(GPT2 + keys)
        assert parse_query(format_query(asked)) == asked == parse_query(format_query(asked, complete=True))
    assert "new" not in format_query(request) and "group" not in format_query(request)
    assert "new=512" in format_query(parse_query(f"{GPT2}&new=512"))


def test_passes_have_whole_groups_together():
    assert parse_query(f"{GPT2}&accumulate=8").batches == (1, 2, 4, 8)
    assert parse_query(f"{GPT2}&accumulate=6&batch=4").batches == (4,)
    (lever,) = [lever for lever in LEVERS if lever.key == "batch"]
    changed = lever.change(parse_query(f"{GPT2}&batch=8&group=4"), mock.Mock(smallest=4))
    assert (changed.batches, changed.accumulate) == ((4,), 2)
    assert "per_device_train_batch_size=4, gradient_accumulation_steps=2" in lever.code(changed)


@pytest.mark.full
def test_a_rollout_is_of_all_passes():
    one, two, three = (estimate(parse_query(f"{LLAMA}&seq=64&new=16&accumulate={passes}")).estimates[0] for passes in (1, 2, 3))
    caches = [next(use.peak_allocated_bytes for use in found.phases if use.phase == "rollout") for found in (one, two, three)]
    assert caches[0] < caches[1] < caches[2]
    assert one.activations_bytes <= two.activations_bytes == three.activations_bytes


def test_a_batch_is_prompts_on_the_host():
    assert prompts_of(torch.arange(6).reshape(2, 3)).kwargs == {"prompts": [[0, 1, 2], [3, 4, 5]]}


def test_a_server_takes_its_share_of_the_process():
    gpu, served = (gpu_of(parse_query(GPT2 + keys)) for keys in ("", "&rollout=colocated:0.3"))
    share = int(0.3 * find_gpu("rtx-4090").total_bytes)
    for name in ("context_low_bytes", "context_bytes", "context_high_bytes"):
        assert getattr(served, name) - getattr(gpu, name) == share
    assert served.total_bytes == gpu.total_bytes


def test_phases_follow_each_other():
    def phases(**fields: object) -> list[str]:
        work, found = Work(mode="training", dtype="bfloat16", objective="grpo", **fields), ["load"]
        while found[-1] != "step2":
            found.append(work.phase_after(found[-1]))
        return found

    rest = ["forward", "backward", "optimizer", "step2"]
    assert phases(reference="model") == ["load", "rollout", "reference", *rest]
    assert phases(reference="none") == ["load", "rollout", *rest]
    assert phases(reference="none", rollout="colocated:0.3") == ["load", "reference", *rest]


def test_options_of_the_trainer_are_named():
    asked = parse_query(f"{GPT2}&new=64")
    assert new_tokens(asked).endswith("GRPOConfig(max_completion_length=64)")
    assert without_reference(asked).endswith("GRPOConfig(beta=0.0)")
    assert without_reference(parse_query("arch=hf:gpt2&objective=dpo")).endswith(
        "DPOConfig(precompute_ref_log_probs=True)"
    )


def test_a_frozen_reference_can_be_left_out():
    (lever,) = [lever for lever in LEVERS if lever.key == "reference"]
    changed = {
        query: lever.change(parse_query(f"arch=hf:gpt2&{query}"), None)
        for query in (
            "objective=grpo",
            "objective=dpo",
            "objective=kto",
            "objective=dpo&train=adapter",
            "objective=orpo",
            "mode=inference",
        )
    }
    assert [found and found.reference for found in changed.values()] == [
        "none",
        "precomputed",
        "precomputed",
        None,
        None,
        None,
    ]


# ------------------------------------------------------------------------------------------------------------ with trl


def _tape(query: str) -> Tape:
    request = parse_query(query)
    return estimate_cell(request, gpu=find_gpu(request.gpu))[1]


def _token_by_token(query: str) -> Tape:
    with mock.patch.object(rollouts, "PERIODS", ()):
        return _tape(query)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys", ["seq=8&new=40", "seq=9&new=33&attention=eager&reference=none", "seq=8&new=40&train=adapter"]
)
def test_tokens_follow_from_those_that_were_traced(keys: str):
    found, whole = _tape(f"{LLAMA}&{keys}"), _token_by_token(f"{LLAMA}&{keys}")
    assert len(found.loops) == 2 and not whole.loops
    full = written(found.validate())
    assert (full.order, full.sizes, full.marks, full.categories) == (
        whole.order,
        whole.sizes,
        whole.marks,
        whole.categories,
    )


@pytest.mark.full
def test_experts_without_their_number_are_refused():
    config = {"model_type": "granitemoehybrid", "hidden_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    config |= {"vocab_size": 128, "layer_types": ["attention"] * 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"mamba_n_heads": 8}
    query = f"arch=config:{encode_config(json.dumps(config))}&dtype=bfloat16&batch=2&seq=8"
    with pytest.raises(RequestError, match="objective: TRL's loss that balances experts reads num_experts"):
        estimate(parse_query(f"{query}&group=2&new=8&objective=grpo"))


@pytest.mark.full
def test_a_window_that_fills_in_a_rollout_has_every_token_traced():
    assert len(_tape(f"{MISTRAL}&seq=40&new=32").loops) == 2  # it was full before
    assert len(_tape(f"{MISTRAL}&seq=8&new=16").loops) == 2  # it does not fill
    assert not _tape(f"{MISTRAL}&seq=8&new=32").loops
    with (
        mock.patch.object(rollouts, "TRACED_AT_MOST", 31),
        pytest.raises(TraceError, match=r"the steps of this rollout follow no rule.*ask for at most 31 new tokens"),
    ):
        _tape(f"{MISTRAL}&seq=8&new=32")


@pytest.mark.full
def test_what_is_not_asked_for_is_in_no_phase():
    found = {keys: estimate(parse_query(f"{LLAMA}&seq=8&new=16{keys}")).estimates[0] for keys in
             ("", "&reference=none", "&rollout=colocated:0.3")}  # fmt: skip
    model, none, served = found.values()
    assert [[use.phase for use in row.phases][1:-4] for row in found.values()] == [
        ["rollout", "reference"],
        ["rollout"],
        ["reference"],
    ]
    assert model.phases[0].allocated_bytes == 2 * none.phases[0].allocated_bytes
    assert model.gradients_bytes == none.gradients_bytes == served.gradients_bytes
    gpu = find_gpu("rtx-4090")
    assert served.process_bytes - served.peak_reserved_bytes - gpu.context_bytes == int(0.3 * gpu.total_bytes)


@pytest.mark.full
def test_the_answer_says_what_a_sample_is_and_what_the_server_has():
    report = estimate(parse_query(f"{LLAMA}&seq=8&new=16&rollout=colocated:0.5"))
    assert any("GRPO by TRL's trainer" in note and "a sample is a completion" in note for note in report.notes)
    assert any(said.startswith("a server has 0.5 of the device's memory") for said in report.cautions)
    assert report.request["new"] == 16 and "cache" not in report.request


@pytest.mark.full
def test_more_completions_and_longer_ones_take_more():
    def rollout(keys: str) -> int:
        (row,) = estimate(parse_query(f"{LLAMA.replace('&batch=2', '')}&reference=none&{keys}")).estimates
        return next(use.peak_allocated_bytes for use in row.phases if use.phase == "rollout")

    short = rollout("batch=16&seq=8&new=32")
    assert short < rollout("batch=32&seq=8&new=32") and short < rollout("batch=16&seq=8&new=1024")


@pytest.mark.full
def test_the_peak_of_a_rollout_is_explained_if_its_tokens_can_be_traced():
    query = f"{LLAMA.replace('batch=2', 'batch=64')}&seq=256&new=32&reference=none&train=adapter"
    report = list(peak(parse_query(query)))[-1]
    assert report.tensors and sum(row.bytes for row in report.tensors) > 0
    with (
        mock.patch.object(rollouts, "TRACED_AT_MOST", 31),
        mock.patch.object(rollouts, "replay", lambda *args, **kwargs: mock.Mock(at_peak={"kv cache": 1})),
        pytest.raises(TraceError, match="the peak is in a rollout of 32 tokens"),
    ):
        list(peak(parse_query(query)))


@pytest.mark.full
def test_the_largest_batch_is_looked_for_in_groups():
    request = parse_query(f"{LLAMA}&seq=8&new=8")
    size = _traced_batches(request, Cells(request))
    assert (size.step, size.smallest, size.of(3)) == (2, 1, 6)
