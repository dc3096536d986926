"""The command that starts the server that a plan is about, with every flag as resolved."""

from __future__ import annotations

import json
import shlex

from sizer.base.units import GIB
from sizer.catalogue.heads import repository_of
from sizer.catalogue.serving import DRAFT_MODEL, EAGLE, EAGLE3
from sizer.serving.flags import Flags
from sizer.serving.groups import BLOCK as COMPRESSED_BLOCK

NO_IMAGES = '{"image": 0, "video": 0, "audio": 0}'


def vllm_command(model: str, flags: Flags, *, quantizes: bool, caches_prefixes: bool = True) -> str:
    """Return `vllm serve` with every flag.

    Args:
        model: The repository or folder of the model.
        flags: The flags of the plan.
        quantizes: True if the weights have another layout than the checkpoint. vLLM quantizes to FP8 on load. Other layouts
            need a checkpoint in that layout.
        caches_prefixes: True if vLLM caches prefixes of the model by default.
    """
    words = [
        *("vllm", "serve", model),
        *("--max-model-len", str(flags.max_model_len)),
        *("--max-num-seqs", str(flags.max_num_seqs)),
        *("--max-num-batched-tokens", str(flags.max_num_batched_tokens)),
    ]
    if flags.kv_bytes is None:
        words += ["--gpu-memory-utilization", f"{flags.util:g}"]
    else:
        words += ["--kv-cache-memory-bytes", str(flags.kv_bytes)]
    for name, value in (
        ("--tensor-parallel-size", flags.tp),
        ("--pipeline-parallel-size", flags.pp),
        ("--data-parallel-size", flags.dp),
        ("--decode-context-parallel-size", flags.dcp),
    ):
        words += [name, str(value)] if value > 1 else []
    words += ["--enable-expert-parallel"] if flags.ep else []
    words += ["--kv-cache-dtype", flags.kv] if flags.kv != "auto" else []
    words += ["--block-size", str(flags.block)] if flags.block == COMPRESSED_BLOCK else []
    if flags.prefix_caching != caches_prefixes:
        words.append("--enable-prefix-caching" if flags.prefix_caching else "--no-enable-prefix-caching")
    if flags.loras:
        words += ["--enable-lora", "--max-loras", str(flags.loras), "--max-lora-rank", str(flags.lora_rank)]
        words += ["--fully-sharded-loras"] if flags.lora_sharded else []
    words += ["--cpu-offload-gb", f"{flags.offload_bytes / GIB:g}"] if flags.offload_bytes else []
    if flags.draft:
        words += ["--speculative-config", _speculative_config(flags)]
    words += ["--limit-mm-per-prompt", NO_IMAGES] if flags.text_alone else []
    words += ["--enforce-eager"] if flags.eager else []
    words += ["--quantization", "fp8"] if quantizes and flags.layout == "fp8" else []
    return shlex.join(words)


def _speculative_config(flags: Flags) -> str:
    """Return the JSON of --speculative-config. HEAD stands for a head whose repository the query does not name."""
    config: dict[str, str | int] = {"method": flags.draft_method, "num_speculative_tokens": flags.draft_tokens}
    if flags.draft_method in (DRAFT_MODEL, EAGLE, EAGLE3):
        config["model"] = repository_of(flags.draft)
    return json.dumps(config)
