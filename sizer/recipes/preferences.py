"""Preference training by TRL's own losses: compared completions, and log-probabilities of a reference.

`_compute_loss` of DPOTrainer and KTOTrainer, `compute_loss` of RewardTrainer (trl/trainer, 1.16) and `get_batch_loss_metrics`
of ORPOTrainer (trl/experimental) run with a stand-in for the trainer. The batch, the reference model and the constructors'
changes to models (no dropout, a fused LM head) are re-implemented.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.frozen_parts import WithReference, inner, policy_of, reference_in
from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue.recipes import (
    ADAPTER,
    DPO,
    GRPO,
    KTO,
    LM,
    MODEL,
    NONE,
    ORPO,
    PRECOMPUTED,
    REWARD,
    WITH_REFERENCE,
    cached_texts,
    is_contrastive,
)
from sizer.recipes.losses import fused_head, is_causal, prepare_forward, reads_pictures, unfrozen

# Outputs of the heads of the trainers' policies.
_OF_METRICS = {DPO: ("log_probs", "entropy", "mean_logits", "is_top1"), KTO: ("log_probs", "entropy", "mean_logits")}


Cast = Callable[[], AbstractContextManager] | None  # returns an autocast context
SENTENCES = "sentence-transformers"
COLUMNS = ("anchor", "positive")
_REWARDS = "ForSequenceClassification"


def with_objective(blueprint: Blueprint, objective: str, reference: str | None) -> Blueprint:
    """Return a blueprint with the step of an objective.

    Args:
        blueprint: The architecture, a causal language model.
        objective: A value of the key `objective`.
        reference: Where the reference's log-probabilities come from, one of REFERENCES.

    Raises:
        BuildError: The objective's package is not installed.
    """
    if objective == LM:
        return blueprint
    package = SENTENCES if is_contrastive(objective) else "trl"
    for name in (package.replace("-", "_"), "datasets", "accelerate"):
        if find_spec(name) is None:
            raise BuildError(f"{name} is not installed", given=f"objective={objective}", todo=f"pip install {package} datasets")
    if is_contrastive(objective):
        return _with_columns(blueprint, objective)
    limit = blueprint.limit or (lambda module: module)

    def limit_beside_reference(module: nn.Module) -> nn.Module:
        if objective != GRPO:  # disable_dropout is False in its config
            without_dropout(module)
        beside = copy.deepcopy(module) if reference == MODEL else None
        limited = limit(module)
        return limited if beside is None else WithReference(limited, beside)

    def batch_of(batch: int, training: bool) -> Example:
        sequences = batch if objective in (KTO, GRPO) else 2 * batch
        ids = blueprint.example(sequences, training).kwargs["input_ids"]
        return prompts_of(ids) if objective == GRPO else _BATCHES[objective](ids, precomputed=reference == PRECOMPUTED)

    def describe(module: nn.Module) -> tuple[str, ...]:
        policy = policy_of(module)
        pictures = "; sequences only have text, no images" if reads_pictures(base_of(policy)) else ""
        return *blueprint.describe(policy), f"{_TITLES[objective]}{_TOLD[reference]}: {_SAMPLES[objective]}{pictures}"

    return replace(
        blueprint,
        example=batch_of,
        loss=_LOSSES.get(objective, blueprint.loss),  # GRPO's is its steps' (sizer.recipes.grpo)
        limit=limit_beside_reference,
        describe=describe,
    )


def _with_columns(blueprint: Blueprint, objective: str) -> Blueprint:
    """Return a blueprint with a step that compares texts by their embeddings.

    Its steps set the loss (sizer.recipes.contrastive).
    """
    size = cached_texts(objective)
    cached = f", {size:,} texts at once, with cached gradients" if size else ""
    text = f"Embeddings by sentence-transformers' loss of pairs{cached}: a sample is a pair of texts; mean pooling"
    return replace(
        blueprint,
        example=lambda batch, training: columns_of(blueprint.example(2 * batch, training).kwargs),
        describe=lambda module: (*blueprint.describe(module), text),
    )


def columns_of(inputs: dict[str, Any]) -> Example:
    """Return the batch of SentenceTransformerTrainer's collator: inputs [2 × pairs, …] as columns of anchors and of positives."""
    halves = {name: value.chunk(2) for name, value in inputs.items() if isinstance(value, Tensor) and name != "labels"}
    return Example(kwargs={column: {name: parts[n] for name, parts in halves.items()} for n, column in enumerate(COLUMNS)})


