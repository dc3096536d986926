"""The modes: what is done with a model, each with its phases and the words for it."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING_KEYS = ("optimizer", "optimizer_impl", "checkpointing")
GENERATION_KEYS = ("new", "cache")
# The fields of a request that say how a server is started.
SERVER_FIELDS = (
    *("engine", "engine_version", "util", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv", "dp", "ep"),
    *("server_weights", "enforce_eager", "api", "sampler", "prefix_caching", "kv_bytes", "used", "outside", "graphs", "want"),
    *("max_loras", "max_lora_rank", "fully_sharded_loras", "cpu_offload_gb", "dcp"),
)
OFFLOADED = ("offloaded", "offloaded_static")  # caches on the host but for the layer that is at work
QUANTIZED = "quantized"  # a cache in 4 bits but for the last tokens
FREED, KEPT = OUTPUTS = ("freed", "kept")  # what a training loop does with the model's outputs during the backward pass
ALL, TEXT = INPUTS = ("all", "text")  # what a model that reads images or sound is given: all that it reads, or text alone
QUANTO = "optimum-quanto"  # the package that quantises it, which transformers takes where no other is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One value of `mode=`.

    `phases` are marked in this order. `trains` says whether there are gradients and an optimizer, `generates` whether tokens
    are made one by one after a prompt, `serves` whether a server's scheduler is planned and no step is traced. `title` names the
    work alone, `headline` before the model ("Training ResNet-50"), or before the tokens of a generation. `unused` are the keys of
    the query that change nothing in this mode.
    """

    key: str
    title: str
    headline: str
    trains: bool
    phases: tuple[str, ...]
    generates: bool = False
    serves: bool = False
    unused: tuple[str, ...] = ()

    def phase_after(self, phase: str) -> str:
        """The phase that begins when one has ended; the last one goes on."""
        if phase not in self.phases:  # an evaluation after the steps
            return phase
        place = self.phases.index(phase) + 1
        return self.phases[min(place, len(self.phases) - 1)]


_ROWS = (
    Mode(
        key="training",
        title="Training",
        headline="Training",
        trains=True,
        phases=("load", "forward", "backward", "optimizer", "step2"),
        unused=GENERATION_KEYS,
    ),
    Mode(
        key="inference",
        title="Inference",
        headline="Inference with",
        trains=False,
        phases=("load", "forward", "step2"),
        unused=(*TRAINING_KEYS, *GENERATION_KEYS),
    ),
    Mode(
        key="generate",
        title="Generation",
        headline="Generating",
        trains=False,
        phases=("load", "prefill", "decode"),
        generates=True,
        unused=TRAINING_KEYS,
    ),
    Mode(
        key="serve",
        title="Serving",
        headline="Serving",
        trains=False,
        phases=("load",),
        serves=True,
        unused=(*TRAINING_KEYS, *GENERATION_KEYS),
    ),
)

MODES: dict[str, Mode] = {row.key: row for row in _ROWS}
