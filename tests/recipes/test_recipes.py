"""Training recipes: estimates against PyTorch's own host code, and what the keys refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from unittest import mock

import pytest
import torch
from torch import nn

from sizer.architecture.blueprint import Example
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.base.units import format_bytes
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.decision import lever_code
from sizer.decision.lever_table import LEVERS
from sizer.decision.levers import levers
from sizer.decision.peak import peak
from sizer.estimating.custom import size_step
from sizer.estimating.estimator import estimate
from sizer.estimating.tracer import Tracer
from sizer.query.text import format_query, parse_query
from sizer.query.values import DTYPES
from sizer.recipes import liger, losses, offloading
from sizer.recipes.evaluation import run_evaluation
from sizer.recipes.in_backward import StepsInBackward
from sizer.report.estimate import Estimate
from tests.architecture.tiny_configs import TINY
from tests.null_driver.recipes import APART, GATED, PACKAGES, QUERIES, RECORDED

ROWS = json.loads(RECORDED.read_text(encoding="utf-8"))
OF_EACH_CHANGE = (
    *("rtx-4090/in-backward", "rtx-4090/torch", "rtx-4090/chunked", "rtx-4090/evaluate-logits"),
    *("rtx-4090/ranks-amp-evaluate-logits-zero1", "rtx-4090/ranks-evaluate-logits-fsdp", "rtx-4090/fla", "rtx-4090/fla-kimi"),
)
MARKS = (pytest.mark.exhaustive, pytest.mark.full)  # full: with packages that requirements.txt does not name
REQUIRED = "fla-core"  # requirements.txt brings it
GPT2 = "arch=hf:gpt2&dtype=bfloat16&batch=2&seq=64&gpu=rtx-4090"


def _estimate(query: str) -> Estimate:
    (found,) = estimate(parse_query(query)).estimates
    return found


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # TRL calls these
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=() if name in OF_EACH_CHANGE else MARKS[PACKAGES.get(name.partition("/")[2], REQUIRED) != REQUIRED],
        )
        for name in ROWS
    ],
)
def test_a_recipe_takes_what_pytorchs_own_code_allocates(name: str):
    row = ROWS[name]
    found = _estimate(row["query"])
    if name in APART:
        assert abs(found.peak_allocated_bytes - row["allocated"]) <= 0.002 * row["allocated"]
        row = row | row["apart"]
    if row["versions"]["torch"] == version("torch").split("+")[0]:
        assert found.peak_allocated_bytes == row["allocated"]
        assert found.peak_reserved_bytes == row["reserved"]
        phases = {phase.phase: phase.peak_allocated_bytes for phase in found.phases if row["phases"]}
        if "weights=nf4" in row["query"]:  # two blocks that quantizing has made and freed
            assert 0 <= row["phases"]["load"] - phases["load"] <= 1024
            phases["load"] = row["phases"]["load"]
        assert phases == row["phases"]
    else:
        assert abs(found.peak_allocated_bytes - row["allocated"]) <= 0.2 * row["allocated"]


def test_every_recipe_is_recorded():
    assert set(ROWS) == set(QUERIES)
    assert all(ROWS[name]["query"] == query for name, query in QUERIES.items())


def test_checkpoints_on_the_host_are_another_spelling_of_two_keys():
    short, two = "activations=checkpoint-offload", "checkpointing=1&activations=offload"
    short, two = (parse_query(f"{GPT2}&{keys}") for keys in (short, two))
    assert short == two and "checkpoint-offload" not in format_query(short)
    assert parse_query(f"{GPT2}&checkpointing=1&activations=checkpoint-offload") == two
    for keys in ("checkpointing=0&activations=checkpoint-offload", "activations=checkpoint-offload&checkpointing=0"):
        with pytest.raises(RequestError, match="allowed values that agree with"):
            parse_query(f"{GPT2}&{keys}")


def test_keys_at_their_defaults_are_not_written():
    query = f"{GPT2}&loss=full&step=after&evaluate=none"
    assert format_query(parse_query(query)) == format_query(parse_query(GPT2))
    assert not {"loss", "step", "evaluate"} & {
        item.partition("=")[0] for item in format_query(parse_query(query), complete=True).split("&")
    }


def test_a_step_in_the_backward_pass_has_no_gradients_at_its_end():
    after, within = _estimate(GPT2), _estimate(f"{GPT2}&step=in_backward")
    assert within.gradients_bytes == 0 < after.gradients_bytes
    assert within.optimizer_bytes == after.optimizer_bytes
    assert within.peak_allocated_bytes < after.peak_allocated_bytes


def test_an_evaluation_adds_its_phase_and_changes_no_other():
    plain, evaluated = _estimate(GPT2), _estimate(f"{GPT2}&evaluate=logits:3")
    assert evaluated.phases[:-1] == plain.phases
    assert evaluated.phases[-1].phase == "evaluate"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("step=in_backward&accumulate=2", "step: given 'in_backward' with accumulate=2, allowed accumulate=1"),
        ("step=in_backward&optimizer=none", "step: given 'in_backward' with optimizer=none, allowed in_backward with an optimizer"),
        ("step=in_backward&parallel=fsdp", "step: given 'in_backward' without parallel=none"),
        ("loss=chunked:0", "loss: given 'chunked:0', allowed chunked:1 to chunked:4096"),
        ("loss=chunks", "allowed full, torch, trl, liger, cce, chunked:<chunks>"),
        ("loss=liger&gpu=cpu", "loss: given 'liger' with gpu=cpu"),
        ("loss=torch&mode=inference", "loss: given 'torch' without mode=training"),
        ("loss=torch&train=adapter&adapter=prefix", "loss: given 'torch' with adapter=prefix"),
        ("activations=offload&gpu=cpu", "activations: given 'offload' with gpu=cpu"),
        ("activations=offload&loss=liger", "activations: given 'offload' with loss=liger"),
        ("activations=offload&mode=inference", "activations: given 'offload' without mode=training"),
        ("optimizer_offload=1&gpu=cpu", "optimizer_offload: given 1 with gpu=cpu"),
        ("optimizer_offload=1&optimizer=adamw8bit", "optimizer_offload: given 1 with optimizer=adamw-8bit"),
        ("optimizer_offload=1&step=in_backward", "optimizer_offload: given 1 with step=in_backward"),
        ("optimizer_offload=1&mode=inference", "optimizer_offload: given '1' without mode=training"),
        ("liger=1&gpu=cpu", "liger: given 1 with gpu=cpu"),
        ("liger=1&mode=inference", "liger: given '1' without mode=training"),
        ("liger=1&parallel=tp&tp=2", "liger: given '1' without parallel=none or ddp or zero1 or fsdp or hsdp"),
        ("liger=1&parallel=fsdp&tp=2", "liger: given '1' without tp=1"),
        ("dtype=bfloat16&autocast=1&parallel=fsdp", "autocast: given '1' without parallel=none or ddp"),
        ("liger=1&objective=orpo", "liger: given 1 with objective=orpo, allowed 0; 1 with objective=lm, dpo, kto, grpo"),
        ("liger=1&compile=default", "liger: given '1' with compile=default"),
        ("liger=2", "liger: given '2', allowed 0, 1"),
        ("autocast=1&dtype=bfloat16,float16", "autocast: given 1 with dtype=float16, allowed 1 with dtype=bfloat16"),
        ("objective=dpo&train=adapter&weights=nf4&prepare=0", "prepare: given 0 with objective=dpo, allowed its default"),
        ("loss=trl&train=adapter&weights=nf4&prepare=0", "prepare: given 0 with loss=trl, allowed its default"),
        ("objective=gkd", "objective: given 'gkd', allowed lm, dpo, kto, orpo, reward, grpo, contrastive; a teacher model"),
        ("objective=RLOO", "ask for objective=grpo, with reference=none if beta is 0"),
        ("evaluate=loss&parallel=fsdp&tp=2", "evaluate: given 'loss' without tp=1"),
        ("autocast=1&mode=inference", "autocast: given '1' without mode=training"),
        ("evaluate=logits:0", "evaluate: given 'logits:0', allowed logits:1 to"),
        ("evaluate=loss&mode=inference", "evaluate: given 'loss' without mode=training"),
    ],
)
def test_what_a_recipe_cannot_be_is_refused(keys: str, said: str):
    with pytest.raises(RequestError) as refused:
        parse_query(f"arch=hf:gpt2&{keys}")
    assert said in str(refused.value)


def test_a_loss_needs_the_head_of_a_language_model():
    with pytest.raises(RequestError, match="BertForMaskedLM has no linear head over hidden states"):
        estimate(parse_query("arch=hf:bert-base-uncased&dtype=bfloat16&batch=1&loss=torch"))
    with pytest.raises(RequestError, match="loss: given 'torch' without a language model of transformers"):
        parse_query("arch=torchvision:resnet18&loss=torch")


@pytest.mark.parametrize(
    ("loss", "change", "takes"),
    [
        ("torch", "final_logit_softcapping", False),
        ("chunked:4", "final_logit_softcapping", False),
        ("full", "final_logit_softcapping", True),
        ("trl", "logit_scale", True),
        ("liger", "final_logit_softcapping", True),
        ("cce", "final_logit_softcapping", True),
        ("liger", "logit_scale", False),
        ("liger", "logits_scaling", False),
        ("liger", "lm_head_multiplier", True),
        ("cce", "logits_scaling", True),
        ("cce", "output_logit_soft_cap", False),
        ("trl", "logits_soft_cap", True),
    ],
)
def test_logits_that_a_model_changes_are_those_of_losses_that_change_them(loss: str, change: str, takes: bool):
    text = mock.Mock(**{"final_logit_softcapping": None, "logit_scale": None, "vocab_size": 11, change: 30.0})
    model = mock.Mock(spec=_Model, config=mock.Mock(**{"get_text_config.return_value": text}))
    with mock.patch.object(losses, "is_causal", lambda one: True), mock.patch.object(losses, "find_spec", lambda name: 1):
        assert losses.change_of(model) == change and losses.vocabulary_of(model) == 11
        if takes:
            losses.check_loss(loss, model)
        else:
            with pytest.raises(RequestError, match=rf"after the head \({change}\).*, allowed full, trl"):
                losses.check_loss(loss, model)


@pytest.mark.parametrize(
    ("config", "scale"),
    [({"logit_scale": 0.5}, 0.5), ({"logits_scaling": 4.0}, 0.25), ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, 4.0)],
)
def test_states_are_multiplied_in_the_place_of_logits(config: dict, scale: float):
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = CohereForCausalLM(CohereConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, logit_scale=None))
    for name, value in config.items():
        setattr(model.config, name, value)
    ids = torch.arange(8)[None] % 7
    seen: list[torch.Tensor] = []
    compute = losses._of_states(lambda head, states, labels: seen.append(states) or states.sum())
    compute(model, Example(kwargs={"input_ids": ids, "labels": ids}))
    plain = model.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(seen[0], plain * scale)


def test_a_head_takes_float32_residuals_in_its_own_dtype():
    config = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "state_size": 8}
    query = f"arch=config:{encode_config(json.dumps(config))}&dtype=bfloat16&batch=1&seq=64"
    assert 0 < _estimate(f"{query}&loss=chunked:4").peak_allocated_bytes <= _estimate(query).peak_allocated_bytes


def test_a_lever_changes_the_loss_of_a_model_that_caps_its_logits_to_trls_alone():
    row = next(lever for lever in LEVERS if lever.key == "loss")
    known = mock.Mock(vocabulary=11, changes_logits=True)
    assert row.change(parse_query(GPT2), known) is None
    known.changes_logits = False
    changed = row.change(parse_query(GPT2), known)
    assert changed is not None and changed.loss != "full"


def test_a_loss_whose_package_is_missing_says_how_to_install_it():
    with (
        mock.patch.object(losses, "find_spec", lambda name: None),
        pytest.raises(BuildError, match="liger-kernel is not installed: given loss=liger; pip install liger-kernel"),
    ):
        estimate(parse_query(f"{GPT2}&loss=liger"))


def test_layers_of_liger_need_its_package():
    with (
        mock.patch.object(liger, "find_spec", lambda name: None),
        mock.patch.object(liger, "_types", lambda: ()),
        pytest.raises(BuildError, match="liger-kernel is not installed: given liger=1; pip install liger-kernel"),
    ):
        estimate(parse_query(f"{GPT2}&liger=1"))


def test_layers_of_liger_need_a_type_that_it_has():
    with (
        mock.patch.object(liger, "find_spec", lambda name: object()),
        mock.patch.object(liger, "_types", lambda: ("llama", "qwen2")),
        pytest.raises(RequestError, match="liger: the installed liger-kernel has no layers for the type gpt2") as refused,
    ):
        estimate(parse_query(f"{GPT2}&liger=1"))
    assert "allowed model types that it supports, such as llama; remove it" in str(refused.value)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["torch", pytest.param("trl", marks=pytest.mark.full)])
def test_a_model_that_reads_pictures_has_the_losses_of_its_text(loss: str):
    config = {**TINY["llava"], "text_config": {**TINY["llava"]["text_config"], "vocab_size": 4096}}
    query = f"arch=config:{encode_config(json.dumps(config))}&dtype=bfloat16&batch=2&seq=32&gpu=rtx-4090"
    full, found = _estimate(query), _estimate(f"{query}&loss={loss}")
    assert found.weights_bytes == full.weights_bytes and found.activations_bytes <= full.activations_bytes


@pytest.mark.full
def test_layers_of_liger_need_experts_without_an_adapter():
    experts = {**TINY["qwen3_moe"], "vocab_size": 512}
    query = f"arch=config:{encode_config(json.dumps(experts))}&dtype=bfloat16&batch=1&seq=32&gpu=rtx-4090&liger=1"
    with pytest.raises(RequestError, match=r"liger: given 1 with an adapter around model.layers.0.mlp.experts"):
        estimate(parse_query(f"{query}&train=adapter"))
    assert estimate(parse_query(f"{query}&train=adapter&targets=o_proj")).estimates


@pytest.mark.parametrize("keys", ["", "&loss=chunked:2", "&train=adapter"])
def test_layers_with_experts_are_recomputed(keys: str):
    query = f"arch=config:{encode_config(json.dumps(TINY['qwen3_moe']))}&dtype=bfloat16&batch=2&seq=64&gpu=rtx-4090{keys}"
    kept, recomputed = _estimate(query), _estimate(f"{query}&checkpointing=1")
    assert recomputed.activations_bytes < kept.activations_bytes


@pytest.mark.full
def test_the_types_that_liger_has_are_read_without_importing_it():
    found = liger._types()
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert set(found) == set(MODEL_TYPE_TO_APPLY_LIGER_FN)


@pytest.mark.full
def test_layers_of_liger_save_and_leave_nothing_behind():
    query = f"arch=config:{encode_config(json.dumps(GATED))}&batch=2&seq=64&dtype=bfloat16&gpu=rtx-4090"
    plain, layers = _estimate(query), _estimate(f"{query}&liger=1")
    assert layers.activations_bytes < plain.activations_bytes
    assert layers.weights_bytes == plain.weights_bytes
    assert _estimate(query) == plain


@pytest.mark.full
def test_layers_of_liger_are_put_back_if_they_cannot_be_put_in(monkeypatch: pytest.MonkeyPatch):
    from liger_kernel.transformers import monkey_patch
    from transformers import Gemma2Config, Gemma2ForCausalLM
    from transformers.models.gemma2 import modeling_gemma2

    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(**GATED))
    before, own = dict(vars(modeling_gemma2)), [dict(vars(one)) for one in model.modules()]

    def fail(module: nn.Module) -> None:
        raise ValueError("no such layer")

    with liger.liger_layers(model):
        assert modeling_gemma2.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
    assert dict(vars(modeling_gemma2)) == before and [dict(vars(one)) for one in model.modules()] == own
    monkeypatch.setattr(monkey_patch, "_patch_geglu_module", fail)
    with pytest.raises(RequestError, match=r"a model of the type gemma2.*: no such layer"), liger.liger_layers(model):
        pass
    assert dict(vars(modeling_gemma2)) == before and [dict(vars(one)) for one in model.modules()] == own


@pytest.mark.full
def test_multiprocessors_decide_what_ligers_norms_take():
    query = f"arch=config:{encode_config(json.dumps(GATED))}&batch=1&seq=64&dtype=bfloat16&liger=1"
    for gpu, processors in (("rtx-4060-8gb", 24), ("rtx-4090", 128)):
        tape = Tracer(parse_query(f"{query}&gpu={gpu}"), GPUS[gpu]).trace_cell("bfloat16", 1)
        # a float32 row of each multiprocessor: 512 elements; 4 norms in each of 2 layers and 1 behind, in each of 2 steps
        assert list(tape.sizes).count(4 * processors * 512) >= 2 * (4 * 2 + 1)


@pytest.mark.full
def test_activations_on_the_host_leave_no_hook_and_are_never_more_than_on_the_device():
    query = f"{GPT2}&loss=trl".replace("seq=64", "seq=512")
    kept, offloaded = _estimate(query), _estimate(f"{query}&activations=offload")
    assert offloaded.peak_allocated_bytes <= kept.peak_allocated_bytes
    assert offloaded.host_bytes > 0 == kept.host_bytes
    assert offloaded.activations_bytes < kept.activations_bytes


def test_activations_need_trl_on_the_host():
    with (
        mock.patch.object(offloading, "find_spec", lambda name: None),
        pytest.raises(BuildError, match="trl is not installed: given activations=offload; pip install trl"),
    ):
        estimate(parse_query(f"{GPT2}&activations=offload"))


def test_an_optimizer_on_the_host_needs_torchao():
    with (
        mock.patch.object(offloading, "find_spec", lambda name: None),
        pytest.raises(BuildError, match="torchao is not installed: given optimizer_offload=1; pip install torchao"),
    ):
        estimate(parse_query(f"{GPT2}&optimizer_offload=1"))


def test_the_hooks_of_trl_are_removed_and_those_before_stay():
    model, before = _Model(), mock.Mock()
    handle = model.head.register_forward_pre_hook(before)
    restore = offloading._restore(model.head._forward_pre_hooks)
    model.head.register_forward_pre_hook(mock.Mock())
    restore()
    assert list(model.head._forward_pre_hooks) == [handle.id]


def test_the_gradient_scaler_does_not_step_in_the_backward_pass():
    query = "arch=hf:gpt2&batch=2&seq=64&step=in_backward"
    with pytest.raises(RequestError, match="step: given 'in_backward' with dtype=amp-float16, allowed dtypes without"):
        estimate(parse_query(f"{query}&dtype=amp-float16"))
    report = estimate(parse_query(query))  # of all dtypes
    assert {row.dtype for row in report.estimates} == {*DTYPES} - {"amp-float16"} and not report.failures
    assert [note for note in report.notes if note.startswith("amp-float16 is left out: step: given 'in_backward'")]


@pytest.mark.full
def test_a_loss_that_takes_no_float32_says_so():
    for keys in ("dtype=float32", "dtype=amp-bfloat16", "dtype=bfloat16&train=adapter&weights=nf4"):
        with pytest.raises(RequestError, match="loss: given 'cce' with hidden states in float32"):
            estimate(parse_query(f"arch=hf:qwen2.5-0.5b&batch=1&seq=64&gpu=rtx-4090&loss=cce&{keys}"))
    report = estimate(parse_query("arch=hf:qwen2.5-0.5b&batch=1&seq=64&gpu=rtx-4090&loss=cce"))  # of all dtypes
    assert [row.dtype for row in report.estimates] == ["bfloat16", "float16"] and not report.failures


@pytest.mark.full
def test_torchao_optimizer_steps_on_the_host():
    kept = _estimate(GPT2)
    (offloaded,) = estimate(parse_query(f"{GPT2}&optimizer_offload=1")).estimates
    # of each of 124,439,808 parameters in bfloat16: itself, its gradient and AdamW's two states
    assert offloaded.host_bytes >= 4 * 2 * 124_439_808 > kept.host_bytes == 0
    assert offloaded.optimizer_bytes < 2**20 < kept.optimizer_bytes  # of tensors with less than 4,096 elements
    assert offloaded.peak_allocated_bytes < kept.peak_allocated_bytes
    with pytest.raises(RequestError, match="does not divide gradients on the host"):
        estimate(parse_query(f"{GPT2.replace('bfloat16', 'amp-float16')}&optimizer_offload=1"))


def test_an_optimizer_on_the_host_leaves_no_hook():
    model, before, added = _Model(), mock.Mock(return_value=None), mock.Mock(return_value=None)
    first, *_ = parameters = list(model.parameters())
    first.register_post_accumulate_grad_hook(before)
    with offloading.hooks_removed(model):
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(added)
    sum(parameter.sum() for parameter in parameters).backward()
    assert before.call_count == 1 and not added.called


class _Model(nn.Module):
    """An embedding [11, 8] and a head [11, 8], called as transformers calls a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def test_losses_in_chunks_are_the_mean_loss_of_the_next_tokens():
    torch.manual_seed(0)
    model, tokens = _Model(), torch.randint(0, 11, (3, 6))
    states, head = model.base_model(tokens), model.head
    whole = nn.functional.cross_entropy(head(states[:, :-1]).reshape(-1, 11), tokens[:, 1:].reshape(-1))
    for loss in (losses._chunked(1), losses._chunked(4), losses._torch):
        assert torch.allclose(loss(head, states, tokens), whole, atol=1e-6)


