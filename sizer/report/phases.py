"""Names of a step's phases in reports, and the work that is done at each one's end."""

from __future__ import annotations

PHASE_TITLES = {
    "load": "load",
    "rollout": "rollout",
    "reference": "log-probabilities",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "step2": "second step",
    "evaluate": "evaluation",
    "prefill": "prefill",
    "decode": "decode",
}
PHASE_ENDS = {
    "load": "the model is loaded",
    "rollout": "the completions are generated, the cache is freed",
    "reference": "log-probabilities of the completions are computed without gradients",
    "forward": "the loss is computed, activations are kept",
    "backward": "gradients exist, activations are freed",
    "optimizer": "the optimizer has created its state",
    "step2": "one more complete step, the steady state",
    "evaluate": "the batches of an evaluation without gradients have run",
    "prefill": "the prompt is read, the first token is there",
    "decode": "all tokens are there",
    "after": "the call has returned",
}
_INSIDE = {
    "load": "loading",
    "rollout": "generating completions",
    "reference": "computing log-probabilities without gradients",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer step",
    "step2": "the second step",
    "evaluate": "the evaluation",
    "prefill": "reading the prompt",
    "decode": "generating",
}


def inside(phase: str) -> str:
    """Return the text of being in a phase ("the backward pass"); the name itself for unknown phases."""
    return _INSIDE.get(phase, phase)
