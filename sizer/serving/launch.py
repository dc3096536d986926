"""The command that starts a server as the keys of a query: of a shell, docker or a compose file, or vLLM's YAML config.

Names of flags: vllm/engine/arg_utils.py and entrypoints/openai/cli_args.py of vLLM 0.9 to 0.33, sglang/srt/server_args.py of
SGLang 0.4 to 0.5.23, and common/arg.cpp of llama.cpp, 2025.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sizer.base.errors import RequestError, quote, suggest
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import EAGLE, EAGLE3, ENGINES, MAX_LAYERS, POOL_FLAGS
from sizer.catalogue.sources import REPO_ID, arch_of
from sizer.serving.launchers import as_command
from sizer.serving.llama_log import arch_of_file, file_type_of
from sizer.serving.startup import (
    LAYOUTS_OF_FLAGS,
    StartupLog,
    read_draft,
    read_sglang_draft,
    unread_head,
    unread_layout,
)

MAX_CHARACTERS = 64 * 1024
SHORTEST_PREFIX = 8  # characters: a shorter prefix may belong to a flag that is not listed here
_PROGRAM = r"\bvllm\s+serve\b|\bvllm\.entrypoints\.(?:openai\.)?(?:api_server|run_batch)\b|\bdynamo\.vllm\b|\btrl\s+vllm-serve\b"
_SGLANG_PROGRAM = r"\bsglang\.launch_server\b|\bsglang\s+serve\b|\bdynamo\.sglang\b|\bsglang_router\.launch_server\b"
_LLAMA_PROGRAM = r"(?:^|[\s/\\])llama-(?:server|cli|mtmd-cli|run|completion|perplexity)(?:\.exe)?\b"
_LLAMA_SIGN = rf"{_LLAMA_PROGRAM}|ggml-org/llama\.cpp(?::\S*)?|\bLLAMA_ARG_[A-Z]"
_HELM_SIGN = r"(?m)^[ \t]*vllmConfig[ \t]*:"
_KSERVE_SIGN = r"\bkserve\.io/[\s\S]{0,2000}?\bname:[ \t]{0,8}huggingface\b"
_VLLM_SIGN = rf"{_PROGRAM}|vllm/vllm-openai"
_SGLANG_SIGN = rf"{_SGLANG_PROGRAM}|lmsysorg/sglang"
_SIGNS = f"{_VLLM_SIGN}|{_SGLANG_SIGN}|{_LLAMA_SIGN}"
_IMAGE = re.compile(
    r"(?:vllm/vllm-openai|lmsysorg/sglang)(?::|[\"']?\s{1,20}tag:[ \t]*[\"']?)v?([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3})"
)
_YAML_LINE = re.compile(r"^\s*([A-Za-z][\w-]{1,60})\s*:\s*(.*?)\s*$")
_SGLANG_YAML_SIGNS = frozenset(
    ("mem-fraction-static", "chunked-prefill-size", "context-length", "max-running-requests", "model-path")
)
_ENV_LINE = re.compile(r"(?m)^[ \t]*(?:export[ \t]+|-[ \t]+)?([A-Z][A-Z0-9_]{1,60})=[\"']?([^\s\"']{1,300})[\"']?[ \t]*$")
_YAML_SIGNS = frozenset(
    (
        *("max-model-len", "gpu-memory-utilization", "tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens"),
        "served-model-name",
    )
)
# Values of flags that do not change memory: they choose how weights are loaded, or name the requested device.
_ALIKE = {
    "load-format": ("auto", "safetensors", "pt", "npcache", "dummy", "mistral", "tensorizer", "fastsafetensors", "instanttensor"),
    "device": ("auto", "cuda"),
}
_HALVES = ("auto", "half", "float16", "bfloat16")
LIMITS, ADAPTERS, DRAFTING = "limit-mm-per-prompt", "enable-lora", "speculative-config"
# Flags that are one key of --speculative-config; arg_utils.py, create_speculative_config, 0.33.
_DRAFT_FLAGS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
# Flags of SGLang's speculative decoding.
_SGLANG_DRAFT_FLAGS = {
    **dict.fromkeys(("speculative-algorithm", "speculative-algo"), "algorithm"),
    **dict.fromkeys(("speculative-draft-model-path", "speculative-draft"), "path"),
    "speculative-num-steps": "steps",
    "speculative-eagle-topk": "topk",
    "speculative-num-draft-tokens": "tokens",
}
# Keys of --speculative-config that do not change memory; any other one is named.
_DRAFT_KEYS = (
    *("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "revision", "code_revision"),
    *("attention_backend", "moe_backend", "disable_padded_drafter_batch", "max_model_len"),
)
# Environment variables: NAME=value, NAME: value, or a name and a value in lines of their own, as in Kubernetes.
_VARIABLE = re.compile(
    r"\b((?:LLAMA_ARG|VLLM|SGLANG)_[A-Z0-9_]{1,60})[\"']?\s{0,3}(?:=|:|[\r\n]{1,2}[ \t]{0,40}value[ \t]{0,3}:)[ \t]{0,3}[\"']?"
    r"([^\s\"',;}\]]{1,200})"
)
_LLAMA_VARIABLES = {"n-parallel": "parallel", "ubatch": "ubatch-size", "no-mmproj": "no-mmproj"}  # common/arg.cpp, set_env
# Environment variables of vLLM 0.33 (vllm/envs.py) and SGLang 0.5.23 (environ.py) that change memory and are not counted.
_UNCOUNTED_VARIABLES = {
    "VLLM_USE_V1": "the engine before V1 is not planned",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "graphs are taken off the budget as by the version's default",
    "VLLM_USE_V2_MODEL_RUNNER": "the model runner is the version's default",
    "VLLM_FUSED_MOE_CHUNK_SIZE": "workspaces of experts are those of the default",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "layers keep tokens as by the version's default",
    "VLLM_MLA_DISABLE": "the cache keeps latents",
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "the cache is sized before graphs are captured",
    "SGLANG_VLM_CACHE_SIZE_MB": "the cache of images has its default size",
}
_LORA_KEYS = ("max_loras", "max_lora_rank", "fully_sharded_loras")
WHOLE_PROMPTS = "16384"  # max_prefill_tokens of SGLang, which counts if --chunked-prefill-size -1 switches chunks off
_ENDS = ("&&", "||", "|", ";", "&", ">", ">>", "2>&1", "2>", "<")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}  # arg_utils.py, human_readable_int

# Flags with a value that is a key of a query, by engine.
_VALUES: dict[str, dict[str, str]] = {
    "vllm": {
        **dict.fromkeys(("model", "model-tag"), "model"),
        "max-model-len": "max_model_len",
        "max-num-seqs": "max_num_seqs",
        "max-num-batched-tokens": "max_num_batched_tokens",
        "gpu-memory-utilization": "util",
        "tensor-parallel-size": "tp",
        "pipeline-parallel-size": "pp",
        "data-parallel-size": "dp",
        "decode-context-parallel-size": "dcp",
        "kv-cache-dtype": "kv",
        **dict.fromkeys(("kv-cache-memory-bytes", "kv-cache-memory"), "kv_bytes"),
        "quantization": "layout",
        "max-loras": "max_loras",
        "max-lora-rank": "max_lora_rank",
        "cpu-offload-gb": "cpu_offload_gb",
    },
    "sglang": {
        **dict.fromkeys(("model-path", "model"), "model"),
        "context-length": "max_model_len",
        "max-running-requests": "max_num_seqs",
        "chunked-prefill-size": "max_num_batched_tokens",
        "mem-fraction-static": "util",
        **dict.fromkeys(("tp-size", "tp", "tensor-parallel-size"), "tp"),
        **dict.fromkeys(("pp-size", "pp", "pipeline-parallel-size"), "pp"),
        **dict.fromkeys(("dp-size", "dp", "data-parallel-size"), "dp"),
        **dict.fromkeys(("attn-dp-size", "attention-data-parallel-size"), "attn_dp"),
        **dict.fromkeys(("ep-size", "ep", "expert-parallel-size"), "ep"),
        "kv-cache-dtype": "kv",
        "quantization": "layout",
        **dict.fromkeys((name.replace("_", "-") for name in POOL_FLAGS), "pool"),
    },
}
# Short flags of vLLM, with one dash. vLLM itself refuses them with two (vllm/utils/argparse_utils.py; 0.33).
_SHORT = {
    "ep": "enable-expert-parallel",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "dpl": "data-parallel-size-local",
    "sc": "speculative-config",
    "cc": "compilation-config",
    "ac": "attention-config",
    **dict.fromkeys(("n", "r", "dpn", "dpr", "dpa", "dpp", "dpb", "dph", "dpe", "dpm"), "nnodes"),  # where ranks run
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "q": "quantization",
}
_SWITCHES: dict[str, dict[str, tuple[str, str]]] = {
    "vllm": {
        "enforce-eager": ("enforce_eager", "1"),
        "no-enforce-eager": ("enforce_eager", "0"),
        "enable-expert-parallel": ("ep", "1"),
        "enable-prefix-caching": ("prefix_caching", "1"),
        "no-enable-prefix-caching": ("prefix_caching", "0"),
        "language-model-only": ("inputs", "text"),
        "fully-sharded-loras": ("fully_sharded_loras", "1"),
    },
    "sglang": {
        "disable-cuda-graph": ("enforce_eager", "1"),
        "enable-ep-moe": ("ep", "1"),
        "disable-radix-cache": ("prefix_caching", "0"),
        "enable-dp-attention": ("dp_attention", "1"),
    },
}
# Prefixes of flags that change memory and have no counterpart here.
_UNCOUNTED_WORDS = """
    speculative spec- num-speculative enable-lora lora max-lora cpu-offload enable-tower-connector-lora
    specialize-active-lora enable-mixed-moe-lora enable-moe-shared-loras offload num-gpu-blocks-override block-size
    page-size mm- skip-mm-profiling compilation-config max-seq-len-to-capture
    cuda-graph cudagraph max-cudagraph hf-overrides json-model-override decode-context-parallel dcp prefill-context-parallel
    kv-transfer-config kv-offloading hicache enable-hierarchical enable-sleep-mode enable-memory-saver rope- mamba runner task
    disable-decode-cuda disable-prefill-cuda disable-piecewise moe-dense enable-dp-lm enable-return-routed
    enable-two-batch-overlap moe-a2a-backend enable-deepep enable-eplb enable-dbo
    disable-hybrid-kv-cache-manager enable-torch-compile torch-compile
    data-parallel-size-local
    load-format dtype device max-prefill-tokens enable-multimodal is-embedding
    additional-config all2all-backend attention-config cp-kv-cache convert dbo- disable-chunked-mm disable-sliding-window
    diffusion-config ec- eplb elastic-ep enable-elastic enable-ep-weight enable-cumem enable-mm-embeds enable-mamba
    enable-prompt-embeds engram
    expert-placement kv-cache-dtype-skip kv-sharing max-num-scheduled max-num-active max-prompt-adapter model-class num-lookahead
    kt- torchao disaggregation-mode
    num-redundant num-scheduler override-attention optimization-level performance-mode pooler-config override-pooler
    quantization-config qlora sleep-mode swa- ubatch use-replayssm video-pruning watermark
