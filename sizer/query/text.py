"""Query strings, the language of links, forms and the command line: parse them to requests, and format requests.

    text ──parse_query──► Request ──format_query──► canonical text          parse_query(format_query(r)) == r

Each key of the contract is one row of `KEYS` (sizer.query.keys). Unknown keys and values are refused by name, all together. No
value silently becomes its default. This module does not import torch: it checks the form of names, and looks them up in plain data.

Several questions are read from texts, too; a key of one is changed, and the keys that differ are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote_plus
from urllib.parse import quote as percent_encode

from sizer.base.codec import LIMIT_TEXT
from sizer.base.errors import GIVEN_LIMIT, ConfigError, Refusal, RefusedValueError, RequestError, quote, suggest
from sizer.catalogue.modes import MODES
from sizer.catalogue.recipes import GRPO, NEW
from sizer.catalogue.sources import EXAMPLE, SOURCES
from sizer.query.conflicts import conflicts
from sizer.query.hints import hint_of_stage, items_for
from sizer.query.keys import ARCH_ALLOWED, KEYS, Key
from sizer.query.request import DEFAULT_BATCHES, Request
from sizer.query.values import COMPILED_BATCHES, COMPILED_DTYPES, check_length

USUAL_PROMPTS = (1, 2, 4, 8)  # of groups of completions
USUAL_MICROBATCHES = 4  # for each stage of a pipeline; every microbatch is traced
MAX_QUERY_LENGTH = 3 * 2**20  # a config of 2 MiB that does not compress is 2.7 MiB of base64
MAX_KEYS = 128
UNESCAPED = "/:@,"  # characters that a query string may hold and that values often have
KEYS_ALLOWED = "a key that `python -m sizer --help` describes"
# Fields that only the call of a diffusion pipeline has: with one of them a repository of the hub is read as a pipeline.
_OF_CALLS = frozenset(("offloading", "stream", "part_weights", "frames", "vae", "guidance", "output", "without", "cached"))


def parse_query(text: str) -> Request:
    """Return the request of a query string. A leading "?" is allowed.

    Raises RequestError with one refusal for each key that is unknown, repeated, malformed, out of range or in conflict with
    another key.
    """
    if len(text) > MAX_QUERY_LENGTH:
        raise RequestError(
            "query is too long",
            given=f"{len(text):,} characters",
            allowed=f"at most {MAX_QUERY_LENGTH:,}",
            todo="shorten the config to the keys of its architecture",
        )
    pairs, refusals = _split(text)
    values: dict[str, Any] = {}
    given_by: dict[str, str] = {}  # key of each field
    for key, value in pairs.items():
        try:
            found = KEYS[key].read(value)
        except RefusedValueError as refused:
            refusals.append(refused.refusal(key, value))
            continue
        if other := next((given_by[name] for name in found if values.get(name, found[name]) != found[name]), None):
            given, todo = f"{quote(value)} with {other}={pairs[other]}", f"remove {other}, or {key}"
            refusals.append(Refusal(key=key, given=given, allowed=f"values that agree with {other}", todo=todo))
        values |= found
        given_by |= dict.fromkeys(found, key)
    if "arch" not in pairs and all(refusal.key != "arch" for refusal in refusals):
        refusals.append(Refusal(key="arch", given="nothing", allowed=ARCH_ALLOWED, todo=EXAMPLE))
    if values.get("parallel", "none") == "none" and values.get("mode") != "serve":
        values["parallel"] = next((key for key in ("pp", "tp") if values.get(key, 1) > 1), "none")
    if values.get("source") == "hub" and _OF_CALLS & values.keys():
        values["source"] = "diffusers"
    source = SOURCES.get(str(values.get("source", "")))
    if source is not None:
        values = {**source.defaults, **values}
    if values.get("compile") is not None:
        values = {"dtypes": COMPILED_DTYPES, "batches": COMPILED_BATCHES, **values}
    if values.get("objective") == GRPO:
        values = {"new": NEW, **values}
    if "batches" not in values:
        values["batches"] = _usual_batches(Request(**{"source": "", **values}))
    request = Request(**{"source": "", **values})  # refused keys have their default in the other checks
    refusals.extend(conflicts(request))
    if refusals:
        raise RequestError(refusals=refusals)
    return request


def _usual_batches(request: Request) -> tuple[int, ...]:
    """Return the default batch sizes.

    For a pipeline schedule these are allowed sizes up to four microbatches for each stage; with objective=grpo, a few numbers
    of prompts.
    """
    if request.objective == GRPO:
        return tuple(request.batch_step * prompts for prompts in USUAL_PROMPTS)
    if MODES[request.mode].serves:
        return DEFAULT_BATCHES
    most = USUAL_MICROBATCHES * request.pp * request.microbatch
    usual = tuple(batch for batch in request.possible_batches if request.pp == 1 or batch <= most)
    return usual or DEFAULT_BATCHES


def split_query(query: str) -> dict[str, str]:
    """Return the keys and decoded values of a query string. Raises no error for unknown keys; the last of repeated keys counts."""
    return dict(parse_qsl(query.removeprefix("?"), keep_blank_values=True))


def join_query(items: Mapping[str, str]) -> str:
    """Return keys and values as a query string that `split_query` reads."""
    return "&".join(f"{key}={percent_encode(value, safe=UNESCAPED)}" for key, value in items.items())


def complete_query(request: Request) -> str:
    """Return the canonical query string with every key that applies. Raises ConfigError if the config is too large for a link."""
    query = format_query(request, complete=True)
    if len(query) > LIMIT_TEXT:
        raise ConfigError(
            "config is too large for a link",
            given=f"a query of {len(query):,} characters",
            allowed=f"at most {LIMIT_TEXT:,}",
            todo="keep only the architecture's keys",
        )
    return query


def format_query(request: Request, *, complete: bool = False) -> str:
    """Return the canonical query string of a request: keys in the contract's order, without defaults.

    With `complete`, write every key that applies and has a value, defaults included. None ("the model's default") has no text.
    """
    values = {}
    for name, key in KEYS.items():
        value = key.write(request)
        if value is not None and (not key.needs(request) if complete else not key.is_default(request)):
            values[name] = value
    return join_query(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryKey:
    """Description of one key of a query: name, allowed values and default. A key that `toggles` takes 0 or 1."""

    name: str
    allowed: str
    default: str
    toggles: bool


def query_keys() -> tuple[QueryKey, ...]:
    """Return the description of every key of a query, in the contract's order."""
    plain = Request(source="")
    return tuple(
        QueryKey(
            name=name,
            allowed=key.allowed,
            default=key.otherwise or _default_text(key, plain),
            toggles=key.toggles,
        )
        for name, key in KEYS.items()
    )


