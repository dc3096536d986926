"""Group-relative policy optimization by TRL's own trainer: completions, advantages, the loss.

Source: trl/trainer/grpo_trainer.py, 1.16.

`_prepare_inputs`, `_generate_and_score_completions` and `_compute_loss` of GRPOTrainer run, without its constructor. These
parts are re-implemented:

- the branch of `_generate_single_turn` that calls transformers;
- rewards, as from a Python function;
- log-probabilities from a server;
- the changes by the constructor and Accelerate to the forward functions of models.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.frozen_parts import inner
from sizer.architecture.greedy_generation import OnToken, generate
from sizer.architecture.peft_adapters import base_of
from sizer.catalogue.recipes import TRANSFORMERS
from sizer.recipes.losses import fused_head, prepare_forward, unfrozen
from sizer.recipes.preferences import balances_experts

BETA = 0.04  # weight of a reference; any value other than 0 takes the same memory
PADDING, END, WORD = 0, 1, 2  # tokens of completions; no completion ends early


class GroupSteps:
    """Steps of GRPO: each makes completions, scores them, and computes the loss of their tokens.

    Args:
        policy: The model that trains, on its device.
        reference: The frozen reference model, None if there is none.
        example: The result of `sizer.recipes.preferences.prompts_of`.
        group: The number of completions for each prompt.
        new: The number of tokens of a completion.
        passes: The number of accumulated passes, each with as many completions as the example, which are made at once.
        by: A value of the key `rollout`: transformers' generate, or a server with a share of the device.
        compares: Whether the loss compares with a reference; TRL's beta is 0 if not.
        cast: A function that returns the autocast context within which Accelerate calls the models; None if there is none.
        on_token: Called for each token of a rollout, as in `sizer.architecture.greedy_generation.generate`.
    """

    def __init__(
        self,
        policy: nn.Module,
        reference: nn.Module | None,
        example: Example,
        group: int,
        new: int,
        *,
        passes: int,
        by: str,
        compares: bool,
        cast: Callable[[], AbstractContextManager] | None,
        on_token: OnToken,
    ) -> None:
        self._hooks = ExitStack()
        self._hooks.enter_context(fused_head(base_of(policy), ("log_probs", "entropy")))
        if reference is not None:
            self._hooks.enter_context(fused_head(reference, ("log_probs",)))
        for model in (inner(policy), reference):
            if model is not None and cast is not None:
                within = unfrozen(model, cast) if model is reference else cast
                self._hooks.enter_context(mock.patch.object(model, "forward", prepare_forward(model.forward, within)))
        prompts = example.kwargs["prompts"]
        self._prompts, self._new, self._on_token = passes * prompts, new, on_token
        self._generates = by == TRANSFORMERS
        self._ended: Callable[[], None] = lambda: None
        own = {
            "model": inner(policy),
            "ref_model": reference,
            "num_generations": group,
            "num_generations_eval": group,
            "max_completion_length": new,
            "use_vllm": not self._generates,
            "beta": BETA if compares else 0.0,
            "rollout_func": self._complete,
            "steps_per_generation": passes,
            "gradient_accumulation_steps": passes,
            "current_gradient_accumulation_steps": passes,
            "per_device_train_batch_size": len(prompts),
        }
        self._trainer = _make_trainer(next(policy.parameters()).device, base_of(policy).config.get_text_config(), own)
        self._policy = policy

    def prepare(self, number: int, ended: Callable[[], None]) -> Example:
        """Return the inputs of the loss of a pass: completions, log-probabilities without gradients and advantages.

        Args:
            number: That of the pass of a step, from 1. The first makes the completions of all.
            ended: Called when the completions exist, if transformers generates them.
        """
        self._ended = ended
        self._trainer._step = number - 1
        with mock.patch("trl.trainer.grpo_trainer.gather_object", lambda objects: objects):  # gathers from one process
            return Example(kwargs=self._trainer._prepare_inputs([{"prompt": ""} for _ in self._prompts]))

    def loss(self, module: nn.Module, example: Example) -> Tensor:
        """Compute the loss of completions, including the tensors of the trainer's metrics."""
        return self._trainer._compute_loss(self._policy, example.kwargs)

    def close(self) -> None:
        """Give the models their forward functions back."""
        self._hooks.close()

    def _complete(self, texts: list[str], trainer: Any) -> dict[str, Any]:
        """Return prompts and completions as lists of tokens, with a server's log-probabilities."""
        logprobs = None if self._generates else [[0.0] * self._new for _ in texts]
        if self._generates:
            self._generate(trainer)
            self._ended()
        return {"prompt_ids": self._prompts, "completion_ids": [[WORD] * self._new for _ in texts], "logprobs": logprobs}

    def _generate(self, trainer: Any) -> None:
        """Generate completions as the last branch of `_generate_single_turn` does, and find their ends."""
        from trl.models.utils import disable_gradient_checkpointing
        from trl.trainer.utils import pad

        device, new = trainer.accelerator.device, self._new
        tensors = [torch.tensor(ids) for ids in self._prompts]
        padded = pad(tensors, padding_value=PADDING, padding_side="left")
        mask = pad([torch.ones_like(one) for one in tensors], padding_value=0, padding_side="left")
        inputs = {"input_ids": padded.to(device), "attention_mask": mask.to(device)}
        model = base_of(trainer.model)
        with disable_gradient_checkpointing(model, trainer.args.gradient_checkpointing_kwargs), torch.no_grad():
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": [END]}
            tokens = generate(
                model, Example(kwargs=inputs), new=new, cache="dynamic", on_token=self._on_token, options=options
            )
        completions = tokens[:, inputs["input_ids"].size(1) :]
        if completions.size(1) < new:  # a trace that skips steps that repeat others
            completions = completions[:, -1:].expand(-1, new)
        is_eos = torch.isin(completions, torch.tensor([END], device=device))
        ends = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long, device=device)
        ends[is_eos.any(dim=1)] = is_eos.int().argmax(dim=1)[is_eos.any(dim=1)]
        indices = torch.arange(is_eos.size(1), device=device).expand(is_eos.size(0), -1)
        kept = (indices <= ends.unsqueeze(1)).int()
        completions.cpu(), kept.bool().cpu()  # TRL converts them to lists there


