"""The published startup logs with recorded errors, as tables of docs/serving.md. No torch: tests.serving.logs records them."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from sizer.base.units import format_bytes
from sizer.serving.plan import COMPRESSED_BAND, DENSE_BAND, OTHER_BAND, VISION_BAND
from sizer.serving.rules import RULES, SGLANG_RULES

ROWS = Path(__file__).parent.parent / "measured/published/serving.csv"
LLAMA_LOGS = ROWS.with_name("llama_cpp_logs.csv")
ERRORS = ("weights_off", "tokens_off", "planned_off")  # columns, in percent
TITLES = {
    "weights_off": "weights",
    "planned_off": "KV tokens from the log's own memory",
    "alone_off": "KV tokens from GPU and flags alone",
    "tokens_off": "KV tokens end to end",
}
WORDS = {
    "util": "share of the memory",
    "sampler": "path of the sampler in the profile run",
    "graphs_in_budget": "CUDA graphs are part of the budget",
    "padding": "a group has as many layers as the commonest kind if that is less than so many times the rarest",
    "batches_in_flight": "steps that a sliding window keeps",
    "tokens_of_requests": "KV tokens in the log are those of whole requests",
    "large_seqs": "requests in a step on a large device",
    "largest_graph": "tokens of the largest CUDA graph on a data center's Blackwell; 512 on other devices",
    "step_graph": "a step of the most tokens has a graph if it is not larger than the largest",
    "decode_graphs": "further graphs of decoding: of all numbers of requests with drafted tokens, of max_num_seqs",
    "item_floor": "by default a step holds a whole video of Gemma 4 (12B, 26B-A4B, 31B): 2,496 tokens",
    "huge_tokens": "devices from 160 GiB on take 16,384 tokens in a step",
    "float_rotations": "encoders of images rotate copies of queries and keys in float32",
    "outside_bytes": "outside PyTorch",
    "outside_ranks_bytes": "outside PyTorch with several ranks, more",
    "graph_bytes": "a CUDA graph, for each layer and captured size",
    "second_runner": "models that the second model runner runs",
    "second_sampler": "path of its sampler in the profile run",
    "second_graphs": "it estimates CUDA graphs before the cache is sized",
    "shared_keys": "layers of Gemma that use the cache of others have keys and values",
    "offloads_tower": "an encoder of images goes to the host first, with cpu_offload_gb",
    "chunked": "layers that attend within chunks keep these alone (Llama 4)",
    "packing": "how pages of several sizes share a block (DeepSeek V4)",
    "weighted_groups": "KV tokens in the log weigh groups by their pages (DeepSeek V4)",
    "idle_block": "a block is held back from requests when the server checks that one fits",
    "lora_least_rank": "least max_lora_rank",
    "lora_vocabularies": "models whose embedding and logits have slots of adapters, beside those of Llama and the like",
    "lora_vocabulary": "tokens that an adapter may add",
    "lora_tied_twice": "the tied embedding of Qwen3 has slots of adapters twice",
    "lora_experts": "experts have slots of adapters",
    "lora_joined_experts": "gate and up of gpt-oss, Qwen3-VL and Qwen3.5 share a slot",
    "state_prefixes": "prefixes of models with attention and states are cached by default",
    "state_checkpoints": "layers of which prefixes keep one state more",
    "second_drafts": "methods of speculative decoding of the second model runner",
    "second_stages": "EAGLE-3 runs there in a pipeline, too",
    "rejection": "what the first model runner's profile run verifies",
    "drafted_sizes": "graphs cover the drafted tokens of all requests",
    "shared_head": "layers for multi-token prediction use the model's head",
    "draft_buffers": "buffers of a draft reduce the cache",
    "lora_graphs": "graphs of a captured size with adapters",
    "second_lora_graphs": "the same of the second model runner",
    "benchmarks": "compiling tries kernels on tensors of their arguments' sizes",
}
SGLANG_WORDS = {
    "share": "the static share follows from",
    "small_tokens": "tokens of a chunk on a device of 20 to 35 GiB",
    "small_batch": "requests of the largest graph on such a device",
    "small_batch_ranks": "the same from 4 tensor-parallel ranks on",
    "batch_capped": "max_running_requests bounds the largest graph",
    "eager_decode": "decoding without graphs reserves for them",
    "eager_prefill": "prefills without graphs reserve for them",
    "prefill_graphs": "prefills have graphs, which are reserved for",
    "prefill_stages": "pipelines have graphs of prefills",
    "prefill_latent": "models with MLA have graphs of prefills",
    "prefill_capped": "max_model_len bounds graphs of prefills",
    "windowed": "types of models whose sliding windows have a pool of their own",
    "draft_mib": "MiB that speculative decoding reserves, except with ngram and draft models",
    "draft_model_mib": "MiB that a draft model reserves",
    "draft_in_share": "weights and layers of a draft are in the static share",
    "draft_headroom": "the pool has room for drafted tokens in addition",
    "draft_prefills": "prefills have graphs with speculative decoding",
    "bounds_full": "max_total_tokens bounds the tokens of full attention, else those before windows get a pool",
    "draft_windows": "layers of a draft that count in a pool with windows",
    "padded_states": "states that pad the pool",
    "images_share": "factor of the share of a model that reads images, 0 by the size of its encoder",
    "images_always": "this factor applies to a requested share, too",
    "aiter_share": "factor of the share with AITER's attention on AMD and more than 8,192 tokens",
    "paged_windows": "types of models without a pool of windows on a data center's Blackwell",
    "state_limit": "states without prefix caching and max_running_requests, 0 by the memory",
    "uncached_states": "types of models with states that cache no prefixes",
    "states_of_request": "states of a running request with prefix caching",
    "buffered_states": "types of models that keep two more",
    "loaded_bytes": "in addition to the loaded weights",
}


def read_cells() -> list[dict[str, str]]:
    """Return the rows of the logs as text."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(engine: str) -> Iterator[str]:
    """Yield the logs of an engine as lines of a table: the errors in percent, source and reason."""
    names = ERRORS if engine == "vllm" else ("weights_off", "alone_off", "tokens_off", "planned_off")
    titles = ("weights", "KV tokens", "from the log's memory")
    if engine == "sglang":
        titles = ("weights", "KV tokens from GPU and flags", "with the log's free memory", "from the log's cache")
    columns = ("model", "version", "device", *titles, "source", "why")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for cells in read_cells():
        if cells["engine"] != engine:
            continue
        ranks = "" if cells["tp"] == "1" else f" × {cells['tp']}"
        device = f"{cells['gpu'] or 'not said'}{ranks}"
        source = f"[log]({cells['source']})" if cells["source"].startswith("https") else f"`{cells['source'][6:]}`"
        shown = [f"{float(cells[name]) + 0.0:.2f} %" if cells[name] else "" for name in names]
        yield f"| {' | '.join([cells['model'], cells['version'], device, *shown, source, cells['reason']])} |"