"""
_UNCOUNTED = tuple(_UNCOUNTED_WORDS.split())
UNCOUNTED_DRAFT = "a draft model reduces the cache: fewer tokens than planned"
# Direction of the plan's error if such a flag is ignored.
_DIRECTIONS = {
    **dict.fromkeys(("speculative", "spec-", "num-speculative"), UNCOUNTED_DRAFT),
    "lora-target": "fewer layers have slots: more tokens than planned",
    "enable-moe-shared": "experts share slots: more tokens than planned",
    "enable-tower": "the encoder has slots, too: fewer tokens than planned",
    "specialize-active": "more CUDA graphs are captured: fewer tokens than planned",
    **dict.fromkeys(("enable-lora", "lora", "max-lora"), "the slots of adapters reduce the cache: fewer tokens than planned"),
    "cpu-offload": "weights leave the device: more tokens than planned",
    "offload": "weights leave the device: more tokens than planned",
    "torchao": "weights are smaller: more tokens than planned",
    "kt-": "experts leave the devices: more tokens than planned",
    **dict.fromkeys(("enable-dp-lm", "moe-dense"), "weights are replicated: fewer tokens than planned"),
    **dict.fromkeys(("decode-context-parallel", "dcp"), "each rank keeps a part of a request: more tokens than planned"),
}
# Prefixes of flags that do not change device memory.
_IRRELEVANT_WORDS = """
    host port served-model-name api-key chat-template tool-call-parser tool-parser enable-auto-tool-choice reasoning-parser
    enable-reasoning trust-remote-code tokenizer seed random-seed disable-log log- enable-log revision code-revision download-dir
    uvicorn ssl generation-config override-generation-config otlp enable-chunked-prefill no-enable-chunked-prefill swap-space
    disable-custom-all-reduce distributed-executor-backend nnodes node-rank dist- nccl allowed cors root-path
    middleware return-tokens response-role enable-request-id enable-server-load disable-frontend show-hidden max-log-len
    guided-decoding structured-outputs grammar-backend attention-backend prefill-attention decode-attention sampling-backend
    enable-metrics enable-cache-report schedule- scheduling-policy async-scheduling no-async-scheduling stream- watchdog
    decode-log
    model-impl default-chat hf-token enable-prompt-tokens enable-force-include headless data-parallel-address
    data-parallel-rpc data-parallel-backend data-parallel-start api-server-count preferred-sampling tool-server
    skip-server-warmup warmups disable-overlap-schedule enable-mixed-chunk enable-p2p-check moe-runner-backend fp8-gemm-backend
    weight-loader model-loader-extra fastapi grpc skip-tokenizer-init prefix-caching-hash gdn-prefill-backend stats enable-nan
    max-cpu-loras default-mm-loras aggregate-engine allow-deprecated allow-credentials collect-detailed config-format
    cpu-distributed custom-histogram data-parallel-external data-parallel-hybrid data-parallel-multi data-parallel-rank
    data-parallel-supervisor
    disable-async-output disable-cascade disable-mm-preprocessor disable-nccl disable-access disable-uvicorn distributed-timeout
    dp-sync dp-supervisor enable-layerwise enable-mfu enable-offline enable-per-request enable-shm enable-ssl
    enable-tokenizer-info
    enable-trace exclude-tools fail-on fault-tolerance fingerprint hf-config-path ignore-patterns interleave-mm io-processor
    jit-monitor kv-cache-metrics kv-events logging-config logits-processor logprobs-mode long-prefill master-addr master-port
    max-logprobs max-long-partial max-num-partial max-num-queued max-parallel-loading media-io multi-step-stream numa-bind
    per-request preemption-mode prefill-schedule profiler-config pt-load ray-workers reasoning-config renderer-num safetensors-
    scheduler- shutdown-timeout sse-keep tool-strict trust-request use-tqdm weight-transfer worker-cls worker-extension
    speculative-accept speculative-attention speculative-draft-attention speculative-moe-runner
    kt-cpuinfer kt-threadpool kt-method kt-weight router-
    disaggregation-ib disaggregation-transfer disaggregation-bootstrap calculate-kv-scales disable-shared-experts-fusion
    disable-flashinfer enable-flashinfer kernel-config moe-backend linear-backend