def _make_trainer(device: torch.device, config: Any, own: dict[str, Any]) -> Any:
    """Return a GRPOTrainer of one process with the attributes that its steps read, with the defaults of GRPOConfig.

    Args:
        device: The policy's device.
        config: The policy's text config.
        own: Attributes that differ from the defaults, by name.
    """
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    class Trainer(GRPOTrainer):
        """GRPOTrainer without its constructor."""

        def __init__(self, **own: Any) -> None:
            self.__dict__.update(own)

        def _calculate_rewards(self, inputs: list, *others: Any) -> Tensor:
            return torch.zeros(len(inputs), 1, device=self.accelerator.device)

    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    args = defaults | own | {
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "pad_to_multiple_of": None,  # the value of "auto" on CUDA
        "report_to": [],
    }  # fmt: skip
    balance = getattr(config, "router_aux_loss_coef", 0.0)

    def itself(value: Any, **others: Any) -> Any:
        return value

    accelerator = SimpleNamespace(
        device=device,
        gather=itself,
        gather_for_metrics=itself,
        reduce=itself,
        unwrap_model=inner,
        autocast=nullcontext,  # the models' forward functions have it
        num_processes=1,
        process_index=0,
        is_main_process=True,
        sync_gradients=True,
    )
    return Trainer(
        **args
        | {
            "args": SimpleNamespace(**args),
            "accelerator": accelerator,
            "state": SimpleNamespace(num_input_tokens_seen=0, global_step=0),
            "processing_class": SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
            "_tokenizer": SimpleNamespace(pad_token_id=PADDING),
            "eos_token_ids": [END],
            "epsilon_low": args["epsilon"],
            "epsilon_high": args["epsilon_high"] or args["epsilon"],
            "reward_weights": torch.ones(1, device="cpu"),
            "reward_func_names": ["reward"],
            "router_aux_loss_coef": balance,
            "aux_loss_enabled": balances_experts(config),
            "environment_factories": None,
            "environments": None,
            "tools": None,
            "_is_vlm": False,
            "_entropy_bonus_enabled": False,
            "_last_loaded_step": 0,
            "_step": 0,
            "_buffered_inputs": None,
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
            "_logs": {**{name: [] for name in ("prompt", "completion", "advantages")}, "rewards": defaultdict(list)},
            "_pending_extra_logs": {},
            "_pending_metrics": {},
        }
    )
