"""Question of a training config: the keys of a query, each with its line, and the remaining lines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a config and the keys of the query that it became."""

    given: str
    means: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A config as a question. `items` are keys of a query with their values; `arch` is missing if the config names no model.

    `read` are the understood lines, `assumed` the values that the config does not state, `unmatched` the lines without a
    counterpart, and `irrelevant` the number of lines that change no memory. `kind` is a "config", a "command" of a server, "code"
    that runs a model, a "model" alone, or "words".
    """

    title: str
    items: dict[str, str]
    kind: str = "config"
    read: tuple[Line, ...] = ()
    assumed: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    irrelevant: int = 0


@dataclass(slots=True, kw_only=True)
class Draft:
    """A question that is being read from a config."""

    title: str
    items: dict[str, str] = field(default_factory=dict)
    read: list[Line] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    irrelevant: int = 0

    def take(self, given: str, **items: str | int) -> None:
        """Note that a line of the config means these keys."""
        texts = {key: str(value) for key, value in items.items()}
        self.items |= texts
        self._forget_assumed(*texts)
        self.read.append(Line(given=given, means="&".join(f"{key}={value}" for key, value in texts.items())))

    def assume(self, why: str, **items: str | int) -> None:
        """Take keys for which the config has no line."""
        missing = {key: str(value) for key, value in items.items() if key not in self.items}
        if missing or not items:
            self.items |= missing
            self.assumed.append(
                f"{'&'.join(f'{key}={value}' for key, value in missing.items())}: {why}" if missing else why
            )

    def take_or_assume(self, name: str, value: int | None, key: str, default: int, why: str) -> None:
        """Note the number of a line, or the trainer's default without that line."""
        if value is None:
            self.assume(why, **{key: default})
        else:
            self.take(f"{name}: {value}", **{key: value})

    def drop(self, *keys: str) -> None:
        """Forget keys, and lines that mean nothing else."""
        for key in keys:
            self.items.pop(key, None)

        def rest(text: str) -> str:
            return "&".join(part for part in text.split("&") if part.partition("=")[0] not in keys)

        kept = (replace(line, means=rest(line.means)) for line in self.read)
        self.read = [line for line in kept if line.means]
        self._forget_assumed(*keys)

    def _forget_assumed(self, *keys: str) -> None:
        kept = []
        for text in self.assumed:
            items, colon, why = text.partition(": ")
            if not colon or "=" not in items or " " in items:  # a remark about no key
                kept.append(text)
            elif left := "&".join(item for item in items.split("&") if item.partition("=")[0] not in keys):
                kept.append(f"{left}: {why}")
        self.assumed = kept

    def whole(self, kind: str = "config") -> Question:
        """Return the question."""
        return Question(
            title=self.title,
            kind=kind,
            items=dict(self.items),
            read=tuple(self.read),
            assumed=tuple(self.assumed),
            unmatched=tuple(self.unmatched),
            irrelevant=self.irrelevant,
        )
