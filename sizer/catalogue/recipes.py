"""Training recipes as plain rows: losses, the place of the optimizer step, and the tensors that an evaluation keeps."""

from __future__ import annotations

from dataclasses import dataclass

RECIPE_KEYS = (
    *("loss", "step", "evaluate", "objective", "reference", "group", "rollout", "activations", "optimizer_offload", "autocast"),
    "liger",
)
ACCELERATED = ("objective", "evaluate", "activations", "autocast", "liger")  # settings of trainers that Accelerate prepares
FULL, TORCH, CHUNKED, TRL, LIGER, CCE = "full", "torch", "chunked", "trl", "liger", "cce"
AFTER, IN_BACKWARD = STEPS = ("after", "in_backward")
KEEP, OFFLOAD = ACTIVATIONS = ("keep", "offload")
CHECKPOINT_OFFLOAD = "checkpoint-offload"  # another spelling of OFFLOAD with checkpointing=1
LM, DPO, KTO, ORPO, REWARD, GRPO, CONTRASTIVE = OBJECTIVES = ("lm", "dpo", "kto", "orpo", "reward", "grpo", "contrastive")
_RUN = "run the script: sizer run --gpu h100-80gb -- python train.py"
# Other names for an objective, or for a trainer without a key: the key to use instead.
OTHER_OBJECTIVES = {
    "sft": "ask for objective=lm with loss=trl",
    "rloo": "ask for objective=grpo, with reference=none if beta is 0",
    "ipo": "use objective=dpo: its loss has the same tensors",
    **dict.fromkeys(("gkd", "distillation", "minillm"), f"a teacher model has no key; {_RUN}"),
    **dict.fromkeys(("ppo", "online-dpo", "nash-md", "xpo"), f"models of rewards and values have no key; {_RUN}"),
    **dict.fromkeys(("cpo", "simpo", "prm"), f"this loss has no key; {_RUN}"),
}
WITH_REFERENCE = (DPO, KTO, GRPO)
WITH_LIGER = (LM, *WITH_REFERENCE)  # with other objectives Liger's loss fails or differs; TRL's trainers of these switch it off
NONE, LOSS, LOGITS = "none", "loss", "logits"
MODEL, ADAPTER, PRECOMPUTED, _ = REFERENCES = ("model", "adapter", "precomputed", NONE)
AUTO = "AutoModel()"  # for the class without a head, used for embeddings; the key `head` does not accept this text
TRANSFORMERS, COLOCATED = "transformers", "colocated"  # engines that make completions
GROUP, NEW = 8, 256  # completions for each prompt, tokens of each: TRL's own are 8 and 512
MIN_GROUP, MAX_GROUP = 2, 1024
# Gradient accumulation in a step: a backward pass after each forward pass, whose gradients FSDP2 reduces; the same under
# `no_sync`, so that gradients stay unsharded until the last pass; or one backward pass of the summed losses.
EACH, NO_SYNC, SUMMED = ACCUMULATES = ("each", "no_sync", "summed")
CACHED = 32  # texts of a mini-batch of sentence-transformers' cached loss
# First words of notes on kernels: memory of launched Triton kernels, of their autotuning, of custom operators, and of libraries.
HOLDS, TUNES, INSIDE, WORKSPACES = OF_KERNELS = (
    "memory that Triton kernels hold",
    "the buffers in which Triton autotunes kernels",
    "memory inside the kernel of a custom operator",
    "workspaces of",
)
MAX_CHUNKS, MAX_EVALUATED, MAX_CACHED = 4096, 65_536, 65_536


def workspaces_of(library: str) -> str:
    """Return the note on a library's workspaces."""
    return f"{WORKSPACES} {library}: the code calls it, and only the library knows them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One named value of `loss=`. A library's loss needs `module` of the package `package`."""

    key: str
    title: str
    package: str | None = None
    module: str | None = None


_LOSSES = (
    Loss(key=FULL, title="transformers' own loss, over all logits"),
    Loss(key=TORCH, title="torch.nn.functional.linear_cross_entropy with its default options"),
    Loss(key="trl", title="the loss of TRL's SFTTrainer", package="trl", module="trl"),
    Loss(key=LIGER, title="Liger's fused linear cross-entropy", package="liger-kernel", module="liger_kernel"),
    Loss(key=CCE, title="cut cross-entropy", package="cut-cross-entropy", module="cut_cross_entropy"),
)
LOSSES = {row.key: row for row in _LOSSES}


def is_library(loss: str) -> bool:
    """Return True if a loss is computed by a package that launches Triton kernels."""
    return loss in LOSSES and LOSSES[loss].package is not None


def chunks_of(loss: str) -> int | None:
    """Return the number of chunks of `chunked:N`, None for any other loss."""
    return int(loss.partition(":")[2]) if loss.startswith(f"{CHUNKED}:") else None


def evaluated_batches(evaluate: str) -> int:
    """Return the number of batches of an evaluation: N for `logits:N`, 1 for `loss`, 0 for `none`."""
    kind, _, batches = evaluate.partition(":")
    return int(batches) if kind == LOGITS else int(kind == LOSS)


def is_made_by_trl(objective: str, loss: str) -> bool:
    """Return True if the constructor of one of TRL's trainers, ORPOTrainer's aside, adds an adapter to the model."""
    return objective in (DPO, KTO, REWARD, GRPO) or loss == TRL


def is_contrastive(objective: str) -> bool:
    """Return True if an objective compares texts by their embeddings."""
    return objective.partition(":")[0] == CONTRASTIVE


def cached_texts(objective: str) -> int | None:
    """Return the texts of a mini-batch of `contrastive:N`, whose gradients are cached; None for any other objective."""
    return int(objective.partition(":")[2]) if objective.startswith(f"{CONTRASTIVE}:") else None


def server_share(rollout: str) -> float:
    """Return the share of the device's memory that a server uses next to the trainer: SHARE of `colocated:SHARE`, else 0."""
    kind, _, share = rollout.partition(":")
    return float(share) if kind == COLOCATED else 0.0


def reference_of(objective: str, train: str, reference: str | None) -> str | None:
    """Return where a reference's log-probabilities come from, one of REFERENCES; None for an objective that has no reference."""
    if objective not in WITH_REFERENCE:
        return None
    return reference or (ADAPTER if train == "adapter" else MODEL)
