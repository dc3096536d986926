"""A startup log of llama.cpp as figures: flags, the file's type, and the buffers of weights, cells and compute on devices and host.

Read: llama.cpp of 2024 (llm_load_tensors, llama_new_context_with_model) to b11549 (load_tensors, llama_context, sched_reserve),
alone or within the logs of Ollama and LM Studio. Ollama's own engine prints other lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from sizer.base.errors import RequestError
from sizer.base.units import MIB
from sizer.catalogue.presets import find_preset, list_presets
from sizer.catalogue.serving import ENGINES, FEW_OUTPUTS, FILE_TYPES
from sizer.catalogue.sources import arch_of

SIGNS = (
    r"\b(?:llama_model_loader|llama_kv_cache\w{0,20}|llama_context|llama_init_from_model|llama_new_context_with_model|"
    r"llm_load_\w{1,20}|load_tensors|sched_reserve|graph_reserve|ggml_\w{1,40}_alloc_buffer|ggml_gallocr_reserve\w{0,10}|"
    r"ggml_cuda_init): "
)
FAILURES = (
    ("the compute buffer does not fit", r"failed to allocate (?:\w{1,20} )?compute|graph_reserve: failed to alloc"),
    ("the cache does not fit", r"failed to allocate buffer for (?:kv|rs) cache|failed to initialize the memory"),
    ("the weights do not fit", r"unable to allocate \S{1,40} buffer"),
    ("out of memory", r"cudaMalloc failed: out of memory|ErrorOutOfDeviceMemory"),
)
# Names of types as llama.cpp prints them, llama_model_ftype_name in src/llama-model-loader.cpp, if they differ from the file's.
_PRINTED = {"all f32": "f32", "mxfp4 moe": "mxfp4", "iq3_s mix - 3.66 bpw": "iq3_m", "q2_k - medium": "q2_k"}
_BUFFER = re.compile(
    r"(\w{1,60}): {1,60}(\S{1,60}) {1,20}(?:(model|KV|RS|compute) )?buffer size {0,8}= {0,12}([0-9]{1,9}(?:\.[0-9]{1,4})?) MiB"
)
_HOST = re.compile(r"CPU|BLAS|AMX|\w*_?Host\b")
_OTHER_CONTEXTS = ("alloc_compute_meta", "clip_model_loader")  # of the projector of images
# For each figure, the texts that contain it, the newest wording first.
_FIGURES: dict[str, tuple[str, ...]] = {
    "engine_version": (r"\bbuild(?:_info)?: b?([0-9]{3,6})\b", r"\bversion: ([0-9]{3,6}) \("),
    "path": (r"load_model: loading model '([^'\n]{1,300})'", r"tensors from (\S{1,300}) \(version GGUF"),
    "named": (r"general\.name +(?:str +)?= +(\S[^\n]{0,80})",),
    "file_type": (r"(?:file type|model ftype) +=\s(\w[^\n(]{0,40})",),
    "tokens": (r"\bn_ctx +=\s{1,4}([0-9]{1,9})",),
    "sequences": (r"\bn_seq_max +=\s{1,4}([0-9]{1,5})", r"initializing(?: slots)?, n_slots = ([0-9]{1,5})"),
    "unified": (r"\bkv_unified +=\s{1,4}(true|false|1|0)",),
    "max_num_batched_tokens": (r"\bn_ubatch +=\s{1,4}([0-9]{1,7})",),
    "flash": (r"[Ff]lash [Aa]ttention (?:was auto, set to )?(enabled|disabled)", r"\bflash_attn +=\s{1,4}(\w{1,12})"),
    "keys": (r"\bK \((\w{1,10})\):", r"type_k = '(\w{1,10})'"),
    "values": (r"\bV \((\w{1,10})\):", r"type_v = '(\w{1,10})'"),
    "offloaded": (r"offloaded ([0-9]{1,4})/[0-9]{1,4} layers",),
    "layers": (r"offloaded [0-9]{1,4}/([0-9]{1,4}) layers",),
    "device": (
        r"using device \w{1,20} \(([^)\n]{1,80})\)",
        r"\bDevice 0: ([^,\n]{1,80}), compute capability",
        r"found device: ([^\n]{1,60})",
    ),
    "total_mib": (r"\bDevice 0: [^\n]{1,120}VRAM: ([0-9]{1,7}) MiB",),
    "asked_mib": (r"allocating ([0-9.]{1,12}) MiB on device",),
    "asked": (r"failed to allocate \S{1,40} buffer of size ([0-9]{1,15})",),
}
_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_head_kv",
    "intermediate_size": "n_ff",
    "vocab_size": "n_vocab",
}
_FILE_TYPE = re.compile(rf"[-_.:](?:ud-)?({'|'.join(sorted(FILE_TYPES, key=len, reverse=True))})(?:_(xl|l))?(?=[-_.]|$)")
_FILE_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
_GGUF = re.compile(r"(?i)[-_.](?:i?q[0-9]\w{0,8}|bf16|f16|fp16|f32|mxfp4|ud|gguf)$")
_LONGEST_NAME = 200
_SIZE = r"[0-9]{1,3}(?:\.[0-9])?[Bb](?:-A[0-9]{1,2}(?:\.[0-9])?[Bb])?"
_FAMILIES = (  # names as the owners write them, so that fine-tuned models are not taken for them
    (
        rf"Qwen[0-9](?:\.[0-9])?(?:-(?:Coder|VL|Math|Next|Omni))?-{_SIZE}(?:-(?:Instruct|Thinking|Captioner))?(?:-2[0-9]{{3}})?",
        "Qwen",
    ),
    (rf"Llama-[0-9]\.[0-9]-{_SIZE}(?:-Vision)?(?:-Instruct)?", "meta-llama"),
    (rf"gemma-[234]n?-E?{_SIZE}-(?:it|pt)", "google"),
    (rf"Mistral-(?:Small|Nemo|Large)(?:-[0-9]\.[0-9])?(?:-{_SIZE})?-Instruct-[0-9]{{4}}", "mistralai"),
    (r"(?:Magistral|Devstral)-(?:Small|Medium)-[0-9]{4}", "mistralai"),
    (rf"DeepSeek-R1-(?:0528-Qwen3-8B|Distill-(?:Qwen|Llama)-{_SIZE})|DeepSeek-(?:R1|V3)(?:[-.][0-9]{{1,4}})?", "deepseek-ai"),
    (r"GLM-4\.[5-9](?:-Air|-Flash|V)?", "zai-org"),
    (rf"LFM2(?:\.5)?-{_SIZE}|LFM2(?:\.5)?-[0-9]{{3}}M", "LiquidAI"),
)


@dataclass(slots=True)
class _Load:
    """The buffers in MiB that one model's load printed, by kind and device, and the places in the log of the first and last."""

    start: int
    end: int
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)
    is_whole: bool = False

    def total(self, *kinds: str, on_host: bool = False) -> float:
        """Return the MiB of kinds of buffers on all devices, or on the host."""
        found = (pair for kind in kinds for pair in self.sizes.get(kind, {}).items())
        return sum(size for device, size in found if bool(_HOST.match(device)) == on_host)

    @property
    def devices(self) -> list[str]:
        """The names of the devices with weights."""
        return [device for device in self.sizes.get("model", {}) if not _HOST.match(device)]

    def fullest(self, *kinds: str) -> float:
        """Return the MiB of kinds of buffers on the device with the most bytes in all."""
        names = self.devices or [device for kind in self.sizes.values() for device in kind if not _HOST.match(device)]
        sums = {name: sum(sizes.get(name, 0.0) for sizes in self.sizes.values()) for name in names}
        name = max(sums, key=lambda one: sums[one], default="")
        return sum(self.sizes.get(kind, {}).get(name, 0.0) for kind in kinds)