def test_parameters_step_as_their_gradients_come():
    torch.manual_seed(0)
    one, other, seen = nn.Linear(4, 4), nn.Linear(4, 4), []
    other.load_state_dict(one.state_dict())
    steps = StepsInBackward(one, lambda parameters: [torch.optim.SGD(parameters, lr=0.1)])
    steps.on_gradient = lambda gradient: seen.append(gradient.shape)
    optimizer, inputs = torch.optim.SGD(other.parameters(), lr=0.1), torch.ones(2, 4)
    one(inputs).sum().backward()
    other(inputs).sum().backward()
    optimizer.step()
    assert torch.equal(one.weight, other.weight) and one.weight.grad is None
    assert sorted(map(tuple, seen)) == [(4,), (4, 4)]
    steps.close()
    one(inputs).sum().backward()
    assert one.weight.grad is not None


def test_an_evaluation_runs_its_batches_without_gradients():
    seen = []

    def predict(module: nn.Module, example: Example) -> mock.Mock:
        seen.append((module.training, torch.is_grad_enabled()))
        return mock.Mock(loss=torch.tensor(1.0), logits=torch.zeros(2, 3))

    model, example = nn.Linear(1, 1), Example(kwargs={"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 3)})
    run_evaluation("logits:3", model, example, cast=torch.no_grad, predict=predict)
    assert seen == [(False, False)] * 3
    assert model.training


def test_the_same_recipe_as_code_of_ones_own_takes_the_same():
    def setup():
        model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)).cuda()
        steps = StepsInBackward(model, lambda parameters: [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)])
        inputs = torch.zeros(8, 1024, device="cuda")
        assert len(steps.optimizers) == 4
        return lambda: model(inputs).square().mean().backward()

    found = size_step(setup, gpu="rtx-4090").estimates[0]
    weights = 2 * 4 * 1024 * 4096  # two matrices in float32; their momenta are as large, and one gradient at a time
    assert 2.5 * weights < found.peak_allocated_bytes < 3 * weights


