"""A server's startup log or error as figures, and how they differ from the plan for the same flags.

Read: vLLM 0.8 to 0.33 and SGLang 0.4 to 0.5, as they print it; colours, process names and wrapped lines do not matter.
sizer.serving.llama_log reads llama.cpp's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sizer.base.errors import RequestError, quote
from sizer.base.units import GIB
from sizer.catalogue.gpu_keys import key_of_driver, keys_of_memory
from sizer.catalogue.heads import draft_method_of, find_head
from sizer.catalogue.serving import DRAFT_MODEL, DRAFTS, EAGLE, EAGLE3, ENGINES, MAX_DRAFTED, MTP, NGRAM, POOL_FLAGS
from sizer.catalogue.sources import arch_of
from sizer.report.served import Served
from sizer.serving import llama_log
from sizer.serving.rules import AITER_SHARE, AITER_TOKENS, rules_of

MAX_CHARACTERS = 4_000_000
LARGE_SHARE, LARGE_GIB = 0.02, 0.5  # from here on a difference is given a cause

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# From 0.5.19 on SGLang prints its arguments as a dict; engine.py, resolved_dict. Until then name=value.
_DUMP, _NAMED = re.compile(r"server_args=\{[^\n]{0,60000}"), re.compile(r"'(\w{1,60})': ")
_NUMBER = r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)"

# For each figure, the texts that contain it, the newest wording first. Repetition is bounded, because users' texts are searched.
_DEVICE = (
    r"device_name=([A-Za-z][\w -]{1,60}?)(?:\.json|,)",
    r"Found GPU0 ([A-Za-z][\w -]{1,60}?) which is of",
    r"GPU 0: ([A-Za-z][\w -]{1,60}?)(?: \(UUID|\s*\n|\s*$)",
    r"\|\s{1,4}0\s{2,4}([A-Za-z][\w -]{1,40}?)(?:\.\.\.)?\s{2,30}(?:On|Off) ",
)
_VLLM: dict[str, tuple[str, ...]] = {
    "engine_version": (
        r"LLM engine \(v([0-9][0-9.]*)",
        r"vLLM API server version v?([0-9][0-9.]*)",
        r"\]\s.{0,60}? version v?([0-9]+\.[0-9]+\.[0-9]+)",
    ),
    "model": (r"engine \(v[^)]{0,60}\) with config:\s.{0,40}?model='([^']{1,300})'", r"'model(?:_tag)?': '([^']{1,300})'"),
    "max_model_len": (
        *(r"max_seq_len=([0-9]+)", r"Using max model len ([0-9]+)", r"'max_model_len': ([0-9]+)"),
        r"models?'s max seq\s{1,80}len \(([0-9]+)\)",
    ),
    "tp": (r"tensor_parallel_size'?[=:] ?([0-9]+)",),
    "pp": (r"pipeline_parallel_size'?[=:] ?([0-9]+)",),
    "dp": (r"data_parallel_size'?[=:] ?([0-9]+)",),
    "dcp": (r"decode_context_parallel_size'?[=:] ?([0-9]+)", r"dcp_world_size ([0-9]+)"),
    "ep": (r"enable_expert_parallel'?[=:] ?(True)",),
    "layout": (r"\bquantization'?[=:] ?'?(?!None)([\w-]+)",),
    "enforce_eager": (r"enforce_eager'?[=:] ?(True|False)",),
    "kv": (r"kv_cache_dtype'?[=:] ?'?([\w.]+)",),
    "kv_bytes": (r"kv_cache_memory_bytes'?[=:] ?([0-9]+)",),
    "prefix_caching": (r"enable_prefix_caching=(True|False)",),
    "cpu_offload_gb": (r"cpu_offload_gb'?[=:] ?([0-9.]+)",),
    "enable_lora": (r"enable_lora'?[=:] ?(True)", r"(lora_config=LoRAConfig)\("),
    "max_loras": (r"\bmax_loras'?[=:] ?([0-9]+)",),
    "max_lora_rank": (r"\bmax_lora_rank'?[=:] ?([0-9]+)",),
    "fully_sharded_loras": (r"fully_sharded_loras'?[=:] ?(True)",),
    "drafts": (r"speculative_config=(?!None)(\S)", r"'speculative_config': (\{)"),
    "draft_method": (
        r"SpeculativeConfig\(method='([\w-]{1,40})'",
        r"'speculative_config': \{[^}]{0,300}?'method': '([\w-]{1,40})'",
    ),
    "draft_model": (
        r"SpeculativeConfig\(method='[\w-]{1,40}', model='([^']{1,300})'",
        r"'speculative_config': \{[^}]{0,300}?'model': '([^']{1,300})'",
    ),
    "draft_tokens": (r"num_spec_tokens=([0-9]{1,4})", r"'num_speculative_tokens': ([0-9]{1,4})"),
    "page_tokens": (r"Setting attention block size to ([0-9]+) tokens",),
    "max_num_batched_tokens": (r"max_num_batched_tokens'?[=:] ?([0-9]+)",),
    "max_num_seqs": (r"max_num_seqs'?[=:] ?([0-9]+)", r"warming up sampler with ([0-9]+) dummy requests"),
    "util": (
        r"'gpu_memory_utilization': ([0-9.]+)",
        r"gpu-memory-utilization[= ]([0-9.]+)",
        r"memory utilization (?:is )?\(([0-9.]+),",
    ),
    "weights_gib": (
        r"(?:Model loading|Loading model weights) took ([0-9.]+) Gi?B",
        r"model weights take ([0-9.]+)GiB",
    ),
    "cache_gib": (r"Available KV cache memory: (-?[0-9.]+) GiB", r"reserved for KV Cache is (-?[0-9.]+)GiB"),
    "kv_tokens": (rf"(?:GPU )?KV cache size: {_NUMBER} tokens",),
    "requests_at_once": (r"Maximum concurrency for [0-9,]+ tokens per request: ([0-9.]+)x",),
    "profile_gib": (r"([0-9.]+) GiB for peak activation", r"PyTorch activation peak memory takes ([0-9.]+)GiB"),
    "outside_gib": (r"([0-9.]+) GiB for non-torch memory", r"non_torch_memory takes ([0-9.]+)GiB"),
    "graphs_gib": (
        r"Graph capturing finished in [0-9]+ secs, took (-?[0-9.]+) GiB",
        r"Estimated CUDA graph memory: (-?[0-9.]+) GiB",
    ),
    "text_alone": (r"(running in text-only mode)", r"'language_model_only': (True)"),
    "encoder_items": (r"profiled with ([0-9]+) \w+ items? of the maximum feature size",),
    "sampler": (r"(Using FlashInfer for top-p)", r"(FlashInfer is not available)"),
    "needed_gib": (r"\b([0-9][0-9.]*) GiB KV\s+cache is needed",),
    "available_gib": (r"available KV cache\s+memory \((-?[0-9.]+) GiB\)",),
    "longest": (
        r"estimated maximum model length is ([0-9]+)",
        r"number of tokens that can be stored in KV cache \(([0-9]+)\)",
    ),
    "free_gib": (r"Free memory on device[^(]{0,40}\(([0-9.]+)/[0-9.]+ GiB\)",),
    "total_gib": (r"Free memory on device[^(]{0,40}\([0-9.]+/([0-9.]+) GiB\)", r"total_gpu_memory \(([0-9.]+)GiB\)"),
    "share_gib": (r"memory utilization (?:is )?\([0-9.]+, ([0-9.]+) GiB\)",),
    "architecture": (r"Resolved architecture: (\w{1,80})",),
    "device": _DEVICE,
}
_SGLANG: dict[str, tuple[str, ...]] = {
    "engine_version": (
        r"\bsglang(?:[-_ ]version)?[=: ]{1,3}v?([0-9]+\.[0-9]+\.[0-9]+)",
        r"lmsysorg/sglang:v?([0-9]+\.[0-9]+\.[0-9]+)",
    ),
    "model": (r"model_path='([^']{1,300})'", r"\"model_path\": ?\"([^\"]{1,300})\""),
    "max_model_len": (r"context_len=([0-9]+)", r"context_length=([0-9]+)"),
    "tp": (r"\btp_size=([0-9]+)",),
    "pp": (r"\bpp_size=([0-9]+)",),
    "dp": (r"\bdp_size=([0-9]+)",),
    "attn_dp": (r"\battn_dp_size=([0-9]+)",),
    "dp_attention": (r"enable_dp_attention=(True)",),
    "util": (r"mem_fraction_static=([0-9.]+)",),
    "layout": (r"\bquantization='([\w-]+)'", r"\bquant=(?!None)([\w-]+)"),
    "kv": (r"kv_cache_dtype='([\w.]+)'",),
    "enforce_eager": (r"disable_cuda_graph=(True|False)",),
    "max_num_seqs": (r"max_running_requests=([0-9]+)(?![0-9]|, context_len)",),
    "max_num_batched_tokens": (r"chunked_prefill_size=([0-9]+)",),
    "whole_prompts": (r"chunked_prefill_size=-1, .{0,300}?max_prefill_tokens=([0-9]+)",),
    "radix_off": (r"disable_radix_cache=(True)\b",),
    "aiter": (r"\battention_backend='(aiter)'",),
    "drafts": (r"(speculative_algorithm)='\w",),
    "draft_method": (r"speculative_algorithm='(\w{1,40})'",),
    "draft_model": (r"speculative_draft_model_path='([^']{1,300})'",),
    "draft_tokens": (r"speculative_num_draft_tokens=([0-9]{1,4})\b",),
    "draft_steps": (r"speculative_num_steps=([0-9]{1,4})\b",),
    # not of "max_mamba_cache_size=4, mamba_ratio=5" in an error, nor of "Computed max_mamba_cache_size=0 (total"
    **{name: (rf"\b{name}='?({pattern})\b(?!, mamba_ratio|, [0-9]| \(total)",) for name, (pattern, _) in POOL_FLAGS.items()},
    "states": (r"max_mamba_cache_size=([0-9]+), mamba_ratio=[0-9]",),
    "states_of_request": (r"max_mamba_cache_size=[0-9]+, mamba_ratio=([0-9]+)",),
    "least_share": (r"Raise --mem-fraction-static above (0\.[0-9]+)",),
    "weights_gib": (r"Load weight end\..{0,300}?mem usage=(-?[0-9.]+) GB",),
    "kv_tokens": (r"max_total_num_tokens=([0-9]+)", r"KV Cache is allocated\..{0,100}?#tokens: ([0-9]+)"),
    "free_gib": (r"Load weight begin\. avail mem=([0-9.]+) GB",),
    "device": _DEVICE,
}
# Facts in a log that no plan counts: a pattern and the words.
_UNCOUNTED = (
    (r"lora_paths=[\[{]|enable_lora=True, (?:enable_lora_overlap_loading=\w{1,8}, )?max_lora_rank=", "LoRA adapters: their slots"),
    (
        r"cpu_offload_gb=[1-9][0-9]{0,4}, (?:offload_|hicache|enable_|disable_)|offload_group_size'?[=:] ?[1-9]",  # of SGLang
        "weights that are offloaded to the CPU",
    ),
    (
        r"(?s)\A(?!.*running in text-only mode).*(?:'limit_mm_per_prompt': \{|'skip_mm_profiling': True)",
        "limits of images: as many of the largest images as without them are encoded",
    ),
    (r"'num_gpu_blocks_override': [0-9]", "num_gpu_blocks_override, which sets the cache"),
    (r"enable_sleep_mode=True|'enable_sleep_mode': True", "sleep mode: its memory pool rounds each tensor"),
    (r"platform (?:cpu|tpu|npu|xpu|hpu|neuron)\b|device_config=(?:cpu|npu|tpu|xpu|hpu)", "another backend than CUDA and ROCm"),
)
_FAILURES = (
    ("no memory for the cache", r"No available memory for the cache blocks"),
    (
        "one request of the longest length does not fit",
        r"KV\s{1,80}cache is needed, which is larger|tokens that can be stored in KV cache \([0-9]",
    ),
    ("the server's share of the memory was not free", r"Free memory on device.{0,60}?is less than"),
    ("the sampler ran out of memory", r"out of memory occurred when warming up sampler"),
    ("not enough memory for the pool", r"Not enough memory\. Please try to increase --mem-fraction-static"),
    ("not enough memory for the pool of states", r"state cache is too small to serve|Not enough GPU memory for hybrid"),
    ("graphs ran out of memory", r"Capture (?:CUDA|cuda|piecewise CUDA) graph failed"),
    ("not enough memory for the pool", r"Loaded weights leave no GPU memory for the KV cache"),
    ("out of memory", r"CUDA out of memory"),
)
# What helps against a failure whose message has no figures.
_WAYS = {
    "no memory for the cache": (
        "cache: weights and the profile run take the whole share: a smaller max_num_seqs or max_num_batched_tokens, a larger util, "
        "more ranks, or quantized weights"
    ),
    "not enough memory for the pool": (
        "pool: the weights take the whole static share: a larger --mem-fraction-static, more ranks, or quantized weights"
    ),
}
_SERVERS = (
    ("vllm", r"LLM engine \(v|kv_cache_utils|GPU KV cache size|gpu_model_runner|vllm"),
    ("sglang", r"sglang|max_total_num_tokens|Load weight (?:begin|end)"),
)
# Texts that only the startup of a server prints. Any other text may be anything that people paste.
_SIGNS = (
    r"LLM engine \(v[0-9]|vLLM API server version|GPU KV cache size|Available KV cache memory|Model loading took [0-9]",
    r"Load weight (?:begin|end)\.|max_total_num_tokens=|KV Cache is allocated|server_args=ServerArgs\(",
    *(pattern for said, pattern in _FAILURES if said != "out of memory"),
)
# Other servers, by a text of their logs.
_OTHERS = (
    ("Ollama", r"source=\w{1,40}\.go:[0-9]|ollama runner"),
    ("Text Generation Inference", r"text_generation_(?:launcher|router|server)"),
    ("TensorRT-LLM", r"\[(?:TensorRT-LLM|TRT-LLM)\]"),
    ("LMDeploy", r"lmdeploy - (?:INFO|WARNING|ERROR)|\[TM\]\["),
    ("MLC LLM", r"(?<!import )(?<!from )\bmlc_llm\b(?!\s+(?:serve|chat)\b)"),
)
_LLAMA_KEYS = (
    *("engine_version", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "weights", "kv", "gpu_layers", "cpu_moe", "pp"),
    "fa",
)
LAYOUTS_OF_FLAGS = {
    **{"fp8": "fp8", "fbgemm_fp8": "fp8", "awq": "awq", "awq_marlin": "awq", "mxfp4": "mxfp4", "w8a8_int8": "w8a8"},
    **{"gptq": "gptq", "gptq_marlin": "gptq", "w8a8_fp8": "fp8"},
}
_USUAL = ("page_size:1", "swa_full_tokens_ratio:0.8", "mamba_full_memory_ratio:0.9", "mamba_ssm_dtype:float32")  # SGLang's defaults
_PLAIN_KV = ("auto", "bfloat16", "bf16", "float16", "half")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupLog:
    """Contents of a log: the engine, figures by name, and the failure, empty if there was none.

    `figures` are numbers in GiB, tokens or counts, and words. `uncounted` names facts of the log that no plan counts.
    """

    engine: str
    figures: dict[str, float | str]
    failure: str = ""
    uncounted: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return the server's name, with its version if the log contains it."""
        return f"{ENGINES[self.engine].title} {self.figures.get('engine_version', '')}".rstrip()

    def number(self, name: str) -> float | None:
        """Return a figure as a number, None if the log does not contain it."""
        value = self.figures.get(name)
        return value if isinstance(value, (int, float)) else None

    def query(self) -> str:
        """Return the query keys of the log's own flags, without the model and the device."""
        keys = ["mode=serve", f"engine={self.engine}"] if self.engine != "vllm" else ["mode=serve"]
        if self.engine == "llama.cpp":
            older = self.number("older_than")
            keys += [f"engine_version=b{int(older) - 1}"] if older else []
            found = ((name, self.figures[name]) for name in _LLAMA_KEYS if name in self.figures)
            return "&".join([*keys, *(f"{name}={value if isinstance(value, str) else int(value)}" for name, value in found)])
        for name in ("engine_version", "tp", "pp", "dp", "dcp", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "util"):
            value = self.figures.get(name)
            if name == "max_num_batched_tokens":
                value = self.figures.get("whole_prompts", value)
            if name == "util" and isinstance(value, float) and self._prints_aiter_share():
                value = round(value / AITER_SHARE, 6)
            if name == "dp" and "dp_attention" in self.figures and self.engine == "sglang":
                groups = self.number("attn_dp") or 1  # from 0.5.22 on; until then dp_size has them
                name, value = "attn_dp", groups if groups > 1 else value
            if value is not None and not (name in ("tp", "pp", "dp", "dcp", "attn_dp") and value == 1):
                keys.append(f"{name}={value if isinstance(value, str) else f'{value:g}' if name == 'util' else int(value)}")
        if str(self.figures.get("kv", "auto")).startswith("fp8"):
            keys.append("kv=fp8")
        if self.figures.get("enforce_eager") == "True":
            keys.append("enforce_eager=1")
        if layout := LAYOUTS_OF_FLAGS.get(str(self.figures.get("layout", ""))):
            keys.append(f"weights={layout}")
        if self.figures.get("ep") == "True":
            keys.append("ep=1")
        if "enable_lora" in self.figures:
            keys.append(f"max_loras={int(self.number('max_loras') or 1)}")
            keys += [f"max_lora_rank={int(rank)}"] if (rank := self.number("max_lora_rank")) is not None else []
            keys += ["fully_sharded_loras=1"] if "fully_sharded_loras" in self.figures else []
        if offload := self.number("cpu_offload_gb") if self.engine == "vllm" else None:
            keys.append(f"cpu_offload_gb={offload:g}")
        if draft := self.draft:
            keys.append(f"speculative={draft}")
        if self.engine == "sglang":
            keys += self._pool()
        if "text_alone" in self.figures:
            keys.append("inputs=text")
        if "radix_off" in self.figures:
            keys.append("prefix_caching=0")
        if (size := self.number("kv_bytes")) is not None:
            keys.append(f"kv_bytes={int(size)}")
        if "page_tokens" in self.figures and (said := self.figures.get("prefix_caching")) is not None:
            if said == "True":
                keys.append("prefix_caching=1")  # a model with states then keeps one more of each
            elif self._has_state_prefixes():
                keys.append("prefix_caching=0")
        return "&".join(keys)

    def _pool(self) -> Iterator[str]:
        """Yield the flags of the pool that a log or its command names, without defaults."""
        asked = [f"{name}:{self.figures[name]}" for name in POOL_FLAGS if name in self.figures]
        of_command = [str(self.figures["pool"])] if "pool" in self.figures else []
        if pool := [*of_command, *(one for one in asked if one not in _USUAL)]:
            yield f"pool={','.join(pool)}"

    def _prints_aiter_share(self) -> bool:
        """Return whether the share that a log of SGLang prints is already smaller for AITER's attention.

        Source: server_args.py, _handle_attention_backend_compatibility, 0.5.5; before that the model runner made it smaller.
        """
        found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", str(self.figures.get("engine_version", "")))
        late = found is None or (int(found[1]), int(found[2]), int(found[3])) >= (0, 5, 5)
        return "aiter" in self.figures and late and (self.number("max_model_len") or 0) > AITER_TOKENS

    def _has_state_prefixes(self) -> bool:
        """Return whether the log's version caches prefixes of models with states by default."""
        version = str(self.figures.get("engine_version", ""))
        found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", version)
        release = found and (int(found[1]), int(found[2]), int(found[3]))
        return not release or rules_of(max(release, ENGINES["vllm"].oldest or release)).state_prefixes

    @property
    def draft(self) -> str:
        """Return the speculative decoding of a log as a query has it, empty without, or if no query has it."""
        if "drafts" not in self.figures:
            return str(self.figures.get("speculative", ""))  # of the command that the log begins with
        method, model, tokens = (str(self.figures.get(f"draft_{name}", "")) for name in ("method", "model", "tokens"))
        if self.engine == "sglang":
            steps, served = (str(self.figures.get(name, "")).partition(".")[0] for name in ("draft_steps", "model"))
            return read_sglang_draft(method, model, served, tokens.partition(".")[0], steps)
        return read_draft(method, model, tokens.partition(".")[0])

    @property
    def total_bytes(self) -> int | None:
        """Return the memory of the device, None if the log does not contain it."""
        total = self.number("total_gib")
        return None if total is None else round(total * GIB)

    @property
    def gpu(self) -> str | None:
        """Return the key of the device that the log names, or of the only device with that memory.

        None if neither identifies one.
        """
        if (name := self.figures.get("device")) is not None:
            return key_of_driver(str(name), self.total_bytes)
        alike = keys_of_memory(self.total_bytes) if self.total_bytes else []
        return alike[0] if len(alike) == 1 else None

    @property
    def arch(self) -> str | None:
        """Return the architecture of the log's model as a query names it; None for a folder that no preset is named after."""
        if self.engine == "llama.cpp":
            return str(self.figures["arch"]) if "arch" in self.figures else None
        return arch_of(str(self.figures.get("model", "")))

    def missing(self, asked: Collection[str]) -> list[str]:
        """Return a line for each thing that neither the log nor the keys of a query say."""
        said = []
        if "arch" not in asked and self.arch is None:
            folder, kind = self.figures.get("model"), self.figures.get("architecture")
            named = f"the log names the folder {quote(str(folder))}" if folder else "not in the log"
            said.append(f"model: {named}{f', of class {kind}' if kind else ''}; write arch=")
        if "gpu" not in asked and self.gpu is None:
            alike = keys_of_memory(self.total_bytes) if self.total_bytes else []
            name = self.figures.get("device")
            known = f"the log names {quote(str(name))}, which the catalogue does not have" if name else "not in the log"
            hint = f", for example {' or '.join(alike[:3])}, which have its memory" if alike else ""
            free = self.number("free_gib")
            before = f" ({free:.2f} GiB were free before loading)" if free is not None and self.engine == "sglang" else ""
            taken = "the default of gpu is taken" if self.engine == "llama.cpp" else "what depends on it is not compared"
            said.append(f"device: {known}{before}, {taken}; write gpu={hint}")
        if "engine_version" not in asked and not {"engine_version", "older_than"} & self.figures.keys():
            said.append(f"version: not in the log; the newest known of {ENGINES[self.engine].title} is taken")
        return said

    def remarks(self) -> list[str]:
        """Return a line for each thing that the log says and the plan does not count."""
        said = [f"not counted: {words}" for words in self.uncounted]
        if self.engine == "llama.cpp":
            return said
        if "drafts" in self.figures and not self.draft:
            said.append("not counted: speculative decoding: a draft model and its cache")
        elif self.draft.partition(":")[0] in (EAGLE, EAGLE3) and (head := str(self.figures.get("draft_model", ""))):
            said.append(unread_head(head))
        layout, kv = str(self.figures.get("layout", "")), str(self.figures.get("kv", "auto"))
        if layout and layout not in LAYOUTS_OF_FLAGS:
            said.append(unread_layout(layout))
        if kv not in _PLAIN_KV and not kv.startswith("fp8"):
            said.append(f"not counted: kv_cache_dtype={kv}; 16 bits are taken")
        return said


