"""Well-known transformers models by name, each with its config and its published parameter count.

The data is `presets.json` in this folder, read at first use. A config holds the keys of the model's own config.json that affect
the architecture, in the format of transformers 5: it has `rope_parameters` instead of a hub config's `rope_theta` and
`rope_scaling`, and `num_labels` instead of a table of class names. If the checkpoint's weights are quantized, it also has their
`quantization_config`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sizer.base.errors import RequestError, letters, quote, suggest

_TUNED = re.compile(r"(instruct|chat|it|hf|base)$")  # endings of names that change no shape
DATA = Path(__file__).with_name("presets.json")

PRESETS: Mapping[str, Preset]  # key -> Preset in display order; made by __getattr__ at the first access


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One well-known model: its architecture, and its published parameter count.

    `published_parameters` was counted by others, never by Sizer; `published_as` names the source. The count is exact if
    `published_precision` is 1, else rounded to that many parameters ("6.7B" is 6_700_000_000 with a precision of 10**8).

    Checkpoints contain tensors that are not parameters (masks, position ids, quantization scales), store tied weights twice, or
    have a head that the class lacks. `difference` is the number to add to the published count to get the count of `head`, and
    `difference_reason` explains it. `hub_id` is for reference; nothing is downloaded.
    """

    key: str
    title: str
    family: str
    modality: str
    hub_id: str
    head: str
    config_text: str
    published_parameters: int
    published_as: str
    published_precision: int = 1
    difference: int = 0
    difference_reason: str | None = None
    note: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the model, as a new dict at each access, because transformers modifies its argument."""
        return json.loads(self.config_text)

    @property
    def exact(self) -> bool:
        """Return whether the published count is exact, not rounded."""
        return self.published_precision == 1

    @property
    def expected_parameters(self) -> int:
        """Return the published number of parameters of `head`, within half of `published_precision` if rounded."""
        return self.published_parameters + self.difference


def find_preset(key: str) -> Preset:
    """Return the preset with this key, such as "llama-3.1-8b", or with this hub name; case and separators are ignored.

    Raises RequestError, with similar keys, if there is none.
    """
    presets = _load()
    key = key if key in presets else _by_letters().get(_TUNED.sub("", letters(key)), key)
    if key not in presets:
        todo = (
            suggest(key, presets)
            or "see `python -m sizer models`; any other model is hub:<org/name> or config:"
        )
        raise RequestError("unknown preset", given=quote(key), allowed="a key of the presets", todo=todo)
    return presets[key]


@cache
def _by_letters() -> Mapping[str, str]:
    """Return the keys of presets by their letters and digits, and by those of their hub names without owner."""
    presets = _load().values()
    by_hub_name = {letters(preset.hub_id.rpartition("/")[2]): preset.key for preset in presets}
    names = {**by_hub_name, **{letters(preset.key): preset.key for preset in presets}}
    return {**{_TUNED.sub("", name): key for name, key in names.items()}, **names}


def list_presets() -> tuple[Preset, ...]:
    """Return all presets in display order: language models, encoders, sequence to sequence, images, several modalities, audio."""
    return tuple(_load().values())


def __getattr__(name: str) -> Mapping[str, Preset]:
    if name == "PRESETS":
        return _load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _load() -> Mapping[str, Preset]:
    """Return all presets by key, read-only, in the order of the file."""
    rows = json.loads(DATA.read_text(encoding="utf-8"))
    presets = [Preset(config_text=json.dumps(row.pop("config")), **row) for row in rows]
    return MappingProxyType({preset.key: preset for preset in presets})
