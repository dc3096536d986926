"""What Sizer is asked for, and its one language: the query string that links, forms and the command line share.

    text ──parse_query──► Request ──format_query──► canonical text          parse_query(format_query(r)) == r

Every key of the contract is one row of `_KEYS`. Whatever is not understood is refused by name, all at once; nothing
silently becomes its default. No torch here: names are checked by their form, and by list where the list is plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from urllib.parse import quote as percent_encode
from urllib.parse import unquote_plus

from sizer.catalogue.gpu_keys import EXAMPLE as CUSTOM_EXAMPLE
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import GENERATION_KEYS, MODES
from sizer.catalogue.optimizers import IMPLEMENTATIONS, OPTIMIZERS
from sizer.catalogue.sources import EXAMPLE, SOURCES, find_source
from sizer.config_json import encode_config
from sizer.errors import Refusal, RefusedValueError, RequestError, quote, suggest
from sizer.query_values import (
    CACHES,
    MAX_BATCH,
    MAX_IMAGE,
    MAX_NEW,
    MAX_SEQUENCE_LENGTH,
    MIN_IMAGE,
    check_length,
    choice,
    format_image_size,
    format_list,
    format_switch,
    listed,
    read_batches,
    read_cache,
    read_head,
    read_image_size,
    read_new,
    read_sequence_length,
    read_switch,
    read_torch,
)
from sizer.versions import OLDEST, format_version

DTYPES = ("float32", "bfloat16", "float16", "amp-bfloat16", "amp-float16")
ATTENTIONS = ("sdpa", "eager")
DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_QUERY_LENGTH = 3 * 2**20  # a config of 2 MiB that does not compress is 2.7 MiB of base64
MAX_KEYS = 32
_ARCH_ALLOWED = ", ".join(source.usage for source in SOURCES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for: which architecture, in which mode, on which GPU. Made by `parse_query`, which checks every value.

    `source` is a key of SOURCES. `name` is what a package calls the model, the preset's key or "org/name"; empty for a config.
    `revision` belongs to the source "hub", `config` (canonical JSON text) to "config"; None elsewhere. `mode` is a key of MODES.
    `head`, `sequence_length` (tokens), `image_size` (height, width in pixels) and `optimizer_impl` are None where the
    architecture's or PyTorch's own choice is asked for. `expandable_segments` is PyTorch's allocator setting of that name.
    `gpu` is a key that `find_gpu` knows. `torch` is the PyTorch ("2.11") whose rules are asked for, None for the installed one.
    `focus` is the dtype and batch size to look at first, one of those asked for; it changes no figure. `new` (tokens after the
    prompt, which has `sequence_length`) and `cache` are of modes that generate.
    """

    source: str
    name: str = ""
    revision: str | None = None
    config: str | None = None
    head: str | None = None
    mode: str = "training"
    dtypes: tuple[str, ...] = DTYPES
    batches: tuple[int, ...] = DEFAULT_BATCHES
    sequence_length: int | None = None
    image_size: tuple[int, int] | None = None
    optimizer: str = "adamw"
    optimizer_impl: str | None = None
    attention: str = "sdpa"
    checkpointing: bool = False
    gpu: str = "a100-80gb"
    expandable_segments: bool = False
    torch: str | None = None
    focus: tuple[str, int] | None = None
    new: int = 512
    cache: str = "dynamic"


def parse_query(text: str) -> Request:
    """The request that a query string asks for; a leading "?" is allowed.

    Raises RequestError with one refusal per key that is unknown, repeated, malformed, out of range or at odds with
    another one.
    """
    if len(text) > MAX_QUERY_LENGTH:
        raise RequestError(
            "query is too long",
            given=f"{len(text):,} characters",
            allowed=f"at most {MAX_QUERY_LENGTH:,}",
            todo="shorten the config to the keys of its architecture",
        )
    pairs, refusals = _split(text)
    values: dict[str, object] = {}
    for key, value in pairs.items():
        try:
            values.update(_KEYS[key].read(value))
        except RefusedValueError as refused:
            refusals.append(refused.at(key, value))
    if "arch" not in pairs and all(refusal.key != "arch" for refusal in refusals):
        refusals.append(Refusal(key="arch", given="nothing", allowed=_ARCH_ALLOWED, todo=EXAMPLE))
    refusals.extend(_conflicts(values))
    if refusals:
        raise RequestError(refusals=refusals)
    return Request(**values)


