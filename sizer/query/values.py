"""Reading and writing of the values of a query's keys. Readers raise RefusedValueError for a text that is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from sizer.base.errors import RefusedValueError, RequestError, letters, quote, suggest
from sizer.base.versions import OLDEST, format_version, parse_version
from sizer.catalogue.adapters import ALL_LINEAR, ATTENTION, SCRIPT
from sizer.catalogue.heads import PACKED, find_head, pack_draft
from sizer.catalogue.modes import ALL, COMPILE_MODES, INPUTS, OFFLOADED, QUANTIZED
from sizer.catalogue.presets import find_preset
from sizer.catalogue.recipes import (
    ACTIVATIONS,
    CHECKPOINT_OFFLOAD,
    CHUNKED,
    COLOCATED,
    CONTRASTIVE,
    LOGITS,
    LOSS,
    LOSSES,
    MAX_CACHED,
    MAX_CHUNKS,
    MAX_EVALUATED,
    MAX_GROUP,
    MIN_GROUP,
    NONE,
    OBJECTIVES,
    OFFLOAD,
    OTHER_OBJECTIVES,
    TRANSFORMERS,
)
from sizer.catalogue.serving import (
    AUTO,
    CACHE_TYPES,
    DRAFTS,
    ENGINES,
    FILE_TYPES,
    KV_DTYPES,
    LAYOUTS,
    LORA_RANKS,
    MAX_DRAFTED,
    MAX_LAYERS,
    MAX_OFFLOAD,
    MAX_SEQS,
    MAX_TOKENS,
    POOL_FLAGS,
)
from sizer.catalogue.weights import WEIGHTS
from sizer.query.hints import SWITCHED

DTYPES = ("float32", "bfloat16", "float16", "amp-bfloat16", "amp-float16")
ATTENTIONS = ("sdpa", "eager")
MAX_BATCH, MAX_BATCHES = 65_536, 32
MAX_RANK, MAX_ALPHA, MAX_ACCUMULATE = 4096, 65_536, 65_536
MAX_SEQUENCE_LENGTH = 1_048_576
MIN_IMAGE, MAX_IMAGE = 16, 4096
MAX_NEW = 32_768
MAX_TP = 256  # more than any model has key heads
MAX_PP = 256  # more than any model has layers for
MAX_MICROBATCHES = 256
MAX_WORLD = 16_384  # ranks: FSDP2 lists the shards of every parameter for each
COMPUTES = ("float32", "bfloat16", "float16")
MAX_CLASSES = 1_000_000
OTHER_DTYPES = {
    **{"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"},
    **{"ampbf16": "amp-bfloat16", "ampfp16": "amp-float16"},
    **{f"torch{dtype}": dtype for dtype in ("float32", "bfloat16", "float16")},
}
OFF = "off"
CACHES = ("dynamic", "static", *OFFLOADED, QUANTIZED)
COMPILES = (OFF, *COMPILE_MODES)  # modes of torch.compile; off runs the model eagerly
COMPILED_DTYPES, COMPILED_BATCHES = ("bfloat16",), (8,)  # of a compiled question that names none
_AUTOTUNED = (
    "it chooses kernels by timing them on the device, and tensors fused into a chosen template are never allocated"
)
_REFUSED_COMPILES = dict.fromkeys(("max-autotune", "max-autotune-no-cudagraphs"), _AUTOTUNED)
MAX_VALUE_LENGTH = 1000  # of every key but arch, and of an arch that is not a config
MODULE_NAME = re.compile(r"[A-Za-z_0-9]{1,64}(\.[A-Za-z_0-9]{1,64}){0,15}", re.ASCII)
CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9_]{0,127}", re.ASCII)
THOUSAND = 1024  # tokens: a context of 8k is 8,192
_GROUPED = re.compile(r"\d{1,3}(?:[,_' \u00a0\u202f]\d{3})+", re.ASCII)
_SHORT = re.compile(r"(\d{1,6})(?:\.(\d{1,3}))?\s*[kK]", re.ASCII)


def choice(
    allowed: Iterable[str], aliases: Mapping[str, str] | None = None, hints: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """Return a function that reads one of the allowed words. Case and separators do not count.

    `aliases` are other names of allowed words. `hints` has refused words, and their replacements.
    """
    known, hints = tuple(allowed), hints or {}
    plain = {**(aliases or {}), **{letters(word): word for word in known}}

    def read(text: str) -> str:
        text = text if text in known else plain.get(letters(text), text)
        if text not in known:
            hint = hints.get(letters(text)) or suggest(text, known) or "give one of these"
            raise RefusedValueError(", ".join(known), hint)
        return text

    return read


def read_switch(text: str) -> bool:
    """0 or 1."""
    return choice(("0", "1"), hints=SWITCHED)(text) == "1"


def format_switch(on: bool) -> str:
    """0 or 1."""
    return "01"[on]


def listed(read: Callable[[str], object]) -> Callable[[str], tuple]:
    """Return a function that reads a comma list; repeated entries are dropped, their order is kept."""
    return lambda text: tuple(dict.fromkeys(read(part.strip(" ")) for part in text.split(",")))


def format_list(values: tuple) -> str:
    """Return the values with commas between."""
    return ",".join(map(str, values))


def read_tokens(text: str) -> str:
    """Return a number of tokens as digits alone: 8k is 8192, as is 8,192. Any other text is returned unchanged.

    The caller refuses it.
    """
    text = text.strip()
    if found := _SHORT.fullmatch(text):
        whole, part = int(found[1]) * THOUSAND, found[2]
        return str(whole + (round(float(f"0.{part}") * THOUSAND) if part else 0))
    return read_count(text)


def read_count(text: str) -> str:
    """Return a number without separators; any other text unchanged."""
    text = text.strip()
    return re.sub(r"\D", "", text) if _GROUPED.fullmatch(text) else text


def _read_integer(text: str, low: int, high: int, example: str) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else None
    if number is None or not low <= number <= high:
        raise RefusedValueError(f"whole numbers from {low:,} to {high:,}", f"write for example {example}")
    return number


def read_batches(text: str) -> tuple[int, ...]:
    """Batch sizes, with commas between."""
    try:
        sizes = listed(lambda part: _read_integer(part, 1, MAX_BATCH, "batch=1,2,4"))(text)
    except RefusedValueError as refused:
        allowed = f"{refused.allowed}, at most {MAX_BATCHES} sizes, separated by commas"
        raise RefusedValueError(allowed, refused.todo) from None
    if len(sizes) > MAX_BATCHES:
        raise RefusedValueError(f"at most {MAX_BATCHES} batch sizes", "drop some", f"{len(sizes)} of them")
    return sizes


def whole_number(high: int, example: str) -> Callable[[str], int]:
    """Return a function that reads a whole number from 1 to `high`."""
    return lambda text: _read_integer(read_count(text), 1, high, example)


def read_share(text: str) -> float:
    """Return a number from 0 to below 1, with at most four decimals."""
    if not re.fullmatch(r"0|0?\.[0-9]{1,4}", text, re.ASCII):
        raise RefusedValueError("numbers from 0 to below 1, with at most four decimals", "write for example 0.05")
    return float(text)


def read_compile(text: str) -> str | None:
    """Return a mode of torch.compile with memory that can be traced, None for off."""
    word = letters(text)
    for mode, reason in _REFUSED_COMPILES.items():
        if word == letters(mode):
            raise RefusedValueError(", ".join(COMPILES), "ask for compile=default", f"{quote(text)}: {reason}")
    mode = choice(COMPILES, hints=dict.fromkeys(("1", "true", "yes"), "write compile=default"))(text)
    return None if mode == OFF else mode


def read_budget(text: str) -> float:
    """Return a number from 0 to 1 with at most four decimals."""
    if not re.fullmatch(r"0|0?\.[0-9]{1,4}|1(\.0{1,4})?", text, re.ASCII):
        raise RefusedValueError("numbers from 0 to 1, with at most four decimals", "write for example budget=0.5")
    return float(text)


def read_targets(text: str) -> tuple[str, ...]:
    """Return names of modules or their ends, separated by commas; or a single word for many of them."""
    names = listed(str)(text)
    if names in ((ALL_LINEAR,), (ATTENTION,), (SCRIPT,)):
        return names
    if not {ATTENTION, SCRIPT} & {*names} and all(MODULE_NAME.fullmatch(name) for name in names):
        return names
    raise RefusedValueError(
        f"{ALL_LINEAR} or {ATTENTION}, or names of modules as q_proj or layers.0.mlp.up_proj, with commas between",
        "write for example targets=q_proj,v_proj",
    )


def read_modules(text: str) -> tuple[str, ...]:
    """Return names of modules or their ends, separated by commas; empty for `none`."""
    names = listed(str)(text)
    if names == ("none",):
        return ()
    if "none" not in names and all(MODULE_NAME.fullmatch(name) for name in names):
        return names
    raise RefusedValueError(
        "none, or names of modules as embed_tokens or lm_head, with commas between",
        "write for example modules_to_save=embed_tokens,lm_head",
    )


def read_sequence_length(text: str) -> int:
    """Return a number of tokens; 8k is 8,192."""
    return _read_integer(read_tokens(text), 1, MAX_SEQUENCE_LENGTH, "seq=2048")


def read_new(text: str) -> int:
    """Return a number of generated tokens."""
    return _read_integer(read_tokens(text), 1, MAX_NEW, "new=512")


def read_cache(text: str) -> str:
    """Return a cache of transformers that can be traced."""
    return choice(CACHES)(text)


def read_inputs(text: str) -> str | None:
    """Return "text" if a model that reads images or sound gets text alone, None if it gets all."""
    return None if choice(INPUTS)(text) == ALL else text


def read_image_size(text: str) -> tuple[int, int]:
    """Return height and width in pixels; a single number is both. "×" is read as "x"."""
    height, cross, width = (part.strip(" ") for part in text.replace("×", "x").partition("x"))
    try:
        sides = [_read_integer(side, MIN_IMAGE, MAX_IMAGE, "") for side in (height, width if cross else height)]
    except RefusedValueError:
        raise RefusedValueError(
            f"a side, or height x width, each from {MIN_IMAGE} to {MAX_IMAGE} pixels",
            "write image=224 or image=224x320 (a model may have a larger minimum)",
        ) from None
    return sides[0], sides[1]


def format_image_size(size: tuple[int, int]) -> str:
    """Return height and width in pixels, as a single number if they are equal."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def read_reshard(text: str) -> int:
    """FSDP2's `reshard_after_forward`: 1, 0, or the size of a smaller group."""
    return _read_integer(text, 0, MAX_WORLD, "reshard=1")