def _default_text(key: Key, plain: Request) -> str:
    """Return the default as a query's value; empty if there is none."""
    return (key.write(plain) if key.is_default(plain) else None) or ""


def _split(text: str) -> tuple[dict[str, str], list[Refusal]]:
    """Return the keys and values of a query, and the refusals of unknown, repeated and undecodable keys."""
    items = text.removeprefix("?").split("&") if text.removeprefix("?") else []
    if len(items) > MAX_KEYS:
        raise RequestError(
            "query has too many keys",
            given=str(len(items)),
            allowed=f"at most {MAX_KEYS}, each key once",
            todo="drop the rest",
        )
    pairs: dict[str, str] = {}
    refusals: dict[str, Refusal] = {}
    for item in items:
        key, equals, raw = item.partition("=")
        try:
            if key not in KEYS:
                raise RefusedValueError(KEYS_ALLOWED, _instead_of(key, raw), quote(item))
            if key in pairs or key in refusals:
                raise RefusedValueError(
                    "each key once", "keep one of them; lists take commas", "the key more than once"
                )
            pairs[key] = _decode(key, raw if equals else None)
        except RefusedValueError as refused:
            name = key if key in KEYS else quote(key)
            refusals[name] = refused.refusal(name, raw)
            pairs.pop(key, None)
    return pairs, list(refusals.values())


def _instead_of(key: str, raw: str) -> str:
    value = unquote_plus(raw)
    if (hint := hint_of_stage(key, value)) is not None:
        return hint
    if (items := items_for(key, value if len(value) <= GIVEN_LIMIT and value.isprintable() else "")) is None:
        return suggest(key, KEYS) or "remove it"
    return f"write {items}" if items else "leave it out"


def _decode(key: str, raw: str | None) -> str:
    if not raw:
        raise RefusedValueError("a value", f"write {key}=..., or leave the key out for its default", "nothing")
    try:
        value = unquote_plus(raw, errors="strict")
        value.encode()
    except UnicodeError:
        raise RefusedValueError("text in UTF-8", "encode it as UTF-8, then %xx") from None
    return value if key == "arch" else check_length(value)