def read_draft(method: str, model: str, tokens: str) -> str:
    """Return vLLM's method, draft model and drafted tokens as a query has them, empty if no query has them.

    Source: vllm/config/speculative.py, __post_init__, 0.33: without a method the model's name tells it. The configs of published
    checkpoints draft one token by default with MTP.
    """
    method, model = method.lower(), "" if model == "None" else model
    if method.endswith("_mtp"):
        method = MTP
    elif "ngram" in (method, model.strip("[]")):
        method = NGRAM
    elif not method and model:
        named = model.lower()
        method = EAGLE if "eagle-" in named else EAGLE3 if "eagle3" in named else DRAFT_MODEL
    if method == DRAFT_MODEL:
        arch = arch_of(model) or ""
        method = arch.removeprefix("hf:") if arch.startswith("hf:") else ""
    elif method not in DRAFTS:
        return ""
    elif method in (EAGLE, EAGLE3):
        method = _named_head(method, model)
    tokens = tokens or ("1" if method == MTP else "")
    counted = tokens.isdecimal() and len(tokens) < 4 and 1 <= int(tokens) <= MAX_DRAFTED
    return f"{method}:{int(tokens)}" if method and counted else ""


def _named_head(method: str, repository: str) -> str:
    """Return the key of a published head of a method; the method itself for another repository."""
    head = find_head(repository)
    return head if head is not None and draft_method_of(head) == method else method


