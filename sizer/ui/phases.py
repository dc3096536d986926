"""What the page calls the phases of a step, and what has happened at each one's end."""

from __future__ import annotations

PHASE_TITLES = {
    "load": "load",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "step2": "second step",
}
PHASE_ENDS = {
    "load": "the model is on the device",
    "forward": "the loss is computed, activations are kept",
    "backward": "gradients are there, activations are gone",
    "optimizer": "the optimizer has made its state",
    "step2": "one more whole step, the steady state",
}