def read_rank(text: str) -> int:
    """Return the number of a rank, from 0."""
    return _read_integer(text, 0, MAX_WORLD - 1, "rank=0")


def read_trainable_layers(text: str) -> int:
    """Return how many layers of a backbone train."""
    return _read_integer(text, 0, 5, "trainable_layers=3")


def read_torch(text: str) -> str:
    """Return a version of PyTorch as "2.11", for any patch release."""
    try:
        version = parse_version(text)
    except ValueError:
        version = None
    if version is None or version < OLDEST:
        oldest = format_version(OLDEST)
        raise RefusedValueError(
            f"PyTorch's versions from {oldest} on, the oldest with known rules",
            f"write for example torch={oldest}, or leave it out for the installed one",
        )
    return format_version(version)


def read_loss(text: str) -> str:
    """Return a loss of the table, or one over N chunks as `chunked:N`."""
    kind, colon, number = text.partition(":")
    if kind == CHUNKED and (not colon or not re.fullmatch(r"[1-9][0-9]{0,3}", number) or int(number) > MAX_CHUNKS):
        raise RefusedValueError(f"chunked:1 to chunked:{MAX_CHUNKS}", "write for example loss=chunked:8")
    try:
        return text if kind == CHUNKED else choice(LOSSES)(text)
    except RefusedValueError as refused:
        raise RefusedValueError(f"{refused.allowed}, {CHUNKED}:<chunks>", refused.todo) from None