def read_sglang_draft(algorithm: str, path: str, model: str, tokens: str, steps: str = "") -> str:
    """Return SGLang's algorithm, draft model and verified tokens as a query has them, empty if no query has them.

    A draft is a tree or a chain; the last token that is verified is not drafted. Without numbers, Llama verifies 8 tokens with a
    head, other models 4, and ngram 12. A tree of 0.5.3 to 0.5.6 verifies 8 with more models, which a pool does not depend on.

    Source: sglang/srt/arg_groups/speculative_hook.py, _handle_eagle_family and _auto_choose_speculative_params, 0.5.23.

    Args:
        algorithm: Value of --speculative-algorithm.
        path: Value of --speculative-draft-model-path, empty without.
        model: The model that is served.
        tokens: Value of --speculative-num-draft-tokens, empty without.
        steps: Value of --speculative-num-steps, empty without.
    """
    algorithm, named = algorithm.upper(), path.lower()
    own = not path or path == model or "nextn" in named or "mtp" in named
    if algorithm in ("EAGLE", "NEXTN"):
        method = MTP if own else "" if algorithm == "NEXTN" or "assistant" in named else EAGLE
    elif algorithm == "STANDALONE":
        arch = arch_of(path) or ""
        method = arch.removeprefix("hf:") if arch.startswith("hf:") else ""
    else:
        method = {"EAGLE3": EAGLE3, "NGRAM": NGRAM}.get(algorithm, "")
    if not tokens and steps.isdecimal() and len(steps) < 4:
        tokens = str(int(steps) + 1)
    tree = method in (EAGLE, EAGLE3) and "llama" in model.lower()
    tokens = tokens or ("12" if method == NGRAM else "8" if tree else "4")
    counted = tokens.isdecimal() and len(tokens) < 4 and 1 < int(tokens) <= MAX_DRAFTED + 1
    method = _named_head(method, path) if method in (EAGLE, EAGLE3) else method
    return f"{method}:{int(tokens) - 1}" if method and counted else ""


