"""The loss of a causal language model by the key `loss`: PyTorch's, torchtune's chunks, or a library's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.frozen_parts import inner
from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import BuildError, Refusal, RequestError
from sizer.catalogue.recipes import CCE, FULL, LIGER, LOSSES, TORCH, TRL, chunks_of

IGNORED = -100  # transformers' label of tokens without a loss
# Changes that some models make to logits after the head (transformers 5.24). A loss that computes its own logits leaves them out.
# TRL's loss applies them to its logits (add_fused_lm_head in trl/trainer/utils.py, 1.16), and the libraries' kernels cap logits.
# States are multiplied instead of logits in two places: Liger's models with such a loss (falcon_h1.py, muse_glimmer.py in
# liger_kernel/transformers/model, 0.8; it has none for Granite), and Axolotl's patches of cut cross-entropy.
_CAP = "final_logit_softcapping"
_BY_LIGER = ("output_multiplier", "lm_head_multiplier")
_SCALES = ("logit_scale", *_BY_LIGER, "logits_scaling")  # in the order of TRL's lookup
_CHANGES = (_CAP, *_SCALES, "logits_soft_cap", "output_logit_soft_cap")  # the last two of RecurrentGemma and xLSTM

_TAKES = {LIGER: (_CAP, *_BY_LIGER), CCE: (_CAP, *_SCALES)}  # changes that losses of libraries are given

LossOf = Callable[[nn.Module, Example], Tensor]


def loss_of(loss: str, blueprint: Blueprint) -> LossOf:
    """Return the function that computes the loss of a module for an example.

    Args:
        loss: A value of the key `loss`.
        blueprint: The architecture, which has the loss for `full`.
    """
    if loss == FULL:
        return blueprint.loss
    return _trl if loss == TRL else _within(_of_states(_STATES.get(loss) or _chunked(chunks_of(loss) or 1)))


def _within(compute: LossOf) -> LossOf:
    """Return a loss that a module computes in its forward pass if the module is one of several ranks.

    DDP and FSDP2 begin and end a pass there; Liger's and Axolotl's models compute their losses there, too.
    """

    def loss(module: nn.Module, example: Example) -> Tensor:
        model = base_of(module)
        if inner(module) is module and not hasattr(module, "set_requires_gradient_sync"):  # FSDP2's
            return compute(model, example)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            return compute(model, Example(args=args, kwargs=kwargs))

        with mock.patch.object(model, "forward", forward):
            return module(*example.args, **example.kwargs)

    return loss


def check_loss(loss: str, module: nn.Module) -> None:
    """Check that a loss can be computed here for a module.

    Raises:
        BuildError: Its package is not installed, or this PyTorch does not have it.
        RequestError: The module has no language model's head, or changes its logits after the head, as the loss does not.
    """
    if loss == FULL:
        return
    row = LOSSES.get(loss)
    if row is not None and row.module is not None and find_spec(row.module) is None:
        raise BuildError(f"{row.package} is not installed", given=f"loss={loss}", todo=f"pip install {row.package}")
    if loss == TORCH and not hasattr(F, "linear_cross_entropy"):
        raise BuildError(
            "the installed PyTorch has no linear_cross_entropy",
            given="loss=torch",
            todo="install PyTorch 2.15, or ask for loss=chunked:8",
        )
    model = base_of(module)
    if not is_causal(model):
        raise RequestError(
            f"loss: {type(model).__name__} has no linear head over hidden states of a causal language model",
            given=repr(loss),
            allowed="a class such as LlamaForCausalLM, or loss=full",
            todo="leave loss out",
        )
    changes = _changes_of(model)
    takes = (FULL, TRL, *(name for name, taken in _TAKES.items() if {*changes} <= {*taken}))
    if changes and loss not in takes:
        raise RequestError(
            f"loss: {type(model).__name__} changes its logits after the head ({', '.join(changes)})",
            given=repr(loss),
            allowed=", ".join(takes),
            todo=f"ask for loss={TRL}",
        )


def vocabulary_of(module: nn.Module) -> int | None:
    """Return the number of logits of a token if the module's loss can be computed without all of them, else None."""
    model = base_of(module)
    return model.config.get_text_config().vocab_size if is_causal(model) else None


def losses_beside(loss: str, vocabulary: int | None) -> Iterator[str]:
    """Yield notes on a loss over all logits of a language model, which not every trainer computes."""
    if vocabulary is not None and loss == FULL:
        yield "the loss is computed from all logits, as by transformers' Trainer; TRL's SFTTrainer computes it in chunks (loss=trl)"


def change_of(module: nn.Module) -> str | None:
    """Return the config's name of a causal language model's change to its logits after the head, None without one."""
    model = base_of(module)
    return next(iter(_changes_of(model)), None) if is_causal(model) else None


def _changes_of(model: nn.Module) -> tuple[str, ...]:
    """Return the config's names of a causal language model's changes to its logits after the head."""
    text = model.config.get_text_config()
    values = {name: getattr(text, name, None) for name in _CHANGES}
    return tuple(name for name, value in values.items() if isinstance(value, int | float) and value != 1)


def _scale_of(model: nn.Module) -> float | None:
    """Return the factor by which a causal language model scales its logits, None without one."""
    text = model.config.get_text_config()
    name = next((name for name in _SCALES if getattr(text, name, None) is not None), None)
    if name is None or (scale := getattr(text, name)) == 1:
        return None
    divides = name == "logits_scaling" and text.model_type != "hyperclovax"
    return 1 / scale if divides else scale