def check_not_generating(request: Request, what: str) -> None:
    """Raise RequestError for a generation: `what` says of which answer there is none for it."""
    if MODES[request.mode].generates:
        raise RequestError(
            f"{what}: not for a generation",
            given=f"mode={request.mode}",
            allowed=", ".join(mode.key for mode in MODES.values() if not mode.generates),
            todo="ask for mode=inference, which reads the prompt, or size_step with your own loop",
        )


def format_query(request: Request, *, complete: bool = False) -> str:
    """The canonical query string of a request: keys in the contract's order, values at their default left out.

    With `complete` every key that has a value is written, defaults too; None ("the model's own choice") has no text.
    """
    parts = []
    for name, key in _KEYS.items():
        value = key.write(request)
        if value is not None and (complete or not key.is_default(request)):
            parts.append(f"{name}={percent_encode(value, safe='/:@,')}")
    return "&".join(parts)


# ------------------------------------------------------------------------------------------------------------ the keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """How one key is read (text → fields of Request) and written (Request → text; None where it has none).

    `allowed` says what is read; `otherwise` what holds where the key is left out and its default has no text.
    """

    read: Callable[[str], dict[str, object]]
    write: Callable[[Request], str | None]
    is_default: Callable[[Request], bool]
    allowed: str
    otherwise: str = ""


_DEFAULTS = {field.name: field.default for field in fields(Request) if field.default is not MISSING}


def _field(
    name: str,
    read: Callable[[str], object],
    write: Callable[[object], str] = str,
    *,
    allowed: str,
    otherwise: str = "",
) -> _Key:
    """The key of one field of Request."""

    def write_field(request: Request) -> str | None:
        value = getattr(request, name)
        return None if value is None else write(value)

    return _Key(
        read=lambda text: {name: read(text)},
        write=write_field,
        is_default=lambda request: getattr(request, name) == _DEFAULTS[name],
        allowed=allowed,
        otherwise=otherwise,
    )


def _read_version(text: str) -> dict[str, object]:
    choice(("1",))(text)
    return {}


def _read_arch(text: str) -> dict[str, object]:
    source, _, value = text.partition(":")
    if source not in SOURCES and (found := find_source(check_length(text))):
        source, value = found
    if source not in SOURCES:
        raise RefusedValueError(_ARCH_ALLOWED, suggest(source, SOURCES) or EXAMPLE)
    if SOURCES[source].entry != "config":
        check_length(text)
    return {"source": source, **SOURCES[source].read(value)}


def _read_focus(text: str) -> tuple[str, int]:
    dtype, colon, batch = text.partition(":")
    try:
        (size,) = read_batches(batch) if colon else ()
        return choice(DTYPES)(dtype), size
    except (RefusedValueError, ValueError):
        raise RefusedValueError("a dtype, a colon, a batch size", "focus=bfloat16:8") from None


def _write_arch(request: Request) -> str:
    if request.config is not None:
        return f"{request.source}:{encode_config(request.config)}"
    revision = f"@{request.revision}" if request.revision is not None else ""
    return f"{request.source}:{request.name}{revision}"


def _of_generation(key: _Key) -> _Key:
    """A key that is written in modes that generate alone."""
    return replace(key, write=lambda request: key.write(request) if MODES[request.mode].generates else None)


_SWITCH = "0, 1"

# The contract's table, in its order, which is also the canonical order of a query.
_KEYS: dict[str, _Key] = {
    "v": _Key(read=_read_version, write=lambda request: "1", is_default=lambda request: True, allowed="1"),
    "arch": _Key(
        read=_read_arch,
        write=_write_arch,
        is_default=lambda request: False,
        allowed=f"{_ARCH_ALLOWED}; the name alone, or the address of a repository of the hub; required",
    ),
    "head": _field(
        "head",
        read_head,
        allowed="a transformers class, e.g. LlamaForCausalLM",
        otherwise="the config's own, else the usual one of its type",
    ),
    "mode": _field("mode", choice(MODES), allowed=", ".join(MODES)),
    "dtype": _field("dtypes", listed(choice(DTYPES)), format_list, allowed=f"a comma list of {', '.join(DTYPES)}"),
    "batch": _field("batches", read_batches, format_list, allowed=f"a comma list of 1 to {MAX_BATCH}"),
    "seq": _field(
        "sequence_length",
        read_sequence_length,
        allowed=f"tokens, 1 to {MAX_SEQUENCE_LENGTH}",
        otherwise="the model's usual length",
    ),
    "image": _field(
        "image_size",
        read_image_size,
        format_image_size,
        allowed=f"pixels, 224 or 224x320, {MIN_IMAGE} to {MAX_IMAGE}",
        otherwise="the model's usual size",
    ),
    "new": _of_generation(
        _field(
            "new",
            read_new,
            allowed=f"tokens that are generated after the prompt of `seq`, 1 to {MAX_NEW}, with mode=generate",
            otherwise=str(_DEFAULTS["new"]),
        )
    ),
    "cache": _of_generation(
        _field(
            "cache",
            read_cache,
            allowed=f"{', '.join(CACHES)}: transformers' KV cache, with mode=generate",
            otherwise=_DEFAULTS["cache"],
        )
    ),
    "optimizer": _field("optimizer", choice(OPTIMIZERS), allowed=", ".join(OPTIMIZERS)),
    "optimizer_impl": _field(
        "optimizer_impl",
        choice(IMPLEMENTATIONS),
        allowed=", ".join(IMPLEMENTATIONS),
        otherwise="what PyTorch chooses on that device",
    ),
    "attention": _field("attention", choice(ATTENTIONS), allowed=", ".join(ATTENTIONS)),
    "checkpointing": _field("checkpointing", read_switch, format_switch, allowed=_SWITCH),
    "gpu": _field(
        "gpu",
        lambda text: find_gpu(text).key,
        allowed=f"a key that `python -m sizer gpus` lists, or one's own by memory and capability: {CUSTOM_EXAMPLE}",
    ),
    "expandable": _field(
        "expandable_segments",
        read_switch,
        format_switch,
        allowed=f"{_SWITCH}: the allocator's expandable segments",
    ),
    "torch": _field(
        "torch",
        read_torch,
        allowed=f"a version, {format_version(OLDEST)} or newer, whose rules are followed",
        otherwise="the installed one",
    ),
    "focus": _field(
        "focus",
        _read_focus,
        lambda cell: f"{cell[0]}:{cell[1]}",
        allowed="<dtype>:<batch>, the cell to look at first",
        otherwise="the largest batch that fits",
    ),
}
KEYS = tuple(_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryKey:
    """One key of a query in words: its name, what it takes, and what holds where it is left out."""

    name: str
    allowed: str
    default: str


def query_keys() -> tuple[QueryKey, ...]:
    """The contract's table in words: every key of a query in its order."""
    plain = Request(source="")
    return tuple(
        QueryKey(name=name, allowed=key.allowed, default=key.otherwise or _default_text(key, plain))
        for name, key in _KEYS.items()
    )