def read_evaluate(text: str) -> str:
    """Return the data that an evaluation keeps: nothing, or the logits of N batches as `logits:N`."""
    kind, colon, number = text.partition(":")
    if kind == LOGITS and (not colon or not re.fullmatch(r"[1-9][0-9]{0,4}", number) or int(number) > MAX_EVALUATED):
        raise RefusedValueError(f"logits:1 to logits:{MAX_EVALUATED}", "write for example evaluate=logits:8")
    return text if kind == LOGITS else choice((NONE, LOSS))(text)


def read_group(text: str) -> int:
    """Return a number of completions for each prompt."""
    return _read_integer(text, MIN_GROUP, MAX_GROUP, "group=8")


def read_objective(text: str) -> str:
    """Return an objective of the table, or one with mini-batches of N texts as `contrastive:N`."""
    kind, colon, number = text.partition(":")
    if kind == CONTRASTIVE and colon:
        if not re.fullmatch(r"[1-9][0-9]{0,4}", number) or int(number) > MAX_CACHED:
            raise RefusedValueError(
                f"contrastive:1 to contrastive:{MAX_CACHED}", "write for example objective=contrastive:32"
            )
        return text
    if hint := OTHER_OBJECTIVES.get(text.lower()):
        raise RefusedValueError(", ".join(OBJECTIVES), hint)
    return choice(OBJECTIVES)(text)


def read_activations(text: str) -> dict[str, object]:
    """Return the fields of a request for the place of activations; checkpoint-offload sets two keys."""
    if letters(text) == letters(CHECKPOINT_OFFLOAD):
        return {"checkpointing": True, "activations": OFFLOAD}
    try:
        return {"activations": choice(ACTIVATIONS)(text)}
    except RefusedValueError as refused:
        raise RefusedValueError(f"{refused.allowed}, {CHECKPOINT_OFFLOAD}", refused.todo) from None