"""
_IRRELEVANT = tuple(_IRRELEVANT_WORDS.split())
_NUMBERS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "util", "tp", "pp", "dp", "kv_bytes", "max_loras"),
    *("max_lora_rank", "cpu_offload_gb", "dcp", "attn_dp"),
)
_HINTS = {
    ("vllm", "mem-fraction-static"): "--gpu-memory-utilization",
    ("vllm", "context-length"): "--max-model-len",
    ("vllm", "model-path"): "--model",
    ("vllm", "max-running-requests"): "--max-num-seqs",
    ("vllm", "chunked-prefill-size"): "--max-num-batched-tokens",
    ("vllm", "tp-size"): "--tensor-parallel-size",
    ("vllm", "tp"): "-tp or --tensor-parallel-size",
    ("vllm", "pp"): "-pp or --pipeline-parallel-size",
    ("vllm", "dp"): "-dp or --data-parallel-size",
    ("vllm", "dp-size"): "--data-parallel-size",
    ("vllm", "disable-cuda-graph"): "--enforce-eager",
    ("sglang", "gpu-memory-utilization"): "--mem-fraction-static",
    ("sglang", "max-model-len"): "--context-length",
    ("sglang", "max-num-seqs"): "--max-running-requests",
    ("sglang", "max-num-batched-tokens"): "--chunked-prefill-size",
    ("sglang", "enforce-eager"): "--disable-cuda-graph",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command, translated to the keys of a query.

    `read` lists the flags with the keys that they became, `unmatched` the flags without a counterpart. `irrelevant` counts the
    flags that do not change memory. `model` is the model that the command names. `arch` is None if a query cannot express the
    model, such as a local folder.
    """

    engine: str
    model: str
    arch: str | None
    items: Mapping[str, str]
    read: tuple[tuple[str, str], ...]
    unmatched: tuple[str, ...]
    irrelevant: int

    @property
    def title(self) -> str:
        """Return the server's name, with its version if an image names it."""
        return f"{ENGINES[self.engine].title} {self.items.get('engine_version', '')}".rstrip()


def is_launch(text: str) -> bool:
    """Return True if a text is the command of a server, or vLLM's YAML config."""
    if len(text) > MAX_CHARACTERS:
        return False
    text = _plain(_listed(text))
    text = text if re.search(_SIGNS, text) else _as_yaml(text)
    signs = (_SIGNS, _HELM_SIGN, _KSERVE_SIGN)
    return any(re.search(sign, text) for sign in signs) or _is_yaml(text) or as_command(text) is not None


def _is_yaml(text: str) -> bool:
    """Return True for lines "name: value" with a model and one line that only vLLM uses, or with two such lines."""
    names = _yaml_names(text)
    found = names & (_YAML_SIGNS | _SGLANG_YAML_SIGNS)
    signs = len(found) + ("model" in names)
    return bool(found) and signs > 1 and not re.search(r"^\s*(?:image|services)\s*:", text, re.MULTILINE)


def _yaml_names(text: str) -> set[str]:
    return {found[1].replace("_", "-") for line in text.splitlines() if (found := _YAML_LINE.match(line))}


def _is_sglang(text: str) -> bool:
    """Return True for a command of SGLang, or a YAML config with lines that only SGLang has and none that only vLLM has."""
    if re.search(f"{_SGLANG_SIGN}|{_VLLM_SIGN}", text) or not _is_yaml(text):
        return re.search(_SGLANG_SIGN, text) is not None
    names = _yaml_names(text)
    return bool(names & _SGLANG_YAML_SIGNS) and not names & {"max-model-len", "gpu-memory-utilization"}