def summary() -> Iterator[str]:
    """Yield the median and the worst error of each kind, in percent."""
    yield "| server | error of | logs | median | worst |"
    yield "|---|---|---|---|---|"
    for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        rows = [cells for cells in read_cells() if cells["engine"] == engine]
        for name, words in TITLES.items():
            if engine == "sglang" and name == "tokens_off":
                words = "KV tokens with the log's free memory"
            known = [abs(float(cells[name])) for cells in rows if cells[name]]
            if known:
                yield f"| {title} | {words} | {len(known)} | {median(known):.2f} % | {max(known):.1f} % |"
    for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        inside = [cells["inside"] for cells in read_cells() if cells["inside"] and cells["engine"] == engine]
        yield f"| {title} | KV tokens inside the range | {len(inside)} | {inside.count('1')} inside | |"


def bands() -> Iterator[str]:
    """Yield how far the cache may be off, by what is not exact."""
    for size, words in (
        (DENSE_BAND, "a dense model on one card, graphs outside the budget"),
        (OTHER_BAND, "graphs inside the budget, experts, several ranks, or an encoder of images that is counted"),
        (VISION_BAND, "a model with another encoder of images or sound"),
        (COMPRESSED_BAND, "DeepSeek V4"),
    ):
        yield f"- ±{format_bytes(size)}: {words}."