def unread_head(repository: str) -> str:
    """Return a line for a head whose sizes are not known."""
    counted = "counted as one layer of the model; write its config.json into speculative in place of its method"
    return f"the head {quote(repository)}: {counted}"


def unread_layout(layout: str) -> str:
    """Return a line for a value of --quantization that does not determine the layout."""
    return f"quantization={layout}: which layers are quantized is in the checkpoint's config.json alone; give it as arch"


def is_startup(text: str) -> bool:
    """Return True for the startup log or error of a server, including servers that `read_startup` refuses by name."""
    return any(re.search(pattern, text) for pattern in _SIGNS) or _other_server(text) is not None or llama_log.is_log(text)


def _other_server(text: str) -> str | None:
    return next((name for name, pattern in _OTHERS if re.search(pattern, text)), None)


def read_startup(text: str) -> StartupLog:
    """Return the figures of a server's startup log or error.

    Raises:
        RequestError: The text belongs to another program, or is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise RequestError(
            "the log is too long",
            given=f"{len(text):,} characters",
            allowed=f"at most {MAX_CHARACTERS:,}",
            todo="paste its beginning, up to the first request",
        )
    text = _DUMP.sub(lambda found: _NAMED.sub(r"\1=", found[0]), _COLOURS.sub("", text))
    if llama_log.is_log(text):
        figures, failure, uncounted = llama_log.read_log(text)
        if failure or {"weights_gib", "cache_gib", "compute_gib"} & figures.keys():
            return StartupLog(engine="llama.cpp", figures=figures, failure=failure, uncounted=uncounted)
    engine = next((name for name, pattern in _SERVERS if re.search(pattern, text)), None)
    failure = next((said for said, pattern in _FAILURES if re.search(pattern, text)), "")
    if engine is None and failure and failure != "out of memory":
        engine = "sglang" if "pool" in failure or "graphs" in failure else "vllm"
    figures = {}
    for name, patterns in (_SGLANG if engine == "sglang" else _VLLM).items():
        for pattern in patterns:
            if (found := re.search(pattern, text)) and (value := _value(name, found[1])) is not None:
                figures[name] = value
                break
    if engine is None or (not failure and not {"weights_gib", "kv_tokens", "cache_gib"} & figures.keys()):
        if (other := _other_server(text)) is not None:
            raise RequestError(
                f"this is a log of {other}",
                given=f"{len(text):,} characters",
                allowed="the startup log or error of vLLM, SGLang or llama.cpp",
                todo="ask for the model in a query, such as mode=serve&arch=hf:qwen3-8b&max_model_len=8192",
            )
        raise RequestError(
            "this is not a startup log of vLLM, SGLang or llama.cpp",
            given=f"{len(text):,} characters without the size of weights or cache",
            allowed="the lines from the server's start to its first request, or its error",
            todo=(
                "write the program before its flags, such as vllm serve"
                if text.lstrip().startswith("--")
                else "paste the log of the server itself"
            ),
        )
    uncounted = tuple(words for pattern, words in _UNCOUNTED if re.search(pattern, text))
    return StartupLog(engine=engine, figures=figures, failure=failure, uncounted=uncounted)


_WORDS = (
    *POOL_FLAGS,
    *("engine_version", "model", "layout", "enforce_eager", "kv", "sampler", "ep", "prefix_caching", "device", "architecture"),
    *("text_alone", "enable_lora", "fully_sharded_loras", "drafts", "draft_method", "draft_model", "radix_off", "aiter"),
    "dp_attention",
)


def _value(name: str, text: str) -> float | str | None:
    """Return a figure as a word or a number, None for invalid digits."""
    if name in _WORDS:
        return text.rstrip(".")
    digits = text.replace(",", "").rstrip(".")
    return float(digits) if re.fullmatch(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?", digits) else None


def refitted(log: StartupLog, served: Served) -> dict[str, str]:
    """Return values of `outside` and `graphs` with which the plan reproduces the log's remaining memory.

    The remaining memory is the budget without weights, profile run and cache. The plan answers the log's own question. The
    result is empty for another engine, and lacks figures that the log does not contain.
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


