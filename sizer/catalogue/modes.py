"""The modes (training, inference, ...) with their phases and names, the tasks of the form, and the modes of torch.compile."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING_KEYS = ("optimizer", "optimizer_impl", "checkpointing")
GENERATION_KEYS = ("new", "cache")
# The fields of a request for the start of a server.
SERVER_FIELDS = (
    *("engine", "engine_version", "util", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv", "dp", "ep"),
    *("server_weights", "enforce_eager", "api", "sampler", "prefix_caching", "kv_bytes", "used", "outside", "graphs", "want"),
    *("max_loras", "max_lora_rank", "fully_sharded_loras", "cpu_offload_gb", "dcp", "speculative", "gpu_layers", "cpu_moe"),
    *("fa", "attn_dp", "pool"),
)
OFFLOADED = ("offloaded", "offloaded_static")  # caches on the host, except the current layer's
QUANTIZED = "quantized"  # a 4-bit cache, except the last tokens
FREED, KEPT = OUTPUTS = ("freed", "kept")  # whether a training loop keeps the model's outputs during the backward pass
ALL, TEXT = INPUTS = ("all", "text")  # inputs of a model that reads images or sound: all its modalities, or only text
QUANTO = "optimum-quanto"  # the package that quantizes the cache, transformers' default


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One value of `mode=`. `phases` are marked in this order.

    - `trains`: there are gradients and an optimizer. `generates`: tokens are generated one by one after a prompt. `serves`: a
      server's scheduler is planned and no step is traced.
    - `title`: the name of the work. `headline`: the text before the model ("Training ResNet-50"), or before the tokens of a
      generation.
    - `unused`: keys of the query without effect in this mode.
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
        """Return the phase that begins when one has ended; the last phase continues."""
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
        unused=(*TRAINING_KEYS, *GENERATION_KEYS, "attention", "expandable", "cudnn_benchmark"),
    ),
)

MODES: dict[str, Mode] = {row.key: row for row in _ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: its mode, and the values of `train` that it offers (empty if the mode trains nothing)."""

    key: str
    title: str
    mode: str
    trains: tuple[str, ...] = ()


_TASK_ROWS = (
    Task(key="training", title="Training", mode="training", trains=("all",)),
    Task(key="fine-tuning", title="Fine-tuning", mode="training", trains=("adapter", "without-tower", "head")),
    Task(key="generate", title="Generation", mode="generate"),
    Task(key="serve", title="Serving", mode="serve"),
    Task(key="inference", title="Inference", mode="inference"),
)
_NAMED = {row.mode for row in _TASK_ROWS}
TASKS: dict[str, Task] = {
    row.key: row
    for row in (
        *(row for row in _TASK_ROWS if row.mode in MODES),
        *(Task(key=mode.key, title=mode.title, mode=mode.key) for mode in MODES.values() if mode.key not in _NAMED),
    )
}


def task_of(mode: str, train: str) -> str:
    """Return the key of the task of a mode and of the trained part."""
    rows = [row for row in TASKS.values() if row.mode == mode]
    return next((row.key for row in rows if train in row.trains), rows[0].key)


DEFAULT, REDUCE_OVERHEAD = COMPILE_MODES = ("default", "reduce-overhead")  # the second records CUDA graphs
BLOCKS, MODEL = SCOPES = ("blocks", "model")  # each repeated block is compiled, or the whole model