def read_rollout(text: str) -> str:
    """Return the source of completions: transformers, or a server with a share of the device's memory as `colocated:SHARE`."""
    kind, colon, share = text.partition(":")
    if kind == COLOCATED and (not colon or not re.fullmatch(r"0?\.[0-9]{1,4}", share) or not float(share)):
        raise RefusedValueError(
            "colocated:<share>, a share above 0 and below 1", "write for example rollout=colocated:0.3"
        )
    return f"{COLOCATED}:{float(share):g}" if kind == COLOCATED else choice((TRANSFORMERS, COLOCATED))(text)


def read_head(text: str) -> str:
    """Return the name of a class."""
    if not CLASS_NAME.fullmatch(text):
        raise RefusedValueError("a transformers class name", "write for example head=LlamaForCausalLM")
    return text


def check_length(value: str) -> str:
    """Return the value unchanged. Raises RefusedValueError if it is too long."""
    if len(value) > MAX_VALUE_LENGTH:
        raise RefusedValueError(f"at most {MAX_VALUE_LENGTH} characters", "shorten it", f"{len(value):,} characters")
    return value


_UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "": 1,
}
_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?B)?", re.ASCII | re.IGNORECASE)
_MAX_BYTES = 2**50
_KV_NAMES = {
    **dict.fromkeys(("fp8e4m3", "fp8e5m2", "fp8inc"), "fp8"),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "f16", "float16", "half"), AUTO),
}


def read_engine(text: str) -> str:
    """Return the key of an engine. The library transformers is no server: its generation is another mode."""
    if text.lower() == "transformers":
        raise RefusedValueError(", ".join(ENGINES), "ask for mode=generate, generation with transformers")
    return choice(ENGINES, {"llamacpp": "llama.cpp", "ollama": "llama.cpp"})(text)


def read_release(text: str) -> str:
    """Return a version of an engine as "0.9.2"; a leading v and all after the third number are dropped.

    llama.cpp has the number of a build, such as "b9467".
    """
    if re.fullmatch(r"[bB][0-9]{1,6}", text, re.ASCII):
        return text.lower()
    found = re.fullmatch(
        r"v?([0-9]{1,4})\.([0-9]{1,4})(?:\.([0-9]{1,4}))?(?:[.+a-z][0-9A-Za-z.+]{0,40})?", text, re.ASCII
    )
    if found is None:
        raise RefusedValueError("a version such as 0.11.2", "write for example engine_version=0.11.2")
    return ".".join(part.lstrip("0") or "0" for part in found.groups("0"))


def read_util(text: str) -> float:
    """Return a share of the device's memory, above 0 and at most 1, with at most four decimals."""
    if not re.fullmatch(r"(?:0?\.[0-9]{1,4}|1(?:\.0{1,4})?)", text, re.ASCII) or not float(text):
        raise RefusedValueError("numbers above 0 and up to 1, with at most four decimals", "write for example util=0.9")
    return float(text)


def read_token_count(text: str) -> int:
    """Return a number of tokens; 8k is 8,192."""
    digits = read_tokens(text)
    number = int(digits) if re.fullmatch(r"[0-9]{1,9}", digits, re.ASCII) else 0
    if not 1 <= number <= MAX_TOKENS:
        raise RefusedValueError(f"tokens from 1 to {MAX_TOKENS:,}; 8k is 8,192", "write for example 8k")
    return number


def read_length(text: str) -> int | str:
    """Return the longest request in tokens, or "auto" (also vLLM's -1) for the longest that fits."""
    return AUTO if text.lower() in (AUTO, "-1") else read_token_count(text)