def explain(log: StartupLog) -> list[str]:
    """Return a line for what an error says by its own figures without a plan, or for what helps if it has none."""
    return _figures_of_error(log) or ([_WAYS[log.failure]] if log.failure in _WAYS else [])


def _figures_of_error(log: StartupLog) -> list[str]:
    said = []
    needed, available = log.number("needed_gib"), log.number("available_gib")
    if needed is not None and available is not None:
        more = f"{needed - available:.2f} GiB more, a shorter max_model_len, or kv=fp8, which halves what attention needs"
        said.append(f"cache: one request of the longest length needs {needed:.2f} GiB, {available:.2f} are left: {more}")
    states, each = log.number("states"), log.number("states_of_request")
    if states is not None and each is not None:
        way = "a larger --mem-fraction-static or --mamba-full-memory-ratio, or --disable-radix-cache, makes room for one"
        said.append(f"states: {states:.0f} fit, a running request takes {each:.0f}: {way}")
    if (least := log.number("least_share")) is not None:
        said.append(f"share: the weights take all of it; from --mem-fraction-static {least:g} on memory is left for the pool")
    free, share = log.number("free_gib"), log.number("share_gib")
    if free is not None and share is not None and free < share:
        said.append(
            f"free when the server starts: {free:.2f} GiB in the log, {share:.2f} are its share: another program uses memory, or "
            "a server that has not ended; end it, or use a smaller util"
        )
    return said