def is_log(text: str) -> bool:
    """Return True for a log or an error of llama.cpp."""
    return re.search(SIGNS, text) is not None


def read_log(text: str) -> tuple[dict[str, float | str], str, tuple[str, ...]]:
    """Return the figures of a log, the failure, empty without one, and lines for what no query says.

    Figures that are keys of a query have its values. Sizes are in GiB: weights_gib, cache_gib and compute_gib on the fullest
    device, host_gib of weights on the host, unless the file is mapped there. Of several models, such as with a draft, the
    largest is read.
    """
    failure = next((said for said, pattern in FAILURES if re.search(pattern, text)), "")
    loads = list(_loads(text))
    load = max(reversed(loads), key=lambda one: one.total("model") + one.total("model", on_host=True), default=None)
    before = max((one.end for one in loads if load is not None and one.end < load.start), default=0)
    part = text if load is None else text[before : load.end + 4096]
    found = {name: value for name, patterns in _FIGURES.items() if (value := _find(patterns, part) or _find(patterns, text))}
    figures, uncounted = _flags(found, text), list(_uncounted(found, text, load, loads))
    if load is not None:
        mapped = sum(size for device, size in load.sizes.get("model", {}).items() if device == "CPU_Mapped")  # of the whole file
        sizes = {
            "weights_gib": load.fullest("model"),
            "host_gib": 0 if mapped else load.total("model", on_host=True),
            "cache_gib": load.fullest("KV", "RS"),
            "compute_gib": load.fullest("compute"),
        }
        figures |= {"pp": float(len(load.devices))} if len(load.devices) > 1 else {}
        kinds = {"weights_gib": "model", "cache_gib": "KV", "compute_gib": "compute"}
        figures |= {name: size / 1024 for name, size in sizes.items() if kinds.get(name) in load.sizes or size}
    return figures, failure, tuple(uncounted)