def _as_yaml(text: str) -> str:
    """Return the variables of a container (RunPod's worker-vllm), or a flat JSON (Triton's model.json), as YAML."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return text
        flat = isinstance(found, dict) and {"model", "model_path"} & found.keys()
        values = ((name, one if isinstance(one, str) else json.dumps(one)) for name, one in found.items()) if flat else ()
        return "\n".join(f"{name}: {one}" for name, one in values) or text
    named = {name.lower().replace("model_name", "model"): value for name, value in _ENV_LINE.findall(text)}
    signs = {name.replace("_", "-") for name in named} & _YAML_SIGNS
    return "\n".join(f"{name}: {value}" for name, value in named.items()) if signs and len(named) > 1 else text


def with_command(log: StartupLog, text: str) -> StartupLog:
    """Return a log with the flags of the command that its text begins with, if the log itself names no model.

    A log of llama.cpp does not have all flags; those that it lacks are the command's.
    """
    joined = re.sub(r"[\\^`][ \t]*\r?\n", " ", text[:MAX_CHARACTERS])
    programs = _LLAMA_SIGN if log.engine == "llama.cpp" else f"{_PROGRAM}|{_SGLANG_PROGRAM}"
    line = next((line for line in joined.splitlines() if re.search(programs, line)), None)
    if line is None or ("model" in log.figures and log.engine != "llama.cpp"):
        return log
    try:
        launch = read_launch(line)
    except RequestError:
        return log
    if log.engine == "llama.cpp":
        named = {} if launch.arch is None else {"arch": launch.arch}
        own = {key: value for key, value in (named | dict(launch.items)).items() if key not in ("mode", "engine")}
        return replace(log, figures={**own, **log.figures})
    found: dict[str, float | str] = {"model": launch.model} if launch.model else {}
    for key, value in launch.items.items():
        if key in _NUMBERS and re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,6})?", value):
            found[key] = float(value)
    found |= {"enable_lora": "True"} if {"max_loras", "max_lora_rank"} & launch.items.keys() else {}
    found |= {"ep": "True"} if launch.items.get("ep") == "1" else {}
    found |= {"kv": "fp8"} if launch.items.get("kv") == "fp8" else {}
    found |= {"enforce_eager": "True"} if launch.items.get("enforce_eager") == "1" else {}
    found |= {"layout": launch.items["weights"]} if "weights" in launch.items else {}
    found |= {key: launch.items[key] for key in ("engine_version", "speculative", "pool") if key in launch.items}
    return replace(log, figures=found | log.figures)


def read_launch(text: str) -> Launch:
    """Return the keys of a query that a command corresponds to.

    Raises:
        RequestError: A flag belongs to another server, or has no value.
    """
    text = with_values(_listed(text))
    text = text if re.search(_SIGNS, text) else _as_yaml(text)
    variables = {found[1]: found[2] for found in _VARIABLE.finditer(text)}
    if not re.search(_SIGNS, text) and (other := as_command(text)) is not None:
        launch = read_launch(other[0])
        return replace(launch, unmatched=(*([other[1]] if other[1] else []), *launch.unmatched))
    if re.search(_HELM_SIGN, text):
        text = _helm_command(text)
    if re.search(_KSERVE_SIGN, text):
        text = re.sub(r"--model_name\b", "--served-model-name", re.sub(r"--model_id\b", "--model", text))
    text = _plain(text)
    if re.search(_LLAMA_SIGN, text) and not re.search(f"{_VLLM_SIGN}|{_SGLANG_SIGN}", text):
        return _read_llama(text, variables)
    engine = "sglang" if _is_sglang(text) else "vllm"
    in_yaml = _is_yaml(text) and not re.search(f"{_VLLM_SIGN}|{_SGLANG_SIGN}", text)
    pairs = list(_yaml_pairs(text) if in_yaml else _pairs(_words(text), engine))
    items: dict[str, str] = {"mode": "serve"} | ({"engine": engine} if engine != "vllm" else {})
    if image := _IMAGE.search(text):
        items["engine_version"] = image[1]
    read: list[tuple[str, str]] = []
    unmatched: list[str] = []
    for name, value in variables.items():
        if name == "VLLM_USE_FLASHINFER_SAMPLER" and value in ("1", "true", "True"):
            items["sampler"] = "flashinfer"
            read.append((f"{name}={value}", "sampler=flashinfer"))
        elif name in _UNCOUNTED_VARIABLES and not (name == "VLLM_USE_V1" and value == "1"):
            unmatched.append(f"{name}={value}: {_UNCOUNTED_VARIABLES[name]}")
    model, irrelevant, adapters = "", 0, ""
    limits: dict[str, int] = {}
    limited: list[str] = []
    draft: dict[str, object] = {}
    drafting: list[str] = []
    for name, value in pairs:
        given = f"--{name}{f' {value}' if value else ''}"
        key = _VALUES[engine].get(name)
        if name in _SWITCHES[engine] and "$" in value:
            unmatched.append(f"{given}: its value is not in the text")
        elif name in _SWITCHES[engine]:
            if value.lower() != "false":
                switch, state = _SWITCHES[engine][name]
                items[switch] = state
                read.append((given, f"{switch}={state}"))
        elif engine == "vllm" and name == ADAPTERS:
            adapters = given if value.lower() != "false" else ""
        elif engine == "vllm" and (name == "lora-modules" or (name == "lora-dtype" and value in _HALVES)):
            irrelevant += 1
        elif engine == "vllm" and (name.partition(".")[0] == DRAFTING or name in _DRAFT_FLAGS):
            draft |= _draft(name, value)
            drafting.append(given)
        elif engine == "sglang" and name in _SGLANG_DRAFT_FLAGS:
            draft[_SGLANG_DRAFT_FLAGS[name]] = value
            drafting.append(given)
        elif engine == "vllm" and name.startswith(LIMITS):
            limits |= _limits(name, value)
            limited.append(given)
        elif key is not None and "$" in value and key != "model":
            unmatched.append(f"{given}: its value is not in the text")
        elif key is None:
            _check_engine(name, engine)
            alike = value in _ALIKE.get(name, ()) or (name == "load-format" and value.startswith("runai"))
            if alike or (name == "dtype" and value in _HALVES) or name.startswith(_IRRELEVANT):
                irrelevant += 1
            elif name == "config":
                unmatched.append(f"{given}: its lines are not read; paste them")
            elif name.startswith(_UNCOUNTED):
                direction = next((words for beginning, words in _DIRECTIONS.items() if name.startswith(beginning)), "")
                unmatched.append(f"{given}: {direction}" if direction else given)
            else:
                unmatched.append(f"{given}: not known as a flag of {ENGINES[engine].title}{_meant(name, engine)}")
        elif not value:
            raise RequestError(f"--{name} has no value", given=quote(f"--{name}"), todo="write its value after it")
        elif key == "model":
            model = value
        elif found := dict(_items(name if key == "pool" else key, value, engine)):
            items |= {"pool": f"{items['pool']},{found['pool']}"} if key == "pool" and "pool" in items else found
            read.append((given, "&".join(f"{one}={text}" for one, text in found.items())))
        elif engine == "sglang" and (key, value) == ("kv", "fp4_e2m1"):
            # pool_configurator.py, _compute_cell_size: half a byte a value, and one byte for 16 values
            unmatched.append(f"{given}: the cache is planned in 16 bits; keys and values in 4 bits take 9/32 of it: more tokens")
        else:
            unmatched.append(unread_layout(value) if key == "layout" else given)
    if limited and {"image", "video"} <= limits.keys() and not any(limits.values()):
        items["inputs"] = "text"
        read.append((" ".join(limited), "inputs=text"))
    else:
        unmatched += [f"{one}: as many of the largest images as without it are encoded" for one in limited]
    if drafting:
        if engine == "sglang":
            algorithm, path, tokens, steps = (str(draft.get(key) or "") for key in ("algorithm", "path", "tokens", "steps"))
            counted, drafter, draft = read_sglang_draft(algorithm, path, model, tokens, steps), path, {}
        else:
            method, drafter, tokens = (str(draft.get(key) or "") for key in ("method", "model", "num_speculative_tokens"))
            counted = read_draft(method, drafter, tokens)
        if counted:
            items["speculative"] = counted
            read.append((" ".join(drafting), f"speculative={counted}"))
            unmatched += [f"{key} of --{DRAFTING}" for key in draft if key not in _DRAFT_KEYS]
            unmatched += [unread_head(drafter)] if counted.partition(":")[0] in (EAGLE, EAGLE3) and drafter else []
        else:
            unmatched += [f"{one}: {UNCOUNTED_DRAFT}" for one in drafting]
    if items.pop("dp_attention", None) is not None:
        groups = items.pop("dp", None) or items.get("attn_dp", "1")  # within the GPUs of tensor parallel
        items["attn_dp"] = groups
        read = [row for row in read if row[1] not in (f"dp={groups}", "dp_attention=1")]
        read.append((f"--enable-dp-attention --dp-size {groups}", f"attn_dp={groups}"))
    if adapters:
        if not {"max_loras", "max_lora_rank"} & items.keys():
            items["max_loras"] = "1"
            read.append((adapters, "max_loras=1"))
    else:  # vLLM reads adapter flags only with --enable-lora
        ignored = {f"{key}={items.pop(key)}" for key in _LORA_KEYS if key in items}
        irrelevant += len(ignored)
        read = [row for row in read if row[1] not in ignored]
    arch = arch_of(model)
    if "gguf" in model.lower() and (arch := arch_of_file(model)) is not None:
        unmatched.append(f"model {model}: weights of a GGUF file are counted in 16 bits with {ENGINES[engine].title}")
    if arch is not None and "weights" not in items and (layout := _layout_of_folder(model, arch)):
        items["weights"] = layout
        read.insert(0, (f"model {model}", f"weights={layout}"))
    if arch is not None:
        read.insert(0, (f"model {model}", f"arch={arch}"))
    if (servers := _servers(text)) > 1:
        unmatched.insert(0, f"the text starts {servers} servers: the last one is read; paste one of them")
    return Launch(
        engine=engine,
        model=model,
        arch=arch,
        items=items,
        read=tuple(read),
        unmatched=tuple(unmatched),
        irrelevant=irrelevant,
    )


def _layout_of_folder(model: str, arch: str) -> str:
    """Return the layout that the name of a preset's folder says, such as Qwen3-32B-AWQ; empty for another model."""
    found = re.fullmatch(r"(.{1,300})[-_](fp8|awq|gptq|w8a8)(?:-dynamic|-int4)?/?", model, re.IGNORECASE)
    return found[2].lower() if found and arch.startswith("hf:") and arch_of(found[1]) == arch else ""