def compare(log: StartupLog, served: Served, *, on_device: bool = True) -> list[str]:
    """Return a line for the weights, the rest and the tokens: the log, the plan, their difference and a cause if it is large.

    An error with other figures (only the cache, the longest request, free memory) has lines for these.

    Args:
        log: What the server printed.
        served: The plan of the same flags.
        on_device: Whether the plan is for the server's device. Otherwise only weights are compared.
    """
    if served.engine == "llama.cpp":
        return list(_compare_llama(log, served))
    lines = _figures_of_error(log)
    weights, cache, tokens = log.number("weights_gib"), log.number("cache_gib"), log.number("kv_tokens")
    if cache is None:
        cache = log.number("available_gib")
    held = served.weights_bytes + served.lora_bytes + served.draft_bytes  # vLLM makes slots and drafts while it loads
    if weights is not None:
        planned = held / GIB
        cause = "another quantization, a draft model, or a kernel's padding"
        large = abs(planned - weights) > LARGE_SHARE * weights
        lines.append(_line("weights", weights, planned, "GiB", cause if large else ""))
    if not on_device:
        return [*lines, *([f"KV tokens: {tokens:,.0f} in the log; the plan's follow from the device"] if tokens else [])]
    if cache is not None and weights is not None and served.engine == "vllm":
        rest = served.budget_bytes / GIB - weights - cache
        planned = (served.budget_bytes - held - served.kv_cache_bytes) / GIB
        cause = ""
        if rest < 0:
            cause = "the log's weights and cache exceed the share of this device: another device, or another util"
        elif rest - planned > LARGE_GIB:
            cause = "another max_num_seqs, an encoder's profile run, expert workspaces, or buffers between ranks"
        elif planned - rest > LARGE_GIB:
            cause = "a smaller max_num_seqs, another sampler, or a device or share that differs from the question"
        lines.append(_line("other than weights and cache", rest, planned, "GiB", cause))
    if (profile := log.number("profile_gib")) is not None and served.engine == "vllm":
        lines.append(_line("of it the profile run's peak", profile, served.profile_peak_bytes / GIB, "GiB", ""))
    if tokens is not None:
        lines.append(_line("KV tokens", tokens, served.kv_tokens, "tokens", _cause_of_tokens(tokens, cache, served)))
    return [*lines, *_lines_of_error(log, cache if weights is None else None, served)]


