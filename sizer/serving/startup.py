"""A server's startup log or error as figures, and how they differ from the plan for the same flags.

Read: vLLM 0.8 to 0.33 and SGLang 0.4 to 0.5, as they print it; colours, process names and wrapped lines do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sizer.base.errors import RequestError
from sizer.base.units import GIB
from sizer.catalogue.serving import ENGINES
from sizer.report.served import Served

MAX_CHARACTERS = 4_000_000
LARGE_SHARE, LARGE_GIB = 0.02, 0.5  # from here on a difference is given a cause

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)"

# Of each figure the texts that hold it, the newest wording first. What may repeat is bounded: a stranger's text is searched.
_VLLM: dict[str, tuple[str, ...]] = {
    "engine_version": (r"LLM engine \(v([0-9][0-9.]*)", r"vLLM API server version v?([0-9][0-9.]*)"),
    "model": (r"engine \(v[^)]{0,40}\) with config:.{0,40}?model='([^']{1,300})'", r"'model(?:_tag)?': '([^']{1,300})'"),
    "max_model_len": (r"max_seq_len=([0-9]+)", r"Using max model len ([0-9]+)", r"'max_model_len': ([0-9]+)"),
    "tp": (r"tensor_parallel_size=([0-9]+)",),
    "pp": (r"pipeline_parallel_size=([0-9]+)",),
    "dp": (r"data_parallel_size=([0-9]+)",),
    "layout": (r"quantization=([\w-]+)",),
    "enforce_eager": (r"enforce_eager=(True|False)",),
    "kv": (r"kv_cache_dtype=([\w.]+)",),
    "max_num_batched_tokens": (r"max_num_batched_tokens'?[=:] ?([0-9]+)",),
    "max_num_seqs": (r"max_num_seqs'?[=:] ?([0-9]+)", r"warming up sampler with ([0-9]+) dummy requests"),
    "util": (
        r"'gpu_memory_utilization': ([0-9.]+)",
        r"gpu-memory-utilization[= ]([0-9.]+)",
        r"memory utilization \(([0-9.]+),",
    ),
    "weights_gib": (
        r"(?:Model loading|Loading model weights) took ([0-9.]+) Gi?B",
        r"model weights take ([0-9.]+)GiB",
    ),
    "cache_gib": (r"Available KV cache memory: (-?[0-9.]+) GiB", r"reserved for KV Cache is (-?[0-9.]+)GiB"),
    "kv_tokens": (rf"(?:GPU )?KV cache size: {_NUMBER} tokens",),
    "requests_at_once": (r"Maximum concurrency for [0-9,]+ tokens per request: ([0-9.]+)x",),
    "graphs_gib": (
        r"Graph capturing finished in [0-9]+ secs, took (-?[0-9.]+) GiB",
        r"Estimated CUDA graph memory: (-?[0-9.]+) GiB",
    ),
    "sampler": (r"(Using FlashInfer for top-p)", r"(FlashInfer is not available)"),
    "needed_gib": (r"\(([0-9.]+) GiB KV\s+cache is needed",),
    "available_gib": (r"available KV cache\s+memory \((-?[0-9.]+) GiB\)",),
    "longest": (r"estimated maximum model length is ([0-9]+)",),
    "free_gib": (r"Free memory on device[^(]{0,40}\(([0-9.]+)/[0-9.]+ GiB\)",),
    "total_gib": (r"Free memory on device[^(]{0,40}\([0-9.]+/([0-9.]+) GiB\)",),
    "share_gib": (r"memory utilization (?:is )?\([0-9.]+, ([0-9.]+) GiB\)",),
}
_SGLANG: dict[str, tuple[str, ...]] = {
    "model": (r"model_path='([^']{1,300})'",),
    "max_model_len": (r"context_len=([0-9]+)",),
    "tp": (r"tp_size=([0-9]+)",),
    "util": (r"mem_fraction_static=([0-9.]+)",),
    "max_num_batched_tokens": (r"chunked_prefill_size=([0-9]+)",),
    "weights_gib": (r"Load weight end\..{0,300}?mem usage=([0-9.]+) GB",),
    "kv_tokens": (r"max_total_num_tokens=([0-9]+)", r"KV Cache is allocated\..{0,100}?#tokens: ([0-9]+)"),
    "free_gib": (r"Load weight begin\. avail mem=([0-9.]+) GB",),
}
_FAILURES = (
    ("no memory for the cache", r"No available memory for the cache blocks"),
    ("one request of the longest length does not fit", r"KV\s{1,80}cache is needed, which is larger"),
    ("the server's share of the memory was not free", r"Free memory on device"),
    ("the sampler ran out of memory", r"out of memory occurred when warming up sampler"),
    ("not enough memory for the pool", r"Not enough memory\. Please try to increase --mem-fraction-static"),
    ("not enough memory for the pool", r"Loaded weights leave no GPU memory for the KV cache"),
    ("out of memory", r"CUDA out of memory"),
)
_SERVERS = (
    ("vllm", r"LLM engine \(v|kv_cache_utils|GPU KV cache size|gpu_model_runner|vllm"),
    ("sglang", r"sglang|max_total_num_tokens|Load weight (?:begin|end)"),
)
# What a server's startup alone prints. A text without it may be anything else that people paste.
_SIGNS = (
    r"LLM engine \(v[0-9]|vLLM API server version|GPU KV cache size|Available KV cache memory|Model loading took [0-9]",
    r"Load weight (?:begin|end)\.|max_total_num_tokens=|KV Cache is allocated|server_args=ServerArgs\(",
    *(pattern for said, pattern in _FAILURES if said != "out of memory"),
)
# Other servers, by a text of their logs.
_OTHERS = (
    ("Ollama", r"source=\w{1,40}\.go:[0-9]|ollama (?:runner|serve)"),
    ("llama.cpp", r"llama_(?:model_loader|kv_cache|context|new_context)|ggml_cuda_init|llm_load_(?:print_meta|tensors)"),
    ("Text Generation Inference", r"text_generation_(?:launcher|router|server)"),
    ("TensorRT-LLM", r"\[(?:TensorRT-LLM|TRT-LLM)\]"),
    ("LMDeploy", r"lmdeploy - (?:INFO|WARNING|ERROR)|\[TM\]\["),
    ("MLC LLM", r"mlc_llm"),
)
_LAYOUTS = {"fp8": "fp8", "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "mxfp4": "mxfp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupLog:
    """Contents of a log: the engine, figures by name, and the failure, empty if there was none.

    `figures` are numbers in GiB, tokens or counts, and words.
    """

    engine: str
    figures: dict[str, float | str]
    failure: str = ""

    @property
    def title(self) -> str:
        """Return the server's name, with its version if the log says it."""
        return f"{ENGINES[self.engine].title} {self.figures.get('engine_version', '')}".rstrip()

    def number(self, name: str) -> float | None:
        """Return a figure that is a number, None if the log does not say it."""
        value = self.figures.get(name)
        return value if isinstance(value, (int, float)) else None

    def query(self) -> str:
        """Return the keys of a query that the log's own flags stand for, without the model and the device."""
        keys = ["mode=serve", f"engine={self.engine}"] if self.engine != "vllm" else ["mode=serve"]
        for name in ("engine_version", "tp", "pp", "dp", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "util"):
            value = self.figures.get(name)
            if value is not None and not (name in ("tp", "pp", "dp") and value == 1):
                keys.append(f"{name}={value if isinstance(value, str) else f'{value:g}' if name == 'util' else int(value)}")
        if str(self.figures.get("kv", "auto")).startswith("fp8"):
            keys.append("kv=fp8")
        if self.figures.get("enforce_eager") == "True":
            keys.append("enforce_eager=1")
        if layout := _LAYOUTS.get(str(self.figures.get("layout", ""))):
            keys.append(f"weights={layout}")
        return "&".join(keys)