# Flags of llama.cpp by their meaning; others change no memory that is counted.
_LLAMA_FLAGS = {
    **dict.fromkeys(("m", "model"), "model"),
    **dict.fromkeys(("hf", "hfr", "hf-repo"), "repository"),
    **dict.fromkeys(("hff", "hf-file"), "file"),
    **dict.fromkeys(("c", "ctx-size"), "tokens"),
    **dict.fromkeys(("np", "parallel"), "slots"),
    **dict.fromkeys(("ngl", "gpu-layers", "n-gpu-layers"), "layers"),
    **dict.fromkeys(("ncmoe", "n-cpu-moe"), "host_experts"),
    **dict.fromkeys(("ub", "ubatch-size"), "micro_batch"),
    **dict.fromkeys(("ctk", "cache-type-k"), "keys"),
    **dict.fromkeys(("ctv", "cache-type-v"), "values"),
    **dict.fromkeys(("ts", "tensor-split"), "shares"),
    **dict.fromkeys(("sm", "split-mode"), "mode"),
    **dict.fromkeys(("dev", "device"), "devices"),
}
_LLAMA_SWITCHES = {
    **dict.fromkeys(("cmoe", "cpu-moe"), "host_experts"),  # the experts of all layers
    **dict.fromkeys(("no-mmproj", "no-mmproj-auto"), "projector"),
}
_LLAMA_NUMBERS = {
    "slots": "max_num_seqs",
    "micro_batch": "max_num_batched_tokens",
    "layers": "gpu_layers",
    "host_experts": "cpu_moe",
}
_LLAMA_DRAFTS = ("md", "model-draft", "hfd", "hfrd", "hf-repo-draft")
_LLAMA_UNCOUNTED = {
    **dict.fromkeys(("ot", "override-tensor"), "tensors are counted where llama.cpp puts them without it"),
    **dict.fromkeys(("nkvo", "no-kv-offload"), "the cache is counted on the device"),
    **dict.fromkeys(_LLAMA_DRAFTS, "a draft model is not counted"),
    **dict.fromkeys(("mm", "mmproj", "mmu", "mmproj-url"), "the projector of images is not counted"),
    **dict.fromkeys(("mla", "fmoe", "amb", "rtr", "mla-use"), "a flag of ik_llama.cpp, whose buffers are not counted"),
    "rpc": "layers on other machines are counted here",
    "swa-full": "windows are counted with the tokens that they keep without it",
    **dict.fromkeys(("lora", "lora-scaled", "control-vector", "control-vector-scaled"), "its tensors are not counted"),
}
# Other flags of llama.cpp that change memory.
_LLAMA_NAMES = """
    embedding embeddings embd-gemma-default rerank reranking pooling draft image audio n-cpu-ffn ncffn mtp eagle3 dflash
    spec-type spec-default spec-draft-model spec-draft-hf image-max-tokens image-min-tokens mtmd-batch-max-tokens
    override-kv no-op-offload no-repack no-host models-dir models-max models-preset gpt-oss-20b-default gpt-oss-120b-default
    vision-gemma-4b-default vision-gemma-12b-default fim-qwen-1.5b-default fim-qwen-3b-default fim-qwen-7b-default
    fim-qwen-7b-spec fim-qwen-14b-spec fim-qwen-30b-default mu model-url docker-repo dr
"""
# Flags that change no memory of the device, and beginnings of such flags.
_LLAMA_SHORT = """
    a b C Cb Cbd Cd Cr Crb Crbd Crd ag bf bs cb cl cnv co cram cms ctxcp dt e f fit fitc fitp fitt gan gaw h hft host i
    if j jf kvo kvu kv-offload kv-unified l lcd lcs lm lv lzm main-gpu mg mli mmap mlock n nr o op-offload p perf poll port
    ppl pps prio ptc r rea s slots sp sps st sys sysf t tags tb tbd td to tools ui v webui tgs devd ngld cmoed ncmoed ctkd
    ctvd otd api-key-file
"""
_LLAMA_BEGINNINGS = """
    adaptive- agent alias attention api- batch-size backend-sampling cache-idle cache-list cache-prompt cache-ram
    cache-reuse cache-type-k-draft cache-type-v-draft chat-template check checkpoint- color completion cont-batching
    context-shift conversation cors- cpu-mask cpu-moe-draft cpu-range cpu-strict ctx-checkpoints defrag device-draft
    direct-io display draft-max draft-min draft-n draft-p dry- nocb path dynatemp escape file fit- frequency
    gpu-layers-draft grammar grp-attn help hf-token ids ignore-eos in- interactive jinja json-schema keep
    kv-unified-per lazy list-devices load-mode log- logit-bias lookup- mcp- media metrics method min-p mirostat mmproj-auto
    mmproj-offload models-autoload multiline n-cpu-moe-draft n-gpu-layers-draft n-predict no- numa offline override-tensor-d
    parse poll- predict prefill-assistant presence print- prio- prompt props reasoning repack repeat reuse-port reverse
    rope- sampl seed server-base show- simple sleep-idle single-turn skip-chat slot- slots spec-draft-backend spec-draft-cpu
    spec-draft-device spec-draft-n spec-draft-o spec-draft-p spec-draft-t spec-ngram spec-synth special spm-infill sse- ssl-
    static-path stdin swa-checkpoints system-prompt temp threads threads- timeout tools- top- typical ui- usage verbos
    version video warmup webui- xtc- yarn- ssl think
"""
LLAMA_FLAGS = (*_LLAMA_NAMES.split(), *_LLAMA_FLAGS, *_LLAMA_SWITCHES, *_LLAMA_UNCOUNTED)
_LLAMA_IRRELEVANT = frozenset(_LLAMA_SHORT.split())
_ALL_LAYERS = 99  # what people write for -ngl
_LONG_SHORT = ("nkvo", "cmoe", "ncmoe", "fmoe", "hfrd")  # flags with one dash


