"""Words of a text, and the models and devices of the catalogue among them. What is understood is taken out, the rest remains.

A model is found by the letters and digits of its key, title or repository ("qwen2.5 7b"), or by a part of its name ("mistral 7b",
"flux dev"): then the name with the fewest further parts is taken, and the others are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from sizer.base.errors import letters
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.pipelines import pipeline_names
from sizer.catalogue.presets import list_presets
from sizer.catalogue.sources import arch_of, resolve

LONGEST_NAME, LONGEST_VISION = 7, 5  # words of a model's or a device's name, of torchvision's models
MOST_OTHERS = 4  # other models with such a name, to be named
TAKEN = "|"  # in place of what was taken: no word, and no part of one
_WORD = re.compile(r"[a-z0-9][a-z0-9.+/_-]*[a-z0-9+]|[a-z0-9]")
_PLURAL = re.compile(r"[a-z]{0,3}[0-9]{1,4}s")
_TIMES = re.compile(r"\b([1-9][0-9]?)(?:x ?| x )(?=[a-wyz][a-z]*[0-9 ]|[0-9]{4}\b|[0-9]{1,3} ?g(?:i?b)?\b)")
WHOLE, PARTS, BEGINNING = 2, 1, 0  # ranks of what a phrase is of a model's name
# Beginnings of names that are words of other texts, too.
_COMMON = ("all", "depth", "nvidia", "sam", "stable", "time", "vision")
SIZED = re.compile(r"\b([0-9]{1,3}(?:\.[0-9])?b)\b")
_SIZED_LATER = re.compile(  # of a name whose first words alone are known
    r" (?:[a-z]+ |[0-9.]+ ){0,2}[0-9]{1,3}(?:\.[0-9])?b\b| (?:tiny|mini|nano|small|medium|base|large|huge|giant|x{1,2}l(?:arge)?)\b"
)
_SIZED_NEXT = re.compile(r" ([0-9]{1,3}(?:\.[0-9])?b)\b")
SIZE_TOLERANCE = 0.2  # of names: Mistral 7B has 7.25e9 parameters, DeepSeek's 671B are 685e9 with a further layer
_SERIES = ("rtx-", "gtx-", "rx-", "quadro-", "radeon-pro-")


class Words:
    """A text in lower case, with single spaces between its words. Hyphens separate words, except in names of repositories."""

    def __init__(self, text: str) -> None:
        found = _WORD.findall(re.sub(r"[:×,]", lambda sign: "x" if sign[0] == "×" else " ", text.lower()))
        parts = [part for word in found for part in ([word] if "/" in word else re.findall(r"[^-]+", word))]
        self.text = _TIMES.sub(r"\1 ", " ".join(_singular(part) for part in parts))

    def take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Return the first match of a pattern, and take it out of the text."""
        if (found := re.search(pattern, self.text)) is not None:
            self._take(found.start(), found.end())
        return found

    def take_name(self, name: Name) -> str:
        """Return the words of a name, and take them out of the text."""
        given = self.text[name.start : name.end]
        self._take(name.start, name.end)
        return given

    def rest(self) -> list[str]:
        """Return the words that were not taken, as phrases."""
        return [phrase for part in self.text.split(TAKEN) if (phrase := part.strip())]

    def spans(self, longest: int) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each run of up to so many words."""
        words = [(word.start(), word.end()) for word in re.finditer(rf"[^ {re.escape(TAKEN)}]+", self.text)]
        for first, (start, _) in enumerate(words):
            for last in range(first, min(first + longest, len(words))):
                if last > first and self.text[words[last - 1][1] : words[last][0]] != " ":
                    break
                yield start, words[last][1]

    def _take(self, start: int, end: int) -> None:
        self.text = self.text[:start] + TAKEN + self.text[end:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name in a text: its place, what it names, whether it is the whole name of that, and what else has such a name."""

    start: int
    end: int
    means: str
    whole: bool = True
    others: tuple[str, ...] = ()


def find_model(words: Words) -> Name | None:
    """Return the model with the longest name in a text, `means` is its architecture; None without one."""
    found = [
        (len(letters(words.text[start:end])), rank, start, end, sized)
        for start, end in words.spans(LONGEST_NAME)
        for rank, archs in _called(words.text[start:end])
        if rank == WHOLE or (rank == PARTS and " " in words.text[start:end]) or not _SIZED_LATER.match(words.text, end)
        if (sized := _of_size(archs, _SIZED_NEXT.match(words.text, end)))
    ]
    if not found:
        return None
    _, rank, start, end, archs = max(found, key=lambda one: (one[0], one[1], -one[2]))
    return Name(start=start, end=end, means=archs[0], whole=rank == WHOLE, others=tuple(archs[1 : 1 + MOST_OTHERS]))


