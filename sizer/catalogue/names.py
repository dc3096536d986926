"""Names of models by source, known without importing the packages that build them: the source of a name, and similar names.

`vision_names.csv` has the names of torchvision 0.29 and timm 1.0.31. It only resolves and suggests names: the packages
themselves decide which models they build.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path

from sizer.base.errors import GIVEN_LIMIT, RequestError, close_words, did_you_mean, letters
from sizer.catalogue.pipelines import preset_names
from sizer.catalogue.presets import find_preset, list_presets

DATA = Path(__file__).with_name("vision_names.csv")
_WRITTEN = re.compile(r"[\w.-]+", re.ASCII)
_COUNT = 3  # names of a suggestion
HF, DIFFUSERS, TORCHVISION, TIMM = "hf", "diffusers", "torchvision", "timm"


def resolve(source: str, text: str) -> str | None:
    """Return the source's name that equals a text except for case and separators; None if the source has no such name.

    A name of timm may have a tag after a dot, which does not change.
    """
    if source == HF:
        try:
            return find_preset(text).key
        except RequestError:
            return None
    if _WRITTEN.fullmatch(text) is None:
        return None
    name, dot, tag = text.partition(".") if source == TIMM else (text, "", "")
    known = _by_letters().get(source, {}).get(letters(name[:GIVEN_LIMIT]), ())
    found = name if name in known else known[0] if len(known) == 1 else None  # regnet_x_16gf is not regnet_x_1_6gf
    return None if found is None else f"{found}{dot}{tag}"


def close_name(source: str, text: str) -> str | None:
    """Return a suggestion for a name that a source does not have, such as "did you mean torchvision:resnet50?".

    None without any.

    Names that differ only in case and separators come first, in the source itself or in other sources. Similar names follow,
    from the source, or from other sources if it has none.
    """
    if own := _by_letters().get(source, {}).get(letters(text[:GIVEN_LIMIT])):
        return did_you_mean(own)
    others = [one for one in _by_letters() if one != source]
    same = [f"{other}:{name}" for other in others if (name := resolve(other, text)) is not None]
    near = _near(source, text)
    if not same:
        return did_you_mean(near) or next((did_you_mean(found) for one in others if (found := _near(one, text, f"{one}:"))), None)
    return did_you_mean([*same, *(f"{source}:{name}" for name in near)][:_COUNT])


def _near(source: str, text: str, prefix: str = "") -> list[str]:
    """Return the names of a source that are close to a text, behind a prefix."""
    return [f"{prefix}{name}" for name in close_words(text, chain.from_iterable(_by_letters().get(source, {}).values()), _COUNT)]


@cache
def _by_letters() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the names of each source by their letters and digits, in the order in which sources are searched."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [(row["source"], row["name"]) for row in csv.DictReader(file)]
    names = {
        HF: [preset.key for preset in list_presets()],
        TORCHVISION: [name for source, name in rows if source == TORCHVISION],
        DIFFUSERS: preset_names(),
        TIMM: [name for source, name in rows if source == TIMM],
    }
    found: dict[str, dict[str, list[str]]] = {source: {} for source in names}
    for source, known in names.items():
        for name in known:
            found[source].setdefault(letters(name), []).append(name)
    return found