def read_size(text: str) -> int:
    """Return a number of bytes, with a unit or without."""
    found = _BYTES.fullmatch(text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    number = int(float(found[1]) * units[(found[2] or "").lower()]) if found else _MAX_BYTES + 1
    if number > _MAX_BYTES:
        raise RefusedValueError("bytes, or a number with KiB, MiB, GiB, KB, MB or GB", "write for example 2GiB")
    return number


def format_size(size: int) -> str:
    """Return a number of bytes with the largest binary unit that divides it."""
    unit = next((unit for unit in ("GiB", "MiB") if size and size % _UNITS[unit] == 0), "")
    return f"{size // _UNITS[unit]}{unit}"


def read_want(text: str) -> tuple[int, int]:
    """Return the number of concurrent requests and the tokens of each: 8x32k is eight requests of 32,768 tokens."""
    requests, cross, tokens = text.replace("×", "x").lower().partition("x")
    try:
        if not cross or not re.fullmatch(r"[0-9]{1,6}", requests, re.ASCII) or not 1 <= int(requests) <= MAX_SEQS:
            raise RefusedValueError("", "")
        return int(requests), read_token_count(tokens)
    except RefusedValueError:
        raise RefusedValueError(
            f"requests x tokens, up to {MAX_SEQS:,} requests", "write for example want=8x32k"
        ) from None


def format_want(want: tuple[int, int]) -> str:
    """Return the concurrent requests and the tokens of each, with an x between."""
    return "x".join(map(str, want))


def read_kv(text: str) -> str:
    """Return the dtype of a server's KV cache."""
    return choice((*KV_DTYPES, *CACHE_TYPES), _KV_NAMES)(text)


def read_layers(text: str) -> int:
    """Return a number of layers, from 0."""
    if not re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) or int(text) > MAX_LAYERS:
        raise RefusedValueError(f"whole numbers from 0 to {MAX_LAYERS:,}", "write for example 20")
    return int(text)


def read_offload(text: str) -> float:
    """GiB of weights that a server keeps on the host, with at most three decimals."""
    if not re.fullmatch(r"[0-9]{1,4}(?:\.[0-9]{1,3})?", text, re.ASCII) or float(text) > MAX_OFFLOAD:
        raise RefusedValueError(f"GiB from 0 to {MAX_OFFLOAD:,}, with at most three decimals", "write for example cpu_offload_gb=8")
    return float(text)


def read_lora_rank(text: str) -> int:
    """Return the largest rank of an adapter, one of those that vLLM allows."""
    if text not in map(str, LORA_RANKS):
        raise RefusedValueError(", ".join(map(str, LORA_RANKS)), "write the next larger one: smaller adapters fit its slots")
    return int(text)


def read_speculative(text: str) -> tuple[str, int]:
    """Return what drafts tokens, and how many at once: a method, a published head, the preset of a draft model, or a config."""
    name, _, tokens = text.rpartition(":")
    name = name.strip()
    if not re.fullmatch(r"[0-9]{1,3}", tokens, re.ASCII) or not 1 <= int(tokens) <= MAX_DRAFTED:
        allowed = f"a method or a preset, a colon, and 1 to {MAX_DRAFTED} drafted tokens"
        raise RefusedValueError(allowed, "write for example speculative=eagle3:3")
    if name.lower() in DRAFTS:
        return name.lower(), int(tokens)
    if name.startswith((PACKED, "{")):
        return pack_draft(name), int(tokens)
    if (head := find_head(name)) is not None:
        return head, int(tokens)
    try:
        return find_preset(name).key, int(tokens)
    except RequestError as error:
        allowed = f"{', '.join(DRAFTS)}, a published head, the preset of a draft model, or a draft's config.json"
        other = f"write the config.json of {quote(name)} in place of its name" if "/" in name else error.todo
        raise RefusedValueError(allowed, other or "write for example ngram:5") from None


def format_speculative(draft: tuple[str, int]) -> str:
    """Return a draft and the number of drafted tokens, with a colon between."""
    return ":".join(map(str, draft))


def read_pool(text: str) -> tuple[tuple[str, str], ...]:
    """Return flags of SGLang's pool with their values, in the order of the catalogue."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        name = name.strip().lower().removeprefix("--").replace("-", "_")
        if name not in POOL_FLAGS:
            near = suggest(name, POOL_FLAGS)
            raise RefusedValueError(", ".join(POOL_FLAGS), near or "write for example pool=max_total_tokens:32768")
        value = value.strip().lower()
        if not re.fullmatch(POOL_FLAGS[name][0], value, re.ASCII) or not value.strip("0."):
            allowed = {"mamba_ssm_dtype": "float32, bfloat16 or float16"}.get(name, "a number above 0")
            raise RefusedValueError(f"{name}: {allowed}", f"write for example pool={name}:{POOL_FLAGS[name][1]}")
        found[name] = value
    return tuple((name, found[name]) for name in POOL_FLAGS if name in found)


def format_pool(pool: tuple[tuple[str, str], ...]) -> str:
    """Return flags of SGLang's pool, with a colon before each value and commas between."""
    return ",".join(f"{name}:{value}" for name, value in pool)


def read_layout(text: str) -> dict[str, object]:
    """Return the field of a request for a layout that only servers have; empty for any other value of `weights`."""
    return {"server_weights": text.lower()} if text.lower() in (*LAYOUTS, *FILE_TYPES) and text.lower() not in WEIGHTS else {}
