"""The question Sizer answers, and its one language: the query string that links, forms and the command line share.

    text ──parse_query──► Request ──format_query──► canonical text          parse_query(format_query(r)) == r

Every key of the contract is one row of `_KEYS`. Whatever is not understood is refused by name, all at once; nothing
silently becomes its default. No torch here: names are checked by their form, and by list where the list is plain data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from urllib.parse import quote as percent_encode
from urllib.parse import unquote_plus

from sizer.catalogue.gpus import GPUS
from sizer.config_json import canonical_config, decode_config, encode_config
from sizer.errors import ConfigError, Refusal, RequestError, quote, suggest
from sizer.versions import OLDEST, format_version, parse_version

DTYPES = ("float32", "bfloat16", "float16", "amp-bfloat16", "amp-float16")
MODES = ("training", "inference")
OPTIMIZER_IMPLS = ("foreach", "fused", "loop")
ATTENTIONS = ("sdpa", "eager")

# Which implementations each optimizer has: the `foreach` and `fused` arguments of its __init__ in torch/optim, the same
# in PyTorch 2.11 and 2.15. "loop" is foreach=False, fused=False. Muon (torch/optim/_muon.py) has only the loop.
IMPLS_OF_OPTIMIZER: dict[str, tuple[str, ...]] = {
    "sgd": ("foreach", "fused", "loop"),
    "sgd-momentum": ("foreach", "fused", "loop"),
    "adam": ("foreach", "fused", "loop"),
    "adamw": ("foreach", "fused", "loop"),
    "adafactor": ("foreach", "loop"),
    "rmsprop": ("foreach", "loop"),
    "adagrad": ("foreach", "fused", "loop"),
    "adadelta": ("foreach", "loop"),
    "adamax": ("foreach", "loop"),
    "nadam": ("foreach", "loop"),
    "radam": ("foreach", "loop"),
    "muon": ("loop",),
    "none": (),
}
OPTIMIZERS = tuple(IMPLS_OF_OPTIMIZER)

DEFAULT_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_BATCH, MAX_BATCHES = 65_536, 32
MAX_SEQUENCE_LENGTH = 1_048_576
MIN_IMAGE, MAX_IMAGE = 16, 4096
MAX_QUERY_LENGTH = 3 * 2**20  # a config of 2 MiB that does not compress is 2.7 MiB of base64
MAX_VALUE_LENGTH = 1000  # of every key but arch, and of an arch that is not a config
MAX_KEYS = 32

TORCHVISION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
PRESET_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
CLASS_NAME = re.compile(r"[A-Z][A-Za-z0-9_]{0,127}", re.ASCII)
# A repository of the hub always has an owner here; no part begins or ends with "-" or ".", none holds "--" or "..".
REPO_ID = re.compile(r"(?!.*(?:--|\.\.))(?:\w(?:[\w.-]{0,94}\w)?/)\w(?:[\w.-]{0,94}\w)?", re.ASCII)
REVISION = re.compile(r"(?!.*(?:\.\.|//))\w(?:[\w./-]{0,126}[\w-])?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question: which architecture, for which work, on which GPU. Made by `parse_query`, which checks every value.

    `source` is "torchvision", "hf" (a preset), "hub" or "config". `name` is the torchvision name, the preset's key or
    "org/name"; empty for a config. `revision` belongs to hub, `config` (canonical JSON text) to config; None elsewhere.
    `head`, `sequence_length` (tokens), `image_size` (height, width in pixels) and `optimizer_impl` are None where the
    architecture's or PyTorch's own choice is asked for. `expandable_segments` is PyTorch's allocator setting of that name.
    `torch` is the PyTorch ("2.11") whose rules are asked for, None for the installed one.
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
            values.update(_KEYS[key].parse(value))
        except _RefusedError as refused:
            refusals.append(refused.at(key, value))
    if "arch" not in pairs and all(refusal.key != "arch" for refusal in refusals):
        refusals.append(Refusal(key="arch", given="nothing", allowed=_ARCH_ALLOWED, todo=_ARCH_TODO))
    refusals.extend(_conflicts(values))
    if refusals:
        raise RequestError(refusals=refusals)
    return Request(**values)


def format_query(request: Request, *, complete: bool = False) -> str:
    """The canonical query string of a request: keys in the contract's order, values at their default left out.

    With `complete` every key that has a value is written, defaults too; None ("the model's own choice") has no text.
    """
    parts = []
    for name, key in _KEYS.items():
        value = key.format(request)
        if value is not None and (complete or not key.at_default(request)):
            parts.append(f"{name}={percent_encode(value, safe='/:@,')}")
    return "&".join(parts)


# -------------------------------------------------------------------------------------------------------- one key each


class _RefusedError(Exception):
    """A value that its key does not take; `at` turns it into the row that the user sees."""

    def __init__(self, allowed: str, todo: str, given: str | None = None):
        super().__init__(allowed)
        self.allowed, self.todo, self.given = allowed, todo, given

    def at(self, key: str, value: str) -> Refusal:
        return Refusal(key=key, given=self.given or quote(value), allowed=self.allowed, todo=self.todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """How one key is read (text → fields of Request) and written (Request → text; None where it has none)."""

    parse: Callable[[str], dict[str, object]]
    format: Callable[[Request], str | None]
    at_default: Callable[[Request], bool]


def _field(name: str, read: Callable[[str], object], write: Callable[[object], str] = str) -> _Key:
    """The key of one field of Request."""

    def format_field(request: Request) -> str | None:
        value = getattr(request, name)
        return None if value is None else write(value)

    return _Key(
        parse=lambda text: {name: read(text)},
        format=format_field,
        at_default=lambda request: getattr(request, name) == _DEFAULTS[name],
    )


def _choice(allowed: Iterable[str]) -> Callable[[str], str]:
    known = tuple(allowed)

    def read(text: str) -> str:
        if text not in known:
            raise _RefusedError(", ".join(known), suggest(text, known) or "give one of these")
        return text

    return read


def _parse_version(text: str) -> dict[str, object]:
    _choice(("1",))(text)
    return {}


def _switch(text: str) -> bool:
    return _choice(("0", "1"))(text) == "1"


def _list(read: Callable[[str], object]) -> Callable[[str], tuple]:
    """Reads a comma list; repeated entries are dropped, their order is kept."""
    return lambda text: tuple(dict.fromkeys(read(part.strip(" ")) for part in text.split(",")))


def _integer(text: str, low: int, high: int, example: str) -> int:
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) else None
    if number is None or not low <= number <= high:
        raise _RefusedError(f"whole numbers from {low:,} to {high:,}", f"write for example {example}")
    return number


def _batches(text: str) -> tuple[int, ...]:
    example = "batch=1,2,4"
    try:
        sizes = _list(lambda part: _integer(part, 1, MAX_BATCH, example))(text)
    except _RefusedError as refused:
        allowed = f"{refused.allowed}, at most {MAX_BATCHES} of them, with commas between"
        raise _RefusedError(allowed, refused.todo) from None
    if len(sizes) > MAX_BATCHES:
        raise _RefusedError(f"at most {MAX_BATCHES} batch sizes", "drop some", f"{len(sizes)} of them")
    return sizes


def _image(text: str) -> tuple[int, int]:
    height, cross, width = text.partition("x")
    try:
        sides = [_integer(side, MIN_IMAGE, MAX_IMAGE, "") for side in ((height, width) if cross else (height, height))]
    except _RefusedError:
        raise _RefusedError(
            f"a side, or height x width, each from {MIN_IMAGE} to {MAX_IMAGE} pixels",
            "write image=224 or image=224x320 (a model may have a minimum of its own)",
        ) from None
    return sides[0], sides[1]


def _format_image(size: tuple[int, int]) -> str:
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def _torch(text: str) -> str:
    """A version as "2.11", whatever its patch release."""
    try:
        version = parse_version(text)
    except ValueError:
        version = None
    if version is None or version < OLDEST:
        oldest = format_version(OLDEST)
        raise _RefusedError(
            f"PyTorch's versions from {oldest} on, the oldest whose rules are known",
            f"write for example torch={oldest}, or leave it out for the installed one",
        )
    return format_version(version)


def read_torch(text: str) -> str:
    """The value of the key "torch" as it is kept. Raises RequestError."""
    try:
        return _torch(text)
    except _RefusedError as refused:
        raise RequestError(refusals=[refused.at("torch", text)]) from None


def _head(text: str) -> str:
    if not CLASS_NAME.fullmatch(text):
        raise _RefusedError("a transformers class name", "write for example head=LlamaForCausalLM")
    return text


# ---------------------------------------------------------------------------------------------------------------- arch

_ARCH_ALLOWED = "torchvision:<name>, hf:<preset>, hub:<org/name>[@revision], config:<base64url(zlib(JSON))>"
_ARCH_TODO = "write for example arch=torchvision:resnet50"


def _parse_arch(text: str) -> dict[str, object]:
    source, _, value = text.partition(":")
    if source not in _ARCH:
        raise _RefusedError(_ARCH_ALLOWED, suggest(source, _ARCH) or _ARCH_TODO)
    if source != "config":
        _limit(text)
    return {"source": source, **_ARCH[source](value)}


def _parse_torchvision(value: str) -> dict[str, object]:
    if not TORCHVISION_NAME.fullmatch(value):
        raise _RefusedError("a torchvision model name: lower-case letters, digits and _", _ARCH_TODO)
    return {"name": value}


def _parse_preset(value: str) -> dict[str, object]:
    from sizer.catalogue.presets import PRESETS

    if not PRESET_KEY.fullmatch(value) or value not in PRESETS:
        todo = suggest(value, PRESETS) or "see `python -m sizer models`; any other model is hub:<org/name> or config:"
        raise _RefusedError("a key of the presets", todo)
    return {"name": value}


def _parse_hub(value: str) -> dict[str, object]:
    name, at, revision = value.partition("@")
    if not REPO_ID.fullmatch(name):
        raise _RefusedError("<org/name> of letters, digits, . _ -", "write for example arch=hub:openai-community/gpt2")
    if at and not REVISION.fullmatch(revision):
        raise _RefusedError("<org/name>@<branch, tag or commit>", "write arch=hub:openai-community/gpt2@main")
    return {"name": name, "revision": revision if at else None}


def _parse_config(value: str) -> dict[str, object]:
    try:
        return {"name": "", "config": canonical_config(decode_config(value))}
    except ConfigError as error:
        given = f"{error.what}, {error.given}" if error.given else error.what
        raise _RefusedError(error.allowed or "base64url(zlib(JSON))", error.todo or _ARCH_TODO, given) from error


_ARCH: dict[str, Callable[[str], dict[str, object]]] = {
    "torchvision": _parse_torchvision,
    "hf": _parse_preset,
    "hub": _parse_hub,
    "config": _parse_config,
}


def _format_arch(request: Request) -> str:
    if request.source == "config":
        return f"config:{encode_config(request.config or '')}"
    revision = f"@{request.revision}" if request.revision is not None else ""
    return f"{request.source}:{request.name}{revision}"


# ----------------------------------------------------------------------------------------------------------- the whole

_DEFAULTS = {field.name: field.default for field in fields(Request) if field.default is not MISSING}

# The contract's table, in its order, which is also the canonical order of a query.
_KEYS: dict[str, _Key] = {
    "v": _Key(
        parse=_parse_version,
        format=lambda request: "1",
        at_default=lambda request: True,
    ),
    "arch": _Key(parse=_parse_arch, format=_format_arch, at_default=lambda request: False),
    "head": _field("head", _head),
    "mode": _field("mode", _choice(MODES)),
    "dtype": _field("dtypes", _list(_choice(DTYPES)), ",".join),
    "batch": _field("batches", _batches, lambda sizes: ",".join(map(str, sizes))),
    "seq": _field("sequence_length", lambda text: _integer(text, 1, MAX_SEQUENCE_LENGTH, "seq=2048")),
    "image": _field("image_size", _image, _format_image),
    "optimizer": _field("optimizer", _choice(OPTIMIZERS)),
    "optimizer_impl": _field("optimizer_impl", _choice(OPTIMIZER_IMPLS)),
    "attention": _field("attention", _choice(ATTENTIONS)),
    "checkpointing": _field("checkpointing", _switch, lambda on: "01"[on]),
    "gpu": _field("gpu", _choice(GPUS)),
    "expandable": _field("expandable_segments", _switch, lambda on: "01"[on]),
    "torch": _field("torch", _torch),
}
KEYS = tuple(_KEYS)


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
                raise _RefusedError(f"the keys {', '.join(KEYS)}", suggest(key, KEYS) or "remove it", quote(item))
            if key in pairs or key in refusals:
                raise _RefusedError("each key once", "keep one of them; lists take commas", "the key more than once")
            pairs[key] = _decode(key, raw if equals else None)
        except _RefusedError as refused:
            name = key if key in _KEYS else quote(key)
            refusals[name] = refused.at(name, raw)
            pairs.pop(key, None)
    return pairs, list(refusals.values())


def _decode(key: str, raw: str | None) -> str:
    if not raw:
        raise _RefusedError("a value", f"write {key}=..., or leave the key out for its default", "nothing")
    try:
        value = unquote_plus(raw, errors="strict")
        value.encode()
    except UnicodeError:
        raise _RefusedError("text in UTF-8", "encode it as UTF-8, then %xx") from None
    return value if key == "arch" else _limit(value)


def _limit(value: str) -> str:
    if len(value) > MAX_VALUE_LENGTH:
        raise _RefusedError(f"at most {MAX_VALUE_LENGTH} characters", "shorten it", f"{len(value):,} characters")
    return value


def _conflicts(values: dict[str, object]) -> Iterable[Refusal]:
    """What is wrong with values that are each good on their own."""
    if values.get("source") == "torchvision":
        yield from _not_for_torchvision(values)
    yield from _optimizer_conflicts(**{**_DEFAULTS, **values})
    gpu = values.get("gpu", _DEFAULTS["gpu"])
    if values.get("expandable_segments") and GPUS[gpu].backend != "cuda":
        yield Refusal(
            key="expandable",
            given=f"'1' with gpu={gpu}",
            allowed="1 with a CUDA device, whose allocator alone has expandable segments",
            todo="remove it, or choose another gpu",
        )


def _not_for_torchvision(values: dict[str, object]) -> Iterable[Refusal]:
    fields = {"head": ("head", None), "seq": ("sequence_length", None), "attention": ("attention", "sdpa")}
    for key, (name, neutral) in fields.items():
        if values.get(name, neutral) != neutral:
            yield Refusal(
                key=key,
                given=f"{quote(values[name])} with a torchvision architecture",
                allowed=f"{key} with hf:, hub: or config:",
                todo="remove it",
            )


def _optimizer_conflicts(
    *, optimizer: str, optimizer_impl: str | None, gpu: str, **_others: object
) -> Iterable[Refusal]:
    known = IMPLS_OF_OPTIMIZER[optimizer]
    # torch/optim/adagrad.py: "fused (CPU and CUDA only)"; aten has no MPS kernel for _fused_adagrad_ up to 2.15.
    if optimizer == "adagrad" and GPUS[gpu].backend == "mps":
        known = tuple(impl for impl in known if impl != "fused")
    if optimizer_impl is not None and optimizer_impl not in known:
        yield Refusal(
            key="optimizer_impl",
            given=f"{optimizer_impl!r} with optimizer={optimizer}, gpu={gpu}",
            allowed=f"{' or '.join(known)} for {optimizer}" if known else f"none for {optimizer}, which does no step",
            todo="remove it for PyTorch's own choice, or choose another optimizer",
        )
