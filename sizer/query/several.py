"""Several questions: read them from texts, change a key of one, and find the keys that differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import parse_qsl, quote

from sizer.base.errors import Refusal, RequestError
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query, query_keys

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
    items = (f"{key}={quote(_as_text(value), safe='')}" for key, value in values.items() if value is not None)
    return "&".join(filter(None, (as_query(text), *items)))


def as_pipeline(text: str) -> str:
    """Return a query of a repository of the hub as the query of a diffusion pipeline in that repository."""
    request = parse_query(as_query(text))
    name = request.name if request.revision is None else f"{request.name}@{request.revision}"
    items = as_query(text).removeprefix("?").split("&")
    return "&".join(f"arch=diffusers:{quote(name, safe='/@')}" if item.startswith("arch=") else item for item in items)


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
    items = dict(parse_qsl(format_query(replace(request, focus=None)))) | {key: value.strip()}
    changed = parse_query("&".join(f"{name}={quote(text, safe='')}" for name, text in items.items() if text))
    if request.focus is None or key == "focus":
        return changed
    dtype, batch = request.focus
    dtype = dtype if dtype in changed.dtypes else changed.dtypes[0]
    batch = batch if batch in changed.batches else changed.batches[-1]
    return replace(changed, focus=(dtype, batch))


def key_differences(requests: Sequence[Request]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the keys that differ with their values, and the equal keys with their value.

    A key without a value has the description of its default. Keys without a value in all questions are left out.
    """
    values = [dict(parse_qsl(format_query(request, complete=True))) for request in requests]
    differs, same = {}, {}
    for key in query_keys():
        values_of_key = tuple(given.get(key.name, key.default) for given in values)
        if key.name in NOT_COMPARED or not any(key.name in given for given in values):
            continue
        if len(set(values_of_key)) > 1:
            differs[key.name] = values_of_key
        else:
            same[key.name] = values_of_key[0]
    return differs, same


def changeable_keys() -> Iterable[str]:
    """Return the keys that may differ between two questions."""
    return (key.name for key in query_keys() if key.name not in NOT_COMPARED)