def is_startup(text: str) -> bool:
    """Return True if a text is the startup log or error of a server, of one that `read_startup` refuses by name, too."""
    return any(re.search(pattern, text) for pattern in _SIGNS) or _other_server(text) is not None


def _other_server(text: str) -> str | None:
    return next((name for name, pattern in _OTHERS if re.search(pattern, text)), None)


def read_startup(text: str) -> StartupLog:
    """Return what a startup log or error of a server says.

    Raises:
        RequestError: The text is of another program, or too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            "the log is too long",
            given=f"{len(text):,} characters",
            allowed=f"at most {MAX_CHARACTERS:,}",
            todo="paste its beginning, up to the first request",
        )
    text = _COLOURS.sub("", text)
    engine = next((name for name, pattern in _SERVERS if re.search(pattern, text)), None)
    failure = next((said for said, pattern in _FAILURES if re.search(pattern, text)), "")
    if engine is None and failure and failure != "out of memory":
        engine = "sglang" if "pool" in failure else "vllm"
    figures: dict[str, float | str] = {}
    for name, patterns in (_SGLANG if engine == "sglang" else _VLLM).items():
        for pattern in patterns:
            if found := re.search(pattern, text):
                figures[name] = _value(name, found[1])
                break
    if engine is None or (not failure and not {"weights_gib", "kv_tokens", "cache_gib"} & figures.keys()):
        if (other := _other_server(text)) is not None:
            raise RequestError(
                f"this is a log of {other}",
                given=f"{len(text):,} characters",
                allowed="the startup log or error of vLLM or SGLang",
                todo="ask for the model and its flags in a query" if other != "llama.cpp" else "ask with engine=llama.cpp",
            )
        raise RequestError(
            "this is no startup log of vLLM or SGLang",
            given=f"{len(text):,} characters without the size of weights or cache",
            allowed="the lines from the server's start to its first request, or its error",
            todo="paste the log of the server itself",
        )
    return StartupLog(engine=engine, figures=figures, failure=failure)


_WORDS = ("engine_version", "model", "layout", "enforce_eager", "kv", "sampler")


def _value(name: str, text: str) -> float | str:
    if name in _WORDS:
        return text.rstrip(".")
    return float(text.replace(",", "").rstrip("."))


def refitted(log: StartupLog, served: Served) -> dict[str, str]:
    """Return values of `outside` and `graphs` by which the plan has what the log left beside weights, profile run and cache.

    The plan is that of the log's own question. Empty for another engine, and for what the log does not say.
    """
    weights, cache, graphs = log.number("weights_gib"), log.number("cache_gib"), log.number("graphs_gib")
    if served.engine != "vllm":
        return {}
    found = {"graphs": f"{graphs:.2f}GiB"} if graphs is not None and graphs > 0 else {}
    if weights is not None and cache is not None:
        share = log.number("share_gib")
        budget = share if share is not None else served.budget_bytes / GIB
        captured = (served.graphs_bytes / GIB if graphs is None else max(0.0, graphs)) if served.graphs_in_budget else 0.0
        outside = budget - weights - cache - served.profile_peak_bytes / GIB - captured
        if outside >= 0.005:
            found["outside"] = f"{outside:.2f}GiB"
    return found


def compare(log: StartupLog, served: Served) -> list[str]:
    """Return a line for the weights, the rest and the tokens: the log, the plan, their difference and a cause if it is large.

    An error that says other figures instead (the cache alone, the longest request, free memory) has lines for these.
    """
    lines = []
    weights, cache, tokens = log.number("weights_gib"), log.number("cache_gib"), log.number("kv_tokens")
    if cache is None:
        cache = log.number("available_gib")
    if weights is not None:
        planned = served.weights_bytes / GIB
        cause = "another quantisation, a draft model, LoRA slots, or a kernel's padding"
        large = abs(planned - weights) > LARGE_SHARE * weights
        lines.append(_line("weights", weights, planned, "GiB", cause if large else ""))
    if cache is not None and weights is not None and served.engine == "vllm":
        rest = served.budget_bytes / GIB - weights - cache
        planned = (served.budget_bytes - served.weights_bytes - served.kv_cache_bytes) / GIB
        cause = ""
        if rest - planned > LARGE_GIB:
            cause = "another max_num_seqs, an encoder's profile run, expert workspaces, or buffers between ranks"
        elif planned - rest > LARGE_GIB:
            cause = "a smaller max_num_seqs, another sampler, or another device or share than those of the question"
        lines.append(_line("beside weights and cache", rest, planned, "GiB", cause))
    if tokens is not None:
        lines.append(_line("KV tokens", tokens, served.kv_tokens, "tokens", _cause_of_tokens(tokens, cache, served)))
    return [*lines, *_lines_of_error(log, cache if weights is None else None, served)]


def _cause_of_tokens(tokens: float, cache: float | None, served: Served) -> str:
    """Return why the tokens differ although the bytes of the cache do not; empty if the lines before say it."""
    same = cache is not None and abs(served.kv_cache_bytes / GIB - cache) <= LARGE_SHARE * abs(cache)
    large = tokens and abs(served.kv_tokens / tokens - 1) > LARGE_SHARE
    return "another dtype of keys and values, another block size, or a layout that is not known" if same and large else ""


def _lines_of_error(log: StartupLog, cache: float | None, served: Served) -> Iterator[str]:
    """Yield a line for each figure of an error that says neither weights nor tokens."""
    if cache is not None:
        yield _line("KV cache", cache, served.kv_cache_bytes / GIB, "GiB", "")
    if (longest := log.number("longest")) is not None:
        yield _line("longest request", longest, served.longest, "tokens", "")
    total, free, share = (log.number(name) for name in ("total_gib", "free_gib", "share_gib"))
    util = served.flags.get("gpu_memory_utilization")
    if total is not None and isinstance(util, float):
        planned = served.budget_bytes / GIB / util
        other = abs(planned - total) > LARGE_SHARE * total
        yield _line("memory of the device", total, planned, "GiB", "another device than that of the question" if other else "")
    if free is not None and share is not None and free < share:
        yield (
            f"free when the server starts: {free:.2f} GiB in the log, {share:.2f} are its share: another program holds memory, or "
            "a server that has not ended; end it, or ask for a smaller util"
        )
    if "sampler" in log.failure:
        yield (
            f"profile run: {served.profile_peak_bytes / GIB:.2f} GiB planned, for {served.flags['max_num_seqs']:,} requests: "
            "warming up needs it beside the cache; fewer max_num_seqs or a smaller util leaves room"
        )


def _line(name: str, logged: float, planned: float, unit: str, cause: str) -> str:
    if unit == "tokens":
        off = f"{100 * (planned / logged - 1):+.1f} %" if logged else "the log has none"
        said = f"{name}: {logged:,.0f} in the log, {planned:,.0f} planned ({off})"
        return f"{said}: {cause}" if cause else said
    said = f"{name}: {logged:.2f} {unit} in the log, {planned:.2f} planned ({planned - logged:+.2f})"
    return f"{said}: {cause}" if cause else said