def _find(patterns: tuple[str, ...], text: str) -> str:
    """Return the first group of the first pattern that a text contains, empty without."""
    return next((found[1].strip() for pattern in patterns if (found := re.search(pattern, text))), "")


def _loads(text: str) -> Iterator[_Load]:
    """Yield the loads of models in a log: each begins with its weights; a second context of the same weights is left out."""
    load: _Load | None = None
    for found in _BUFFER.finditer(text):
        function, device, kind, size = found[1], found[2], found[3], float(found[4])
        kind = kind or ("model" if function.endswith("load_tensors") else "")
        if not kind or function in _OTHER_CONTEXTS:
            continue
        if load is None or (kind == "model" and load.sizes.keys() - {"model"}):
            if load is not None:
                yield load
            load = _Load(found.start(), found.end())
        load.is_whole = load.is_whole or (kind in ("KV", "RS") and "compute" in load.sizes)
        if load.is_whole and kind != "model":
            continue
        sizes = load.sizes.setdefault(kind, {})
        if kind != "compute" or device not in sizes:
            sizes[device] = sizes.get(device, 0.0) + size
        load.end = found.end()
    if load is not None:
        yield load


def _flags(found: dict[str, str], text: str) -> dict[str, float | str]:
    """Return the figures that are keys of a query, the model and the device."""
    figures: dict[str, float | str] = {}
    if build := found.get("engine_version"):
        figures["engine_version"] = f"b{int(build)}"
    elif found.get("max_num_batched_tokens") and "n_outputs_max" not in text:
        figures["older_than"] = float(FEW_OUTPUTS)  # later builds print n_outputs_max beside n_ubatch
    if file_type := _printed_type(found.get("file_type", "")):
        figures["weights"] = file_type
    if (arch := arch_of_file(found.get("path", "")) or _arch_of_sizes(text, found.get("named", ""))) is not None:
        figures["arch"] = arch
    if named := found.get("path") or found.get("named"):
        figures["model"] = named
    tokens, sequences = int(found.get("tokens", 0)), int(found.get("sequences", 1)) or 1
    if tokens:
        own = found.get("unified") in ("true", "1")
        figures["max_model_len"] = float(tokens if own else tokens // sequences)
        figures |= {} if own or sequences == 1 else {"max_num_seqs": float(sequences)}
    if batch := found.get("max_num_batched_tokens"):
        figures["max_num_batched_tokens"] = float(batch)
    if found.get("keys") == found.get("values") and found.get("keys") in ENGINES["llama.cpp"].kv:
        figures["kv"] = found["keys"]
    if found.get("offloaded") and found["offloaded"] != found.get("layers"):
        figures["gpu_layers"] = float(found["offloaded"])
    if experts := _host_experts(text):
        figures["cpu_moe"] = float(max(experts) + 1)
    if found.get("device"):
        figures["device"] = found["device"]
    if total := found.get("total_mib"):
        figures["total_gib"] = float(total) / 1024
    if asked := found.get("asked_mib") or found.get("asked"):
        figures["asked_gib"] = float(asked) / (1024 if "asked_mib" in found else 1024 * MIB)
    if flash := found.get("flash"):
        figures |= {"fa": 0.0} if flash in ("0", "disabled") and "kv" not in figures else {}
    return figures


def _host_experts(text: str) -> set[int]:
    """Return the layers whose experts a log places on the host."""
    found = re.findall(r"blk\.([0-9]{1,4})\.ffn_\w{1,20}_exps\S{0,20} .{0,60}overrid\w{2,4} to CPU", text)
    return {int(one) for one in found}


def _uncounted(found: dict[str, str], text: str, load: _Load | None, loads: list[_Load]) -> Iterator[str]:
    """Yield a text for each fact of a log that the question does not have."""
    smaller = [one for one in loads if load is not None and one.total("model") and one.total("model") < load.total("model")]
    if smaller or "creating MTP draft context" in text:
        yield "a second model or context, such as a draft"
    if "clip_model_loader" in text:
        yield "the projector of images"
    keys, values = found.get("keys", ""), found.get("values", "")
    if (experts := _host_experts(text)) and len(experts) <= max(experts):
        yield "experts of single layers on the host; those of the first layers are planned"
    if keys and values and (keys != values or keys not in ("f16", "bf16", *ENGINES["llama.cpp"].kv)):
        yield f"a cache with keys in {keys} and values in {values}; 16 bits are planned"
    if found.get("flash") in ("0", "disabled") and keys not in ("", "f16", "bf16"):
        yield "attention without -fa, which newer builds refuse with a quantized cache: it is planned with -fa"
    if "fused_moe" in text or "mla_attn" in text:
        yield "another graph: this is ik_llama.cpp, a fork"
    if "full-size SWA cache" in text:
        yield "--swa-full: all tokens of layers with a sliding window"
    name = found.get("path", "").lower()
    if found.get("file_type") and not file_type_of(name)[1] and file_type_of(name)[0]:
        yield "a file with tensors in other types than llama.cpp chooses (UD-, _L, _XL)"
    if found.get("unified") in ("true", "1") and int(found.get("sequences", 1)) > 1 and load is not None and "RS" in load.sizes:
        yield f"states of {found['sequences']} slots: one slot is planned"


def _printed_type(text: str) -> str | None:
    """Return the type of a file by the name that llama.cpp prints, None for another name."""
    name = text.lower().strip()
    name = _PRINTED.get(name) or re.sub(r"^(q\w_k) - ([sml])\w+$", r"\1_\2", name).split(" - ")[0]
    return name if name in FILE_TYPES else None


def _arch_of_sizes(text: str, named: str) -> str | None:
    """Return the preset of a model by its name in the file, else the first preset with the sizes that the log prints."""
    words = re.sub(r"\s+", "-", named.lower())
    found = arch_of_file(words) if words else None
    if found is not None:
        return found
    sizes = {name: _find((rf"\b{printed} +=\s{{1,4}}([0-9]{{1,7}})\b",), text) for name, printed in _SIZES.items()}
    if not all(sizes.values()):
        return None
    for preset in list_presets():
        config = preset.config
        config = config.get("text_config", config)
        if all(str(config.get(name)) == size for name, size in sizes.items()):
            return f"hf:{preset.key}"
    return None


def file_type_of(model: str) -> tuple[str | None, bool]:
    """Return the type of a GGUF file by its name or tag, and whether all of its tensors follow llama.cpp's own rules."""
    text = model[-_LONGEST_NAME:].lower().replace("fp16", "f16")
    found = list(_FILE_TYPE.finditer(text))
    if found:
        own = found[-1][2] is None and "ud-" not in found[-1][0]
        return found[-1][1], own
    named = re.search(r"[-_.:](q[345]_k)(_x?l)?(?=[-_.]|$)", text)
    return (_FILE_NAMES[named[1]], False) if named else (None, False)


def arch_of_file(model: str) -> str | None:
    """Return the preset of a GGUF file or repository, by its name without the layout.

    A name in the style of a known family is a repository of the family's owner. None for another name.
    """
    name = re.split(r"[/\\]", model.partition(":")[0] if not re.match(r"[A-Za-z]:[\\/]", model) else model)[-1]
    name = re.sub(r"(?i)-0\d{4}-of-0\d{4}$|\.gguf$", "", re.sub(r"(?i)\.gguf$", "", name))
    for _ in range(3):  # gemma-3-4b-it-UD-Q4_K_XL-GGUF
        name = _GGUF.sub("", name[:_LONGEST_NAME])
    found = arch_of(f"/{name}") if name else None
    if found is not None and found.startswith("hf:"):
        return found
    try:
        return f"hf:{find_preset(name).key}"
    except RequestError:
        return next((f"hub:{owner}/{name}" for family, owner in _FAMILIES if re.fullmatch(family, name)), None)