def is_causal(model: nn.Module) -> bool:
    """Return True if a model is a causal language model of transformers with a linear head, which may read pictures, too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    if type(model).__name__ not in NAMES.values() and not (reads_pictures(model) and model.base_model is not model):
        return False
    return isinstance(_head_of(model), nn.Linear)


def reads_pictures(model: nn.Module) -> bool:
    """Return True if a model of transformers reads pictures and text in one sequence, such as LlavaForConditionalGeneration."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    config = getattr(model, "config", None)
    return type(model).__name__ in NAMES.values() and not getattr(config, "is_encoder_decoder", False)


def _head_of(model: nn.Module) -> nn.Module:
    """Return the head of a causal language model: the copy that trains if PEFT has made one (`modules_to_save`)."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


def _of_states(compute: Callable[..., Tensor]) -> LossOf:
    """Return a loss from the head, the backbone's last hidden states [batch, tokens, H] and labels [batch, tokens].

    States are multiplied by the scale of the logits, and `compute` also gets their cap, if the model has them: `check_loss`
    only allows that for the losses of _TAKES.
    """

    def loss(model: nn.Module, example: Example) -> Tensor:
        inputs = {name: value for name, value in example.kwargs.items() if name != "labels"}
        states = model.base_model(*example.args, **inputs | {"use_cache": False}).last_hidden_state
        if (scale := _scale_of(model)) is not None:
            states = states * scale
        head, labels = _head_of(model), example.kwargs["labels"]
        if states.dtype == torch.float32 and head.weight.itemsize == 2 and not torch.is_autocast_enabled("cuda"):
            states = states.to(head.weight.dtype)  # as in models with float32 residuals before their head (Mamba)
        cap = getattr(model.config.get_text_config(), _CAP, None)
        return compute(head, states, labels) if cap is None else compute(head, states, labels, cap)

    return loss


def _chunked(number: int) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """Return torchtune's loss over chunks of tokens (modules/loss/ce_chunked_output_loss.py, 0.6.1)."""

    def loss(head: nn.Module, states: Tensor, labels: Tensor) -> Tensor:
        labels = torch.hstack((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)))
        logits = [head(part) for part in states.chunk(number, dim=1)]
        count = (labels != IGNORED).sum()
        targets = [part.reshape(-1) for part in labels.chunk(number, dim=1)]
        logits = [part.reshape(-1, part.size(-1)) for part in logits]
        total: Any = 0.0
        for part, target in zip(logits, targets, strict=True):
            total = total + F.cross_entropy(part.float(), target, ignore_index=IGNORED, reduction="sum")
        return total / count

    return loss


def _torch(head: nn.Module, states: Tensor, labels: Tensor) -> Tensor:
    states = states[:, :-1].reshape(-1, states.shape[-1])
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(states, head.weight, labels[:, 1:].reshape(-1), options=options)


def _liger(head: nn.Module, states: Tensor, labels: Tensor, cap: float | None = None) -> Tensor:
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    found = LigerForCausalLMLoss(states, head.weight, labels, states.shape[-1], final_logit_softcapping=cap)
    return found[0] if isinstance(found, tuple) else found


def _cce(head: nn.Module, states: Tensor, labels: Tensor, cap: float | None = None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    if states.dtype == torch.float32:  # cce_backward_kernel asserts the dtype (cce_backward.py, 25.1)
        refusal = Refusal(
            key="loss",
            given=f"{CCE!r} with hidden states in float32",
            allowed="hidden states in bfloat16 or float16: its backward pass supports no other dtype",
            todo=f"ask for dtype=bfloat16, for prepare=0 if weights are quantized, or for loss={TRL}",
        )
        raise RequestError(refusals=[refusal])
    return linear_cross_entropy(states, head.weight, labels, softcap=cap, shift=1)


_STATES = {TORCH: _torch, LIGER: _liger, CCE: _cce}


def _trl(module: nn.Module, example: Example) -> Tensor:
    """Compute the loss of SFTTrainer.compute_loss, including the tensors of its metrics (trl/trainer/sft_trainer.py, 1.16)."""
    with fused_head(base_of(module), ("log_probs", "entropy", "is_top1")):
        outputs = module(**example.kwargs, fused_lm_head=True)
    return (-outputs.log_probs).sum() / outputs.label_mask.sum().clamp(min=1)


def prepare_forward(forward: Callable[..., Any], cast: Callable[[], AbstractContextManager]) -> Callable[..., Any]:
    """Return a model's forward function as Accelerate prepares it: under autocast, with float32 outputs (prepare_model, 1.15)."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    @functools.wraps(forward)  # transformers' generate reads its signature
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with cast():
            return forward(*args, **kwargs)

    return convert_outputs_to_fp32(under_autocast)


def unfrozen(model: nn.Module, cast: Callable[[], AbstractContextManager]) -> Callable[[], AbstractContextManager]:
    """Return a function like `cast`; within its context the weights of a frozen model require gradients.

    TRL does not freeze a reference, so autocast keeps the casts of its weights until the end of a forward pass (can_try_cache
    in ATen/autocast_mode.cpp, 2.15).
    """

    @contextmanager
    def within() -> Iterator[None]:
        parameters = [one for one in model.parameters() if one.is_floating_point() and not one.requires_grad]
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            with cast():
                yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    return within


@contextmanager
def fused_head(model: nn.Module, outputs: tuple[str, ...]) -> Iterator[None]:
    """Let a model's forward pass compute log-probabilities in chunks by TRL's add_fused_lm_head, within the context."""
    from trl.trainer.utils import add_fused_lm_head

    forward = vars(model).get("forward")
    add_fused_lm_head(model, outputs=outputs)
    try:
        yield
    finally:
        if forward is None:
            del model.forward
        else:
            model.forward = forward