_TITLES = {
    DPO: "DPO by TRL's loss",
    KTO: "KTO by TRL's loss",
    ORPO: "ORPO by TRL's loss",
    REWARD: "A reward model by TRL's loss",
    GRPO: "GRPO by TRL's trainer",
}
_TOLD = {
    None: "",
    MODEL: ", with a frozen reference model of the same weights",
    ADAPTER: "; the reference is the model without the adapter",
    PRECOMPUTED: "; the reference's log-probabilities were computed before the training",
    NONE: ", without a reference (beta=0)",
}
_SAMPLES = {
    DPO: "a sample is a pair of sequences; their first half is the prompt",
    KTO: "a sample is a sequence, with the prompt as its first half, and another completion of the batch for the same prompt",
    ORPO: "a sample is a pair of sequences; their first half is the prompt; there is no reference",
    REWARD: "a sample is a pair of sequences",
    GRPO: "a sample is a completion of a prompt; rewards are a Python function's",
}


def check_objective(objective: str, module: nn.Module) -> None:
    """Raise RequestError if a module is not of the class that an objective trains."""
    model = base_of(module)
    if is_contrastive(objective) and not _embeds(model):
        raise RequestError(
            f"objective: {type(model).__name__} does not return hidden states of a text alone",
            given=repr(objective),
            allowed="a class without a head that reads input_ids, such as BertModel",
            todo="leave head out, or choose a text model without a separate decoder",
        )
    if objective in (*WITH_REFERENCE, ORPO) and not is_causal(model):
        raise RequestError(
            f"objective: {type(model).__name__} has no linear head over hidden states of a causal language model",
            given=repr(objective),
            allowed="a class such as LlamaForCausalLM, or objective=lm",
            todo="leave objective out",
        )
    if objective == GRPO and balances_experts(config := model.config.get_text_config()) and not hasattr(config, "num_experts"):
        raise RequestError(
            f"objective: TRL's loss that balances experts reads num_experts, which {type(config).__name__} does not have",
            given=repr(objective),
            allowed="models with num_experts in their config, such as Qwen3MoeForCausalLM",
            todo="ask for objective=lm or dpo",
        )
    if objective == REWARD and not (type(model).__name__.endswith(_REWARDS) and model.config.num_labels == 1):
        raise RequestError(
            f"objective: {type(model).__name__} does not return one reward for a sequence",
            given=repr(objective),
            allowed="a class such as LlamaForSequenceClassification with classes=1",
            todo="add head=LlamaForSequenceClassification&classes=1, with the class of your model",
        )


def balances_experts(config: Any) -> bool:
    """Return True if TRL's GRPOTrainer adds a loss that balances the experts of a model with this config of its text."""
    return hasattr(config, "output_router_logits") and getattr(config, "router_aux_loss_coef", 0.0) != 0.0


def _embeds(model: nn.Module) -> bool:
    """Return True if a model of transformers has no head, reads text, and is no encoder with a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as NAMES

    names = {name for names in NAMES.values() for name in ((names,) if isinstance(names, str) else names)}
    reads_text = getattr(model, "main_input_name", None) == "input_ids"
    return type(model).__name__ in names and reads_text and not model.config.is_encoder_decoder


def without_dropout(module: nn.Module) -> None:
    """Set the probability of each dropout layer to 0, as TRL's trainers do (disable_dropout_in_model)."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0