def test_one_chunk_takes_what_the_loss_without_chunks_takes():
    def whole(head: nn.Module, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        labels = torch.hstack((labels[:, 1:], labels.new_full((labels.shape[0], 1), losses.IGNORED)))
        count, logits = (labels != losses.IGNORED).sum(), head(states)
        rows = logits.reshape(-1, logits.shape[-1]).float()
        return nn.functional.cross_entropy(rows, labels.reshape(-1), ignore_index=losses.IGNORED, reduction="sum") / count

    chunked, several = _estimate(f"{GPT2}&loss=chunked:1"), _estimate(f"{GPT2}&loss=chunked:8")
    with mock.patch.object(losses, "_chunked", lambda number: whole):
        (other,) = estimate(parse_query(f"{GPT2}&loss=chunked:1")).estimates
    for one, same in zip(chunked.phases, other.phases, strict=True):
        assert abs(one.peak_allocated_bytes - same.peak_allocated_bytes) <= 1024  # numbers, which the sum over chunks holds
    assert abs(chunked.peak_allocated_bytes - several.peak_allocated_bytes) > 2**18


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adamw-8bit"])
def test_the_code_of_the_change_names_the_optimizers_package(optimizer: str):
    code = lever_code.in_backward(parse_query(f"{GPT2}&optimizer={optimizer}"))
    row = OPTIMIZERS[optimizer]
    assert f"{row.module}.{row.class_name}([p])" in code
    compile(code, "change", "exec")


def _code_of(lever: str, query: str) -> str:
    (row,) = [row for row in LEVERS if row.key == lever]
    return row.code(parse_query(query))


def test_the_code_of_a_loss_in_chunks_computes_the_mean_loss():
    torch.manual_seed(0)
    model, tokens = _Model(), torch.randint(0, 11, (3, 6))
    whole = nn.functional.cross_entropy(model.head(model.base_model(tokens)[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    model.base_model.register_forward_hook(lambda module, args, states: mock.Mock(last_hidden_state=states))
    names = {"torch": torch, "model": model, "input_ids": tokens, "labels": tokens}
    exec(_code_of("loss", f"{GPT2}&loss=torch"), names)
    torch.testing.assert_close(names["loss"], whole)
    assert "CEWithChunkedOutputLoss(8)" in _code_of("loss", f"{GPT2}&loss=chunked:8")


@pytest.mark.full
@pytest.mark.parametrize("lever", ["loss-trl", "loss-liger", "liger"])
def test_the_code_of_a_packages_change_names_what_the_package_has(lever: str):
    exec(_code_of(lever, GPT2).partition("\n")[0], {})


@pytest.mark.full
def test_the_code_of_torchao_optimizer_steps_on_the_host():
    def setup() -> Callable[[], None]:
        names = {"torch": torch, "model": nn.Linear(1024, 1024, device="cuda")}
        exec(_code_of("optimizer-host", GPT2), names)

        def step() -> None:
            names["model"](torch.zeros(8, 1024, device="cuda")).sum().backward()
            names["optimizer"].step()
            names["model"].zero_grad()

        return step

    (on_host,) = size_step(setup).estimates
    assert on_host.optimizer_bytes < 2**20 and on_host.host_bytes >= 4 * 2**22  # a matrix, its gradient and two states


def test_training_with_all_logits_says_what_other_trainers_do_and_what_it_takes():
    long = GPT2.replace("seq=64", "seq=1024")
    full, chunked = (list(peak(parse_query(f"{long}&loss={loss}")))[-1] for loss in ("full", "torch"))
    held = sum(row.bytes for row in full.tensors if row.shape[-1:] == (50257,) and row.category in ("activation", "temporary"))
    assert f"Logits and their gradients are {format_bytes(held)} of the peak" in full.remedy
    assert chunked.remedy == ""
    notes = [estimate(parse_query(f"{GPT2}&{keys}")).notes for keys in ("loss=full", "loss=torch", "mode=inference")]
    assert [any("TRL's SFTTrainer" in note for note in said) for said in notes] == [True, False, False]


def test_a_loss_in_chunks_is_offered_where_a_loss_can_be_chosen():
    offered = next(iter(levers(parse_query(GPT2)))).pending
    assert "liger" not in offered  # which has no layers for GPT-2
    assert "loss" in offered
    assert "loss" not in next(iter(levers(parse_query(f"{GPT2}&loss=torch")))).pending
    assert "loss" not in next(iter(levers(parse_query("arch=hf:bert-base-uncased&dtype=bfloat16&batch=2&gpu=rtx-4090")))).pending
