"""Every error that Sizer raises on purpose.

    SizerError            what happened: given ..., allowed ...; what to do                exit status
    ├── RequestError      a query has unknown keys or invalid values, each one named            2
    ├── ConfigError       a config JSON is malformed, too large or needs a refused feature      2
    ├── HubError          a config could not be fetched from the hub                            2
    │   └── PipelineError     a diffusion pipeline was found in the place of a model            2
    ├── BuildError        the architecture could not be built                                   2
    ├── TraceError        the model was counted, but its step could not be traced               3
    ├── DeviceError       the requested device is missing or cannot do the work                 4
    └── JobError          the job was cancelled, hit a limit or crashed                         1
        ├── QueueFullError    too many jobs run or wait                                         1
        └── TimeLimitError    the job exceeded its time limit                                   1

Each message is one line, or one for each refused key. `SizerError.exit_status` is the exit status of the command line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NAME = re.compile(r"[a-z]*")  # of a family
# letters of a short form; of a name that may have a typing error; their least similarity then
_SHORTEST, _LONG_NAME, _SLIP = 2, 5, 0.84
GIVEN_LIMIT = 60


class SizerError(Exception):
    """One line: what happened, the given value, the allowed values and how to fix it.

    The parts are also attributes: `what`, `given`, `allowed`, `todo` (None if there is nothing to say).
    """

    exit_status = 1

    def __init__(self, what: str, *, given: str | None = None, allowed: str | None = None, todo: str | None = None):
        self.what, self.given, self.allowed, self.todo = what, given, allowed, todo
        super().__init__(fold(what, given, allowed, todo))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refused key of a query: the given value, the allowed values, and how to fix it."""

    key: str
    given: str
    allowed: str
    todo: str

    def __str__(self) -> str:
        return fold(self.key, self.given, self.allowed, self.todo)


class RefusedValueError(Exception):
    """A value that its key of a query does not take; `refusal` is the row of it that the user sees."""

    def __init__(self, allowed: str, todo: str, given: str | None = None):
        super().__init__(allowed)
        self.allowed, self.todo, self.given = allowed, todo, given

    def refusal(self, key: str, value: str) -> Refusal:
        """Return the refusal of the value as a refusal of a key."""
        return Refusal(key=key, given=self.given or quote(value), allowed=self.allowed, todo=self.todo)


class RequestError(SizerError):
    """The query was refused. `refusals` holds one row per refused key; the message has a line for each."""

    exit_status = 2

    def __init__(
        self,
        what: str = "",
        *,
        given: str | None = None,
        allowed: str | None = None,
        todo: str | None = None,
        refusals: Iterable[Refusal] = (),
    ):
        self.refusals = tuple(refusals)
        super().__init__(what or " | ".join(map(str, self.refusals)), given=given, allowed=allowed, todo=todo)

    def __str__(self) -> str:
        return "\n".join(map(str, self.refusals)) or super().__str__()


class ConfigError(SizerError):
    """The config JSON is malformed, too large, or needs a refused feature."""

    exit_status = 2


class HubError(SizerError):
    """The config could not be fetched from the hub."""

    exit_status = 2


class PipelineError(HubError):
    """The repository holds a diffusion pipeline, which needs another query."""


class BuildError(SizerError):
    """The architecture could not be built."""

    exit_status = 2


class TraceError(SizerError):
    """The model was built and counted, but its step could not be traced."""

    exit_status = 3


class DeviceError(SizerError):
    """The requested device is missing, or cannot do this work."""

    exit_status = 4


class JobError(SizerError):
    """The job did not deliver: it was cancelled, hit a limit of time or memory, or crashed."""

    exit_status = 1


class QueueFullError(JobError):
    """Too many jobs run or wait."""


class TimeLimitError(JobError):
    """The job took longer than it may."""


def fold(what: str, given: str | None = None, allowed: str | None = None, todo: str | None = None) -> str:
    """Return the parts of an error as one line of text; parts that are None are left out."""
    facts = ", ".join(f"{word} {part}" for word, part in (("given", given), ("allowed", allowed)) if part)
    text = f"{what}: {facts}" if facts else what
    return " ".join((f"{text}; {todo}" if todo else text).split())


def quote(value: object, limit: int = GIVEN_LIMIT) -> str:
    """Return an untrusted value as quoted text, safe to print: one line, clipped, control characters escaped."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > limit:
        return f"{text[:limit]!r}... ({len(text)} characters)"
    return repr(text) if isinstance(value, str) else text


def letters(text: str) -> str:
    """Return the letters and digits of a text in lower case: "RTX 4090" and "rtx-4090" are one."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def suggest(word: str, known: Iterable[str], count: int = 3) -> str | None:
    """Return the known words closest to `word`, as text ("did you mean a, b?"), or None if nothing is close."""
    return did_you_mean(close_words(word, known, count))


def close_words(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known words closest to `word`.

    Case and separators do not count. If a word is equal without them, only that word is returned. A short form ("fp") matches
    words that begin with it. Words of another family are not returned.
    """
    wanted = letters(word[:GIVEN_LIMIT])
    plain: dict[str, list[str]] = {}
    for one in known:
        plain.setdefault(letters(one), []).append(one)
    if wanted in plain:
        return plain[wanted][:count]
    close = difflib.get_close_matches(wanted, plain, n=4 * count, cutoff=0.6)
    begun = sorted((one for one in plain if len(wanted) >= _SHORTEST and one.startswith(wanted)), key=len)
    alike = (name for one in dict.fromkeys((*begun, *close)) for name in plain[one])
    return [name for name in alike if _is_of_family(word.lower(), name.lower())][:count]


def _is_of_family(wanted: str, word: str) -> bool:
    """Return False if two names belong to two families, as `mimo` and `mimi` do.

    Their first letters, up to another character, then differ in more than a transposition, or a typing error in a longer name.
    """
    first, second = (_NAME.findall(one)[0] for one in (wanted, word))
    if not first or not second:
        return first == second
    if first == second or sorted(first) == sorted(second):
        return True
    if min(len(first), len(second)) > 1 and (first.startswith(second) or second.startswith(first)):  # not "svd" and "s3d"
        return True
    longer = max(len(first), len(second))
    return longer >= _LONG_NAME and difflib.SequenceMatcher(None, first, second).ratio() >= _SLIP


def did_you_mean(words: Sequence[str]) -> str | None:
    """Return the words as a suggestion, or None without words."""
    return f"did you mean {', '.join(words)}?" if words else None