def _compare_llama(log: StartupLog, served: Served) -> Iterator[str]:
    """Yield a line for each kind of buffer that a log of llama.cpp has, and for the one that did not fit."""
    planned = {
        "weights_gib": ("weights", served.weights_bytes, "another file, or other layers on the device"),
        "host_gib": ("weights on the host", served.offloaded_bytes, "another file, or other layers on the device"),
        "cache_gib": ("cells and states", served.kv_cache_bytes, "another type of keys and values, or other slots"),
        "compute_gib": ("compute buffer", served.profile_peak_bytes, "another build or -ub, or layers on other devices"),
    }
    for name, (title, size, cause) in planned.items():
        if (logged := log.number(name)) is None or not (logged or size):
            continue
        yield _line(title, logged, size / GIB, "GiB", cause if abs(size / GIB - logged) > LARGE_SHARE * logged else "")
    if (asked := log.number("asked_gib")) is not None:
        sizes = {title: size for title, size, _ in planned.values() if "host" not in title}
        parts = ", ".join(f"{title} {size / GIB:.2f}" for title, size in sizes.items())
        yield f"the buffer that did not fit: {asked:.2f} GiB in the log; planned: {parts}, of {served.budget_bytes / GIB:.2f} GiB"


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
    total = log.number("total_gib")
    util = served.flags.get("gpu_memory_utilization")
    if total is not None and isinstance(util, float):
        planned = served.budget_bytes / GIB / util
        other = abs(planned - total) > LARGE_SHARE * total
        yield _line("memory of the device", total, planned, "GiB", "another device than that of the question" if other else "")
    if "graphs" in log.failure:
        yield (
            f"CUDA graphs: they are captured in the memory outside the static share of {served.flags['mem_fraction_static']:g}; "
            f"a smaller --mem-fraction-static, or a --cuda-graph-max-bs below {served.flags['cuda_graph_max_bs']}, leaves room"
        )
    if "sampler" in log.failure:
        yield (
            f"profile run: {served.profile_peak_bytes / GIB:.2f} GiB planned, for {served.flags['max_num_seqs']:,} requests: "
            "warming up needs it in addition to the cache; fewer max_num_seqs or a smaller util leaves room"
        )


def _line(name: str, logged: float, planned: float, unit: str, cause: str) -> str:
    if unit == "tokens":
        off = f"{100 * (planned / logged - 1):+.1f} %" if logged else "the log has none"
        said = f"{name}: {logged:,.0f} in the log, {planned:,.0f} planned ({off})"
        return f"{said}: {cause}" if cause else said
    said = f"{name}: {logged:.2f} {unit} in the log, {planned:.2f} planned ({planned - logged:+.2f})"
    return f"{said}: {cause}" if cause else said