def rules(engine: str) -> Iterator[str]:
    """Yield the rules of an engine by version."""
    yield "| rule | from | value | source |"
    yield "|---|---|---|---|"
    words, rows = (WORDS, RULES) if engine == "vllm" else (SGLANG_WORDS, SGLANG_RULES)
    for rule in rows:
        value = format_bytes(rule.value) if rule.name.endswith("_bytes") else _shown(rule.value)
        yield f"| {words[rule.name]} | {'.'.join(map(str, rule.since))} | {value} | {rule.source} |"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


LLAMA = Path(__file__).parent.parent / "measured/llama_cpp"


def _read_llama(name: str) -> list[dict[str, str]]:
    with (LLAMA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_llama_logs() -> list[dict[str, str]]:
    """Return the published logs of llama.cpp."""
    with LLAMA_LOGS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def llama_logs() -> Iterator[str]:
    """Yield the logs of llama.cpp as lines of a table: the errors in percent, source and reason."""
    yield "| model | version | device | file | weights | cells and states | compute buffer | source | why |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for cells in read_llama_logs():
        words = " ".join(cells["source"].removeprefix("file: ").split())
        source = f"[log]({words})" if words.startswith("https") else f"`{words}`"
        shown = [f"{float(cells[name]) + 0.0:.2f} %" if cells[name] else "" for name in ("weights_off", "cache_off", "compute_off")]
        named = (cells["model"], cells["version"], cells["device"], cells["file_type"].upper())
        yield f"| {' | '.join([*named, *shown, source, cells['reason']])} |"


def llama_files() -> Iterator[str]:
    """Yield a table of what was compared with llama.cpp's own programs; tests/serving/test_llama_cpp.py compares each row."""
    files, memory = _read_llama("files.csv"), _read_llama("memory.csv")
    models, kinds = (len({row[key] for row in files}) for key in ("model", "file_type"))
    most = {row["model"]: max(int(one["layers"]) for one in memory if one["model"] == row["model"]) for row in memory}
    whole: list[float] = []
    split: list[float] = []
    for row in memory:
        moved = int(row["layers"]) < most[row["model"]] or row["host_experts"] != "0"
        (split if moved else whole).append((int(row["estimated_bytes"]) / int(row["compute_bytes"]) - 1) * 100)
    yield "| figure | llama.cpp's program | result |"
    yield "|---|---|---|"
    each, all_files, all_memory = f"{kinds} types of {models} models", f"{len(files):,}", len(memory)
    yield f"| bytes of the file, {each} | `llama-quantize --dry-run` | {all_files} of {all_files} equal |"
    remote = "`llama-fit-params` with a remote device"
    yield f"| cells and states, {len(most)} models | {remote} | {all_memory} of {all_memory} equal |"
    yield "| weights on the device | the same | equal, except for 24 kB of alignment at most |"
    several = [(int(row["estimated_bytes"]) / int(row["compute_bytes"]) - 1) * 100 for row in _read_llama("devices.csv")]
    for name, offs in (
        ("all layers on the device", whole),
        ("layers or experts on the host", split),
        ("each of two or three devices", several),
    ):
        equal = sum(abs(one) < 0.01 for one in offs)
        result = f"{equal} of {len(offs)} within 0.01 %, median {median(offs):+.1f} %, from {min(offs):+.0f} to {max(offs):+.0f} %"
        yield f"| compute buffer, {name} | the same | {result.replace('-', '−')} |"