def _masked(ids: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Return sequences [sequences, tokens] with their masks; the second half of each is the completion."""
    completion = torch.zeros_like(ids)
    completion[:, ids.shape[1] // 2 :] = 1
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": torch.ones_like(ids), f"{prefix}completion_mask": completion}


def prompts_of(ids: Tensor) -> Example:
    """Return the batch of GRPOTrainer: prompts [completions, tokens], which are lists on the host."""
    return Example(kwargs={"prompts": ids.tolist()})


def pairs_of(ids: Tensor, *, precomputed: bool) -> Example:
    """Return the batch of DPOTrainer's collator: chosen sequences [pairs, tokens], then rejected ones, with their masks.

    Only a completion's tokens have log-probabilities.
    """
    known = torch.zeros(ids.shape[0] // 2)  # float32, which no cast of inputs reaches among the targets
    targets = {"ref_chosen_logps": known, "ref_rejected_logps": known.clone()}
    return Example(kwargs=_masked(ids), targets=targets if precomputed else None)


def completions_of(ids: Tensor, *, precomputed: bool) -> Example:
    """Return the batch of KTOTrainer's collator: sequences [completions, tokens], each with another's completion, and labels.

    Every second one is desirable.
    """
    label = torch.arange(ids.shape[0]) % 2 == 0
    targets = {name: torch.zeros(ids.shape[0]) for name in ("ref_logps", "ref_KL_logps")} if precomputed else None
    return Example(kwargs={**_masked(ids), **_masked(ids.clone(), "KL_"), "label": label}, targets=targets)


def odds_pairs_of(ids: Tensor, *, precomputed: bool) -> Example:
    """Return the batch of ORPOTrainer's collator: chosen and rejected sequences [pairs, tokens], their labels, the prompts."""
    half, one = ids.shape[1] // 2, torch.ones_like
    given = {"prompt_input_ids": ids[: len(ids) // 2, :half].clone()}
    given["prompt_attention_mask"] = one(given["prompt_input_ids"])
    for name, part in zip(("chosen", "rejected"), ids.chunk(2), strict=True):
        labels = part.clone()
        labels[:, :half] = -100
        given |= {f"{name}_input_ids": part.clone(), f"{name}_attention_mask": one(part), f"{name}_labels": labels}
    return Example(kwargs=given)


def rewarded_pairs_of(ids: Tensor, *, precomputed: bool) -> Example:
    """Return the batch of RewardTrainer's collator: chosen sequences [pairs, tokens], then rejected ones."""
    return Example(kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)})


_BATCHES = {DPO: pairs_of, KTO: completions_of, ORPO: odds_pairs_of, REWARD: rewarded_pairs_of}


def _dpo(module: nn.Module, example: Example, cast: Cast = None) -> Tensor:
    """Compute DPO's loss, including the tensors of the trainer's metrics."""
    from trl.trainer.dpo_trainer import DPOTrainer

    own = {"ld_alpha": None, "f_divergence_type": "reverse_kl", "use_weighting": False}
    with _trainer(module, example, DPO, cast, loss_types=["sigmoid"], loss_weights=[1.0], **own) as (trainer, inputs):
        return DPOTrainer._compute_loss(trainer, policy_of(module), inputs, False)


def _kto(module: nn.Module, example: Example, cast: Cast = None) -> Tensor:
    """Compute KTO's loss, including the tensors of the trainer's metrics."""
    from trl.trainer.kto_trainer import KTOTrainer

    own = {"calculate_KL": True, "loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0}
    with _trainer(module, example, KTO, cast, **own) as (trainer, inputs):
        trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
        return KTOTrainer._compute_loss(trainer, policy_of(module), inputs, False)


def _reward(module: nn.Module, example: Example, cast: Cast = None) -> Tensor:
    """Compute the loss of a reward model, including the tensors of the trainer's metrics."""
    from trl.trainer.reward_trainer import RewardTrainer

    with _trainer(module, example, REWARD, cast) as (trainer, inputs):
        return RewardTrainer.compute_loss(trainer, policy_of(module), inputs)


def _orpo(module: nn.Module, example: Example, cast: Cast = None) -> Tensor:
    """Compute ORPO's loss, including the tensors of the trainer's metrics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL calls it experimental
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    own = {"is_encoder_decoder": False, "padding_value": 0}
    with _trainer(module, example, ORPO, cast, **own) as (trainer, inputs):
        trainer.concatenated_inputs, trainer.get_batch_logps = ORPOTrainer.concatenated_inputs, ORPOTrainer.get_batch_logps
        trainer.concatenated_forward = partial(ORPOTrainer.concatenated_forward, trainer)
        trainer.odds_ratio_loss = partial(ORPOTrainer.odds_ratio_loss, trainer)
        loss, _ = ORPOTrainer.get_batch_loss_metrics(trainer, policy_of(module), inputs)
        return loss


_LOSSES = {DPO: _dpo, KTO: _kto, ORPO: _orpo, REWARD: _reward}


def loss_under(cast: Cast, objective: str) -> Callable[[nn.Module, Example], Tensor]:
    """Return the loss of a TRL objective; its models enter an autocast context by themselves, if there is one."""
    return partial(_LOSSES[objective], cast=cast)


@contextmanager
def _trainer(
    module: nn.Module, example: Example, objective: str, cast: Cast, **own: Any
) -> Iterator[tuple[SimpleNamespace, dict[str, Any]]]:
    """Yield the trainer attributes that a loss reads, with the defaults of its config and one process, and the batch.

    Within the context the models have the heads that the trainer's constructor adds. They enter the autocast context `cast` by
    themselves, as Accelerate prepares them: the loss is computed outside of it, from outputs in float32.
    """
    policy = policy_of(module)
    reference = reference_in(module)
    inputs = {**example.kwargs, **(example.targets or {})}

    def itself(value: Any) -> Any:
        return value

    device = next(iter(inputs.values())).device
    trainer = SimpleNamespace(
        model=inner(policy),
        ref_model=reference,
        accelerator=SimpleNamespace(device=device, gather=itself, gather_for_metrics=itself, unwrap_model=itself),
        args=SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False}, center_rewards_coefficient=None),
        precompute_ref_logps=bool(example.targets),
        aux_loss_enabled=False,
        beta=0.1,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **own,
    )
    with ExitStack() as stack:
        if objective in _OF_METRICS:
            stack.enter_context(fused_head(base_of(policy), _OF_METRICS[objective]))
        if reference is not None:
            stack.enter_context(fused_head(reference, ("log_probs",)))
        for model in (inner(policy), reference):
            if cast is not None and model is not None:
                within = unfrozen(model, cast) if model is reference else cast
                stack.enter_context(mock.patch.object(model, "forward", prepare_forward(model.forward, within)))
        yield trainer, inputs