def _default_text(key: _Key, plain: Request) -> str:
    """The default as a query has it; nothing where there is none."""
    return (key.write(plain) if key.is_default(plain) else None) or ""


def _split(text: str) -> tuple[dict[str, str], list[Refusal]]:
    """The keys and values of a query, and the refusals of what is not one known key with one readable value."""
    items = text.removeprefix("?").split("&") if text.removeprefix("?") else []
    if len(items) > MAX_KEYS:
        raise RequestError(
            "query has too many keys",
            given=str(len(items)),
            allowed=f"each key once: {', '.join(KEYS)}",
            todo="drop the rest",
        )
    pairs: dict[str, str] = {}
    refusals: dict[str, Refusal] = {}
    for item in items:
        key, equals, raw = item.partition("=")
        try:
            if key not in _KEYS:
                raise RefusedValueError(f"the keys {', '.join(KEYS)}", suggest(key, KEYS) or "remove it", quote(item))
            if key in pairs or key in refusals:
                raise RefusedValueError(
                    "each key once", "keep one of them; lists take commas", "the key more than once"
                )
            pairs[key] = _decode(key, raw if equals else None)
        except RefusedValueError as refused:
            name = key if key in _KEYS else quote(key)
            refusals[name] = refused.at(name, raw)
            pairs.pop(key, None)
    return pairs, list(refusals.values())