def _read_llama(text: str, variables: Mapping[str, str]) -> Launch:
    """Return the question of a command of llama.cpp with its environment variables. Its context is shared by all slots."""
    programs = [found for found in re.finditer(_LLAMA_SIGN, text) if not found[0].startswith("LLAMA_ARG")]
    rest = re.sub(r"\bLLAMA_ARG_\w{1,60}(?:=\S*|\s*:\s*\S+)?", "", text[programs[-1].end() :]) if programs else ""
    try:
        words = shlex.split(rest, comments=True)
    except ValueError:  # a quote that is not closed
        words = rest.split()
    named = ((name.removeprefix("LLAMA_ARG_").lower().replace("_", "-"), value) for name, value in variables.items())
    pairs = [(_LLAMA_VARIABLES.get(name, name), value) for name, value in named if name not in ("", "host", "port")]
    items, read, unmatched, irrelevant, found = {"mode": "serve", "engine": "llama.cpp"}, [], [], 0, {}
    if (servers := len(re.findall(rf"{_LLAMA_PROGRAM}[\"']?\s+-", text))) > 1:
        unmatched.append(f"the text starts {servers} servers: the last one is read; paste one of them")
    for name, value in (*pairs, *_pairs(words, "llama.cpp")):
        given = f"{'-' if len(name) < 4 or name in _LONG_SHORT else '--'}{name}{f' {value}' if value else ''}"
        if (meaning := _LLAMA_FLAGS.get(name)) is not None and value:
            found[meaning] = (given, value)
        elif name in _LLAMA_SWITCHES:
            found[_LLAMA_SWITCHES[name]] = (given, str(MAX_LAYERS))
        elif name in _LLAMA_UNCOUNTED:
            draft = arch_of_file(value) if name in _LLAMA_DRAFTS and value else None
            more = f"; its weights, cells and buffer are about those of arch={draft} with the same flags" if draft else ""
            unmatched.append(f"{given}: {_LLAMA_UNCOUNTED[name]}{more}")
        elif name in ("fa", "flash-attn") and value in ("0", "off", "disabled"):
            items["fa"] = "0"
            read.append((given, "fa=0"))
        elif name in LLAMA_FLAGS:
            unmatched.append(given)
        elif name in ("fa", "flash-attn") or name in _LLAMA_IRRELEVANT or name.startswith(tuple(_LLAMA_BEGINNINGS.split())):
            irrelevant += 1
        else:
            near = suggest(name, LLAMA_FLAGS)
            unmatched.append(f"{given}: not known as a flag of llama.cpp{f'; {near}' if near else ''}")
    given, model = found.get("model", ("", ""))
    (of_repository, repository), (of_name, name) = (found.get(one, ("", "")) for one in ("repository", "file"))
    given, model = (of_repository, repository) if repository else (given, model)
    arch = arch_of_file(model)
    if arch is not None:
        read.append((given, f"arch={arch}"))
    file_type, exact = file_type_of(name or model)
    if file_type is None and repository and not name:
        file_type, exact = "mxfp4" if "gpt-oss" in model.lower() else "q4_k_m", True
        unmatched.append(f"{given}: without a file's type llama.cpp takes Q4_K_M, or the first file of the repository")
    if repository and "projector" not in found and _has_projector(arch) and not any("projector" in line for line in unmatched):
        unmatched.append(f"{given}: the projector of images, which -hf loads without --no-mmproj, is not counted")
    if file_type is not None:
        items["weights"] = file_type
        read.append((of_name or given, f"weights={file_type}"))
    if model and not exact:
        counted = "in 16 bits" if file_type is None else f"as {file_type.upper()}"
        unmatched.append(f"{given}: weights are counted {counted}, whatever the GGUF file holds")
    for meaning, key in _LLAMA_NUMBERS.items():
        given, number = found.get(meaning, ("", ""))
        if not given or (meaning == "layers" and (number in ("-1", "all") or (number.isdecimal() and int(number) >= _ALL_LAYERS))):
            continue
        if number.isascii() and number.isdecimal() and len(number) < 7 and (int(number) or meaning == "layers"):
            items[key] = number
            read.append((given, f"{key}={number}"))
        elif number != "auto":
            unmatched.append(f"{given}: not a number")
    _read_devices(found, items, read, unmatched)
    cached = {found[meaning][1].lower() for meaning in ("keys", "values") if meaning in found}
    if len(cached) == 1 and {"keys", "values"} <= found.keys() and cached <= set(ENGINES["llama.cpp"].kv):
        items["kv"] = cached.pop()
        read.append((f"{found['keys'][0]} {found['values'][0]}", f"kv={items['kv']}"))
    elif cached - {"f16", "bf16"}:
        given = " ".join(found[meaning][0] for meaning in ("keys", "values") if meaning in found)
        unmatched.append(f"{given}: the cache is counted in 16 bits; kv=q8_0 counts keys and values in 8 bits")
    given, tokens = found.get("tokens", ("", ""))
    if given and not tokens.isdecimal():
        unmatched.append(f"{given}: not a number")
    if tokens.isdecimal() and int(tokens) > 0:
        each = max(1, int(tokens) // int(items.get("max_num_seqs", "1")))
        items["max_model_len"] = str(each)
        read.append((given, f"max_model_len={each}"))
    return Launch(
        engine="llama.cpp", model=model, arch=arch, items=items, read=tuple(read), unmatched=tuple(unmatched), irrelevant=irrelevant
    )


def _has_projector(arch: str | None) -> bool:
    """Return True for a preset that reads images or sounds."""
    return arch is not None and arch.startswith("hf:") and find_preset(arch[3:]).modality == "multimodal"


def _read_devices(
    found: dict[str, tuple[str, str]], items: dict[str, str], read: list[tuple[str, str]], unmatched: list[str]
) -> None:
    """Read the number of devices from -ts, their shares, or from -dev, their names; -sm none has one."""
    mode, (given, shares) = found.get("mode", ("", "layer"))[1], found.get("shares", ("", ""))
    if mode not in ("layer", "none"):
        unmatched.append(f"{found['mode'][0]}: whole layers are counted on each device, as with -sm layer")
    each = [share for share in re.split(r"[,/]+", shares) if re.fullmatch(r"[0-9.]{1,12}", share) and share.strip("0.")]
    if not each:
        given, names = found.get("devices", ("", ""))
        each = [name for name in names.split(",") if name and name != "none"]
    if mode != "none" and 1 < len(each) <= MAX_LAYERS:
        items["pp"] = str(len(each))
        read.append((given, f"pp={len(each)}"))
        if shares and len(set(each)) > 1:
            unmatched.append(f"{given}: layers are counted in equal shares")


def _draft(name: str, value: str) -> dict[str, object]:
    """Return keys of --speculative-config: of its JSON, of a flag with a point, or of a flag of its own; empty for other text."""
    if name in _DRAFT_FLAGS:
        return {_DRAFT_FLAGS[name]: value}
    _, point, key = name.partition(".")
    if point:
        return {key.replace("-", "_"): value}
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    named = found.items() if isinstance(found, dict) else ()
    return {key.replace("-", "_"): one for key, one in named if re.fullmatch(r"[a-z_-]{1,60}", key)}


def _limits(name: str, value: str) -> dict[str, int]:
    """Return how many images, videos or sounds a prompt may have: of JSON, of image=1,video=0, or of a flag with a point."""
    kind = name.removeprefix(LIMITS).lstrip(".")
    text = f"{kind}={value}" if kind else value
    return {found[1]: int(found[2]) for found in re.finditer(r"([a-z]{1,20})[\"']?\s{0,4}[=:]\s{0,4}([0-9]{1,6})", text)}


def _items(key: str, value: str, engine: str) -> Iterator[tuple[str, str]]:
    """Yield the query keys for a flag's value, none if the flag has no counterpart."""
    if key == "layout":
        if layout := LAYOUTS_OF_FLAGS.get(value.lower()):
            yield "weights", layout
    elif key == "kv":
        if value.lower().startswith("fp8"):
            yield "kv", "fp8"
        elif value.lower() in ("auto", "bfloat16", "bf16", "float16"):
            yield "kv", "auto"
    elif key == "ep":
        yield "ep", "0" if value == "1" else "1"
    elif (flag := key.replace("-", "_")) in POOL_FLAGS:
        if re.fullmatch(POOL_FLAGS[flag][0], value, re.ASCII) and value.strip("0."):
            yield "pool", f"{flag}:{value}"
    elif key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_bytes"):
        yield key, _number(value) if engine == "vllm" else WHOLE_PROMPTS if value == "-1" else value
    else:
        yield key, value


def _number(text: str) -> str:
    """Return a number as vLLM reads it: 8k is 8,000 and 8K is 8,192. Other texts are checked by the query."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmMgG])", text)
    return str(int(float(found[1]) * _UNITS[found[2]])) if found else text.replace("_", "")


def _check_engine(name: str, engine: str) -> None:
    """Raise RequestError for a flag that another server has."""
    if hint := _HINTS.get((engine, name)):
        other = "SGLang" if engine == "vllm" else "vLLM"
        raise RequestError(
            f"--{name} is a flag of {other}",
            given=f"a command of {ENGINES[engine].title}",
            allowed=f"{hint} in its place",
            todo=f"write {hint}, or the command of {other}",
        )


def _meant(name: str, engine: str) -> str:
    near = suggest(name, [*_VALUES[engine], *_SWITCHES[engine]])
    return f"; {near}" if near else ""


def _plain(text: str) -> str:
    """Return a text with continued lines joined, without comments, and with the items of lists as words."""
    text = re.sub(r"[\\^`][ \t]*\r?\n", " ", text)
    text = re.sub(r"(?<!\w)[A-Za-z]:\\[^\s\"']{1,300}", lambda found: found[0].replace("\\", "/"), text)  # C:\models
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    text = re.sub(r"(?m)^[ \t]*-[ \t]+(?=\S)", " ", text)
    text = re.sub(r"(?m)[\"'][ \t]*,[ \t\r\n]*(?=[\"'])", '" ', text) if re.search(r"\[\s*[\"']", text) else text
    text = re.sub(r"\[(?=\s*[\"'])|(?<=[\"'])\s*\]", " ", text)
    return re.sub(r"(?<!\S)([\"'])([\w./:@=+~-]+)[\"'](?!\S)", r"\2", text)


_LISTED = re.compile(
    r"\[\s*[\"'](?:vllm[\"']\s*,\s*[\"']serve|[\w./]*python3?[\"']\s*,\s*[\"']-m[\"']\s*,\s*[\"'](?:vllm|sglang)\.)"
)
_VALUE = r"[\w./:-]{1,200}"
_CONSTANT = re.compile(
    rf"(?m)^[ \t]*([A-Za-z_]\w{{0,60}})[ \t]*(?::[ \t]*\w{{1,20}}[ \t]*)?=[ \t]*[\"']?({_VALUE})[\"']?[ \t]*(?:#.*)?$"
)
_GIVEN = re.compile(
    rf"(?m)(?:(?:^|[\s-])([A-Z][A-Z0-9_]{{1,60}})[\"']?(?:=|:[ \t]+)|^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w{{0,60}})=)"
    rf"[\"']?({_VALUE})[\"']?[ \t]*;?[ \t]*(?:#.*)?$"
)


def _listed(text: str) -> str:
    """Return a list in Python code as a command: ["vllm", "serve", MODEL] is `vllm serve` with MODEL's text, else with $MODEL.

    A call such as str(GPUS) is the name in it.
    """
    sign = _LISTED.search(text)
    if sign is None or not re.search(r"(?m)^[ \t]*[\w.]{1,80}[ \t]*(?:\+?=|:[ \t]*list)|\(\s*\[", text):
        return text
    name = re.search(r"([A-Za-z_]\w{0,60})[ \t]*(?::[ \t]*[\w\[\]]{1,20}[ \t]*)?=[ \t]*$", text[: sign.start()])
    rest = text[sign.start() :]
    lists = [rest[1:].partition("]")[0]]
    if name is not None:
        grows = rf"(?m)^[ \t]*{name[1]}(?:[ \t]*\+=[ \t]*\[|\.extend\([ \t]*\[|\.append\()([^\]\n]{{0,600}})"
        lists += [found.removesuffix(")") if found.count(")") > found.count("(") else found for found in re.findall(grows, rest)]
    names = dict(_CONSTANT.findall(text))
    return " ".join(word for items in lists for word in _listed_words(items, names))


def _listed_words(items: str, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of a list's items. Of a choice the first word is taken, with the condition's name as its value."""
    choice = re.fullmatch(r"\s*[\"']([^\"']{1,200})[\"']\s+if\s+(\w{1,60})\s+else\s+[\"']([^\"']{1,200})[\"']\s*,?\s*", items)
    if choice is not None:
        said = names.get(choice[2])
        yield choice[1] if said == "True" else choice[3] if said == "False" else f"{choice[1]}=${choice[2]}"
        return
    for double, single, name in re.findall(r"\"([^\"]{0,300})\"|'([^']{0,300})'|([A-Za-z_]\w{0,60})(?=\s*[,)\]]|\s*$)", items):
        yield shlex.quote(double or single) if double or single else names.get(name, f"${name}")


def with_values(text: str) -> str:
    """Return a text with $NAME replaced by its value, if the text gives one: NAME=value, NAME: value, or ${NAME:-value}."""
    given = {first or second: value for first, second, value in _GIVEN.findall(text)}

    def value(found: re.Match[str]) -> str:
        return given.get(found[1] or found[2]) or found[3] or found[0]

    return re.sub(r"\$(?:([A-Za-z_]\w{1,60})\b|\{([A-Za-z_]\w{1,60})(?::-([^}]{1,200}))?\})", value, text)


def _servers(text: str) -> int:
    """Return how many servers a text starts: programs, or images without a program of their own."""
    programs = len(re.findall(rf"{_PROGRAM}|{_SGLANG_PROGRAM}", text))
    images = len(re.findall(r"(?:vllm/vllm-openai|lmsysorg/sglang)[:@\s]", text))
    return max(programs, images)


def _helm_command(text: str) -> str:
    """Return the command of values of vLLM's Helm chart (production-stack): `modelURL`, `tag`, and the keys below `vllmConfig`."""
    tag, model = (re.search(rf"(?m)^[ \t-]*{key}[ \t]*:[ \t]*[\"']?([^\s\"'#]+)", text) for key in ("tag", "modelURL"))
    sign = re.search(_HELM_SIGN, text)
    begin = sign.end() if sign else 0
    indent = len(sign[0]) - len(sign[0].lstrip()) if sign else 0
    words = [f"vllm/vllm-openai:{tag[1]}"] if tag else []
    words += ["vllm serve", shlex.quote(model[1])] if model else ["vllm serve"]
    lines = text[begin:].splitlines()[1:]
    for line in itertools.takewhile(lambda line: not line.strip() or len(line) - len(line.lstrip()) > indent, lines):
        found = re.match(r"[ \t]*([a-z][A-Za-z0-9]{0,60})[ \t]*:[ \t]*(.+?)[ \t]*$", line)
        if found is None:
            continue
        name, value = re.sub(r"[A-Z]", lambda letter: f"-{letter[0].lower()}", found[1]), found[2].strip("\"'")
        if name == "extra-args":
            words += re.findall(r"[\"']([^\"']{1,300})[\"']", value)
        elif value.lower() == "true":
            words.append(f"--{name}")
        elif value.lower() != "false" and name not in ("v1", "v0"):
            words.append(f"--{name} {shlex.quote(value)}")
    return " ".join(words)


def _words(text: str) -> list[str]:
    """Return the words of a command after its program; after its image if it names no program."""
    program = rf"{_PROGRAM}|{_SGLANG_PROGRAM}"
    found = list(re.finditer(program, text)) or list(re.finditer(r"(?m)^\s*(?:command|args)\s*:\s*[>|]?-?|^[ \t]*Exec=", text))
    found = found or list(re.finditer(r"(?:vllm/vllm-openai|lmsysorg/sglang)\S*", text))
    rest = text[found[-1].end() :] if found else text
    if found and found[-1][0].lstrip().startswith(("command", "args", "Exec")):
        rest = re.split(r"(?m)^\s*[A-Za-z_]+\s*[:=]", rest)[0]  # up to the next key of the file
    try:
        return shlex.split(rest, comments=True)
    except ValueError:  # a quote that is not closed
        return rest.replace("'", " ").replace('"', " ").split()


def _pairs(words: list[str], engine: str) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command with their values, the model without a flag first."""
    position, named = 0, False
    if engine != "llama.cpp" and words and not words[0].startswith("-") and words[0] not in _ENDS:
        yield "model", words[0]
        position, named = 1, True
    while position < len(words):
        word = words[position]
        position += 1
        if word in _ENDS:
            return
        if not re.match(r"--?[A-Za-z]", word):
            if engine == "vllm" and not named and (REPO_ID.fullmatch(word) or word.startswith(("/", "./", "~/"))):
                named = True  # vllm serve --port=8000 Qwen/Qwen3-8B
                yield "model", word
            continue
        name, sign, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        named = named or name in ("model", "model-tag")
        if engine != "llama.cpp":
            name = _lengthened(name) if engine == "vllm" and not word.startswith("--") else _completed(name, engine)
        if not sign and position < len(words) and not _begins_flag(words[position]) and name not in _SWITCHES.get(engine, ()):
            value = words[position]
            position += 1
        elif not sign and position < len(words) and words[position].lower() in ("true", "false"):
            value = words[position]  # of a switch, as in `--enforce_eager False`
            position += 1
        yield name, value


def _lengthened(name: str) -> str:
    """Return the long name of a flag with one dash, with the text after its point; -O3 is a level of compiling."""
    short, point, rest = name.partition(".")
    return _SHORT.get(short, "compilation-config" if re.fullmatch(r"O[0-9]?", short) else short) + point + rest


def _completed(name: str, engine: str) -> str:
    """Return the only known flag that a prefix matches, as argparse does; the name itself if no flag or several match."""
    known = {**_VALUES[engine], **_SWITCHES[engine]}
    if name in known or name.startswith((*_UNCOUNTED, *_IRRELEVANT)) or len(name) < SHORTEST_PREFIX:
        return name
    fitting = [flag for flag in known if flag.startswith(name)]
    return fitting[0] if len(fitting) == 1 else name


def _begins_flag(word: str) -> bool:
    return word in _ENDS or re.match(r"--?[A-Za-z]", word) is not None


def _yaml_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a YAML config as flags; true switches are given, false ones not."""
    for line in text.splitlines():
        found = _YAML_LINE.match(line.partition(" #")[0])
        if found is None or not found[2]:
            continue
        name, value = found[1].replace("_", "-"), found[2].strip("\"'")
        if value.lower() == "true":
            yield name, ""
        elif value.lower() != "false":
            yield name, value
