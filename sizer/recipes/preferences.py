"""Preference training by TRL's own loss: pairs of completions, and log-probabilities of a reference.

`DPOTrainer._compute_loss` (trl/trainer/dpo_trainer.py, 1.16) runs with a stand-in for its trainer. Re-implemented are the batch,
the reference model and what the trainer's constructor does to the models: no dropout, and a fused LM head.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sizer.architecture.adapters import base_of
from sizer.architecture.blueprint import Blueprint, Example
from sizer.catalogue.recipes import LM, MODEL, PRECOMPUTED
from sizer.errors import BuildError, RequestError
from sizer.recipes.losses import fused_head, is_causal

_OF_METRICS = ("log_probs", "entropy", "mean_logits", "is_top1")  # what DPOTrainer has its policy's head compute


class WithReference(nn.Module):
    """A policy that trains, and a frozen model of the same weights beside it. Called, it is the policy."""

    def __init__(self, policy: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the policy."""
        return self.policy(*args, **kwargs)

    def train(self, mode: bool = True) -> WithReference:
        """Switch the policy alone to training mode."""
        super().train(mode)
        self.reference.eval()
        return self


def policy_of(module: nn.Module) -> nn.Module:
    """Return the model that trains, without the reference beside it."""
    return module.policy if isinstance(module, WithReference) else module


def with_objective(blueprint: Blueprint, objective: str, reference: str | None) -> Blueprint:
    """Return a blueprint whose step is that of an objective.

    Args:
        blueprint: The architecture, a causal language model.
        objective: A value of the key `objective`.
        reference: Where the reference's log-probabilities come from, one of REFERENCES.

    Raises:
        BuildError: The objective's package is not installed.
    """
    if objective == LM:
        return blueprint
    for package in ("trl", "datasets", "accelerate"):
        if find_spec(package) is None:
            raise BuildError(f"{package} is not installed", given=f"objective={objective}", todo="pip install trl")
    limit = blueprint.limit or (lambda module: module)

    def limit_beside_reference(module: nn.Module) -> nn.Module:
        without_dropout(module)
        beside = copy.deepcopy(module) if reference == MODEL else None
        limited = limit(module)
        return limited if beside is None else WithReference(limited, beside)

    def pairs(batch: int, training: bool) -> Example:
        return pairs_of(blueprint.example(2 * batch, training), precomputed=reference == PRECOMPUTED)

    return replace(
        blueprint,
        example=pairs,
        loss=_loss,
        limit=limit_beside_reference,
        describe=lambda module: (*blueprint.describe(policy_of(module)), _TOLD[reference]),
    )


_ASSUMED = "a sample is a pair of sequences, whose first half is the prompt"
_TOLD = {
    MODEL: f"DPO by TRL's loss, beside a frozen reference model of the same weights: {_ASSUMED}",
    "adapter": f"DPO by TRL's loss; the reference is the model without the adapter: {_ASSUMED}",
    PRECOMPUTED: f"DPO by TRL's loss; the reference's log-probabilities were computed before the training: {_ASSUMED}",
}


def check_objective(objective: str, module: nn.Module) -> None:
    """Raise RequestError if an objective compares sequences, and the module is no causal language model."""
    if objective != LM and not is_causal(base_of(module)):
        raise RequestError(
            f"objective: {type(base_of(module)).__name__} has no head of a causal language model",
            given=repr(objective),
            allowed="a class such as LlamaForCausalLM, or objective=lm",
            todo="leave objective out",
        )


def without_dropout(module: nn.Module) -> None:
    """Set the probability of each dropout layer to 0, as TRL's trainers do (disable_dropout_in_model)."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0


def pairs_of(example: Example, *, precomputed: bool) -> Example:
    """Return the batch of DPOTrainer's collator: chosen sequences [pairs, tokens], then rejected ones, with their masks.

    The first half of each sequence is the prompt, the rest the completion, whose tokens alone have log-probabilities.
    """
    ids = example.kwargs["input_ids"]
    completion = torch.zeros_like(ids)
    completion[:, ids.shape[1] // 2 :] = 1
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}
    known = torch.zeros(ids.shape[0] // 2)  # float32, which no cast of inputs reaches among the targets
    return Example(kwargs=kwargs, targets={"ref_chosen_logps": known, "ref_rejected_logps": known.clone()} if precomputed else None)


def _loss(module: nn.Module, example: Example) -> Tensor:
    """Compute DPO's loss with what the trainer's metrics compute beside it."""
    from trl.trainer.dpo_trainer import DPOTrainer

    policy = policy_of(module)
    reference = module.reference if isinstance(module, WithReference) else None
    inputs = {**example.kwargs, **(example.targets or {})}
    trainer = _trainer(policy, reference, precomputed=bool(example.targets), device=inputs["input_ids"].device)
    with ExitStack() as stack:
        stack.enter_context(fused_head(base_of(policy), _OF_METRICS))
        if reference is not None:
            stack.enter_context(fused_head(reference, ("log_probs",)))
        return DPOTrainer._compute_loss(trainer, policy, inputs, False)


def _trainer(policy: nn.Module, reference: nn.Module | None, *, precomputed: bool, device: torch.device) -> SimpleNamespace:
    """Return what `_compute_loss` reads of its trainer, with the defaults of DPOConfig and one process."""

    def itself(value: Any) -> Any:
        return value

    return SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=SimpleNamespace(device=device, gather=itself, gather_for_metrics=itself, unwrap_model=itself),
        args=SimpleNamespace(gradient_checkpointing_kwargs={"use_reentrant": False}),
        precompute_ref_logps=precomputed,
        aux_loss_enabled=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        beta=0.1,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        use_weighting=False,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