def _decode(key: str, raw: str | None) -> str:
    if not raw:
        raise RefusedValueError("a value", f"write {key}=..., or leave the key out for its default", "nothing")
    try:
        value = unquote_plus(raw, errors="strict")
        value.encode()
    except UnicodeError:
        raise RefusedValueError("text in UTF-8", "encode it as UTF-8, then %xx") from None
    return value if key == "arch" else check_length(value)


def _conflicts(values: dict[str, object]) -> Iterable[Refusal]:
    """What is wrong with values that are each good on their own."""
    request = Request(**{"source": "", **values})  # what was refused is judged at its default
    if request.source:
        yield from _refused_by_source(request)
    if not MODES[request.mode].generates:
        for key in GENERATION_KEYS:
            if key in values:
                yield Refusal(
                    key=key,
                    given=f"{values[key]!r} with mode={request.mode}",
                    allowed=f"{key} with mode=generate",
                    todo="remove it, or ask for mode=generate",
                )
    if request.focus is not None and not (request.focus[0] in request.dtypes and request.focus[1] in request.batches):
        yield Refusal(
            key="focus",
            given=f"{request.focus[0]}:{request.focus[1]}",
            allowed="one of the values of dtype, a colon, one of the values of batch",
            todo="remove it, or ask for that dtype and batch",
        )
    gpu = find_gpu(request.gpu)
    known = OPTIMIZERS[request.optimizer].implementations_on(gpu.backend)
    if request.optimizer_impl is not None and request.optimizer_impl not in known:
        optimizer = request.optimizer
        yield Refusal(
            key="optimizer_impl",
            given=f"{request.optimizer_impl!r} with optimizer={optimizer}, gpu={request.gpu}",
            allowed=f"{' or '.join(known)} for {optimizer}" if known else f"none for {optimizer}, which does no step",
            todo="remove it for PyTorch's own choice, or choose another optimizer",
        )
    if request.expandable_segments and gpu.backend != "cuda":
        yield Refusal(
            key="expandable",
            given=f"'1' with gpu={request.gpu}",
            allowed="1 with a CUDA device, whose allocator alone has expandable segments",
            todo="remove it, or choose another gpu",
        )


def _refused_by_source(request: Request) -> Iterable[Refusal]:
    source = SOURCES[request.source]
    if request.mode in source.refuses_modes:
        yield Refusal(
            key="mode",
            given=f"{request.mode!r} with a {source.key} architecture",
            allowed=", ".join(mode for mode in MODES if mode not in source.refuses_modes),
            todo="choose a language model of transformers",
        )
    for key in source.refuses:
        if not _KEYS[key].is_default(request):
            *others, last = (f"{row.key}:" for row in SOURCES.values() if key not in row.refuses)
            yield Refusal(
                key=key,
                given=f"{quote(_KEYS[key].write(request))} with a {source.key} architecture",
                allowed=f"{key} with {', '.join(others)} or {last}",
                todo="remove it",
            )