FEWEST, MOST = 2, 4
NOT_COMPARED = ("v", "focus")  # keys that do not change figures


def as_query(text: str) -> str:
    """Return a text as a query: "resnet50" becomes "arch=resnet50", and a link to a page of the app loses its address."""
    text = text.strip()
    _, mark, asked = text.partition("?")
    if mark and "arch=" in asked:
        return asked
    first = text.partition("&")[0]
    return f"arch={text}" if first and "=" not in first else text


def with_keys(text: str, values: Mapping[str, object]) -> str:
    """Return a text as a query, with keys added.

    Args:
        text: A query, a link, or the name of an architecture.
        values: Key to value. True and False are 1 and 0, a sequence is a comma list, and None leaves the key out.
    """
    items = join_query({key: _as_text(value) for key, value in values.items() if value is not None})
    return "&".join(filter(None, (as_query(text), items)))


def as_pipeline(text: str) -> str:
    """Return a query of a repository of the hub as the query of a diffusion pipeline in that repository."""
    request = parse_query(as_query(text))
    name = request.name if request.revision is None else f"{request.name}@{request.revision}"
    items = as_query(text).removeprefix("?").split("&")
    return "&".join(f"arch=diffusers:{percent_encode(name, safe='/@')}" if item.startswith("arch=") else item for item in items)


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "01"[value]
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def read_question(text: str, number: int) -> Request:
    """Return the request of the question with this number. Raises RequestError with refusals that name the number."""
    try:
        return parse_query(as_query(text))
    except RequestError as error:
        whole = Refusal(key=error.what, given=error.given or "", allowed=error.allowed or "", todo=error.todo or "")
        refusals = (replace(one, key=f"question {number}: {one.key}") for one in error.refusals or (whole,))
        raise RequestError(refusals=refusals) from None


def read_questions(texts: Sequence[str]) -> tuple[Request, ...]:
    """Return the requests of two to four texts. Raises RequestError for another number of texts, or for all refusals together."""
    check_number(texts)
    requests: list[Request] = []
    refusals: list[Refusal] = []
    for number, text in enumerate(texts, start=1):
        try:
            requests.append(read_question(text, number))
        except RequestError as error:
            refusals.extend(error.refusals)
    if refusals:
        raise RequestError(refusals=refusals)
    return tuple(requests)


def check_number(texts: Sequence[str]) -> None:
    """Raise RequestError if the number of questions is not between two and four."""
    if not FEWEST <= len(texts) <= MOST:
        raise RequestError(
            "questions to compare",
            given=str(len(texts)),
            allowed=f"{FEWEST} to {MOST}",
            todo="leave some out" if len(texts) > MOST else "give another one",
        )


def with_value(request: Request, key: str, value: str) -> Request:
    """Return the question with a changed key. An empty value is the key's default. Raises RequestError.

    If the new question lacks the dtype of the focus, the focus moves to the first dtype. If it lacks the batch size, the focus
    moves to the last one.
    """
    items = split_query(format_query(replace(request, focus=None))) | {key: value.strip()}
    changed = parse_query(join_query({name: text for name, text in items.items() if text}))
    if request.focus is None or key == "focus":
        return changed
    dtype, batch = request.focus
    dtype = dtype if dtype in changed.dtypes else changed.dtypes[0]
    batch = batch if batch in changed.batches else changed.batches[-1]
    return replace(changed, focus=(dtype, batch))


def key_differences(requests: Sequence[Request]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the keys that differ with their values, and the equal keys with their value.

    A key without a value has the description of its default. Keys without a value in all questions are left out; equal keys also if
    they change nothing in any.
    """
    unused = set.intersection(*(set(MODES[request.mode].unused) for request in requests))
    values = [split_query(format_query(request, complete=True)) for request in requests]
    differs, same = {}, {}
    for key in query_keys():
        values_of_key = tuple(given.get(key.name, key.default) for given in values)
        if key.name in NOT_COMPARED or not any(key.name in given for given in values):
            continue
        if len(set(values_of_key)) > 1:
            differs[key.name] = values_of_key
        elif key.name not in unused:
            same[key.name] = values_of_key[0]
    return differs, same


def changeable_keys() -> Iterable[str]:
    """Return the keys that may differ between two questions."""
    return (key.name for key in query_keys() if key.name not in NOT_COMPARED)