def _of_size(archs: Sequence[str], size: re.Match[str] | None) -> list[str]:
    """Return the architectures without presets of another size than the one that follows their name, such as 2b."""
    if size is None:
        return [*archs]
    presets = {f"hf:{one.key}": one for one in list_presets()}

    def is_as_large(arch: str) -> bool:
        preset = presets.get(arch)
        if preset is None or size[1] in f"{preset.title} {preset.hub_id}".lower():
            return True
        return abs(preset.published_parameters / (float(size[1][:-1]) * 1e9) - 1) < SIZE_TOLERANCE

    return [arch for arch in archs if is_as_large(arch)]


def find_size(words: Words) -> Name | None:
    """Return the first language model of the catalogue with a number of parameters such as 70b; None without one."""
    found = SIZED.search(words.text)
    if found is None:
        return None
    known = [f"hf:{one.key}" for one in list_presets() if one.key.endswith(f"-{found[1]}") and one.modality == "text"]
    if not known:
        return None
    return Name(start=found.start(), end=found.end(), means=known[0], whole=False, others=tuple(known[1 : 1 + MOST_OTHERS]))


def find_device(words: Words) -> Name | None:
    """Return the device with the longest name in a text, `means` is its key; None without one."""
    devices = _devices()
    found = [
        (len(name), -start, start, end, devices[name])
        for start, end in words.spans(LONGEST_NAME)
        if (name := _plain(words.text[start:end])) in devices
    ]
    if not found:
        return None
    _, _, start, end, keys = max(found)
    return Name(start=start, end=end, means=keys[0], others=tuple(keys[1:]))


def _called(text: str) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the architectures that a phrase may name, the likely one first, with a rank: a whole name is above parts of a name."""
    plain = _plain(text)
    if (arch := _models().get(plain)) is not None:
        yield WHOLE, [arch]
        return
    if re.search(r"/.*[a-z]", text) and " " not in text and (arch := arch_of(text)) is not None:
        yield WHOLE, [arch]
    if len(text.split()) <= LONGEST_VISION and (" " not in text or any(char.isdecimal() for char in text)):
        for source in ("torchvision", "timm"):
            if (name := resolve(source, text.replace(" ", ""))) is not None:
                yield WHOLE, [f"{source}:{name}"]
                return
    parts = _parts(text)
    if len(parts) == 1 and (len(plain) < 4 or not plain.isalpha() or plain in _COMMON):
        return
    names = _named().get(parts[0], ())
    found = [(len(name) - len(parts), arch) for name, arch in names if _is_within(parts, name)]
    rank = PARTS if len(parts) > 1 else BEGINNING
    if not found and SIZED.search(text, text.rfind(" ") + 1):  # a further word before the size: a model trained anew
        found = [(0, arch) for name, arch in names if len(parts) - len(name) == 1 and _is_within(name, parts)]
    if found:
        yield rank, list(dict.fromkeys(arch for _, arch in sorted(found, key=lambda one: one[0])))


def _is_within(parts: Sequence[str], name: Sequence[str]) -> bool:
    """Return True if all parts are parts of a name, in this order."""
    rest = iter(name)
    return all(part in rest for part in parts)


def _parts(name: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]+(?:\.[0-9]+)*", name.lower()) or [""]


@cache
def _names() -> tuple[tuple[str, str], ...]:
    """Return all names of the catalogue's presets and pipelines, each with its architecture, in display order."""
    found = [
        (name, f"hf:{preset.key}")
        for preset in list_presets()
        for name in (preset.key, preset.title, preset.hub_id.rpartition("/")[2])
    ]
    for key, (title, repository) in sorted(pipeline_names().items(), key=lambda item: (len(item[0]), item[0])):
        found += [(name, f"diffusers:{key}") for name in (key, title, repository.rpartition("/")[2])]
    return tuple(found)


@cache
def _models() -> Mapping[str, str]:
    """Return the architectures by the letters of their names."""
    found: dict[str, str] = {}
    for name, arch in _names():
        found.setdefault(_plain(name), arch)
    return found


@cache
def _named() -> Mapping[str, list[tuple[list[str], str]]]:
    """Return the parts of names, with their architectures, by their first part."""
    found: dict[str, list[tuple[list[str], str]]] = {}
    for name, arch in _names():
        parts = _parts(name)
        found.setdefault(parts[0], []).append((parts, arch))
    return found


@cache
def _devices() -> Mapping[str, list[str]]:
    """Return the devices by the letters of their keys: whole, without their series, and without their memory."""
    found: dict[str, list[str]] = {}
    for key in GPUS:
        bare = re.sub(r"-[0-9]+gb$", "", key)
        names = {key, bare}
        names |= {one.removeprefix(series) for one in (key, bare) for series in _SERIES}
        for name in names:
            if not name.isdecimal() or len(name) > 3:
                found.setdefault(_plain(name), []).append(key)
    return found


def _singular(word: str) -> str:
    return word[:-1] if _PLURAL.fullmatch(word) and word not in _devices() else word


def _plain(name: str) -> str:
    """Return the letters and digits of a name; a plus tells models apart."""
    return letters(name.replace("+", "plus"))
