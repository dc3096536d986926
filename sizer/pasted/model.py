"""A model alone as a question: its config.json, the config of an adapter around it, or its name."""

from __future__ import annotations

import json

from sizer.base.config_json import canonical_config, encode_config, query_of_adapter
from sizer.base.errors import ConfigError
from sizer.base.pasted_text import CONFIG_CLASS, is_other_class, is_yaml, pasted_lines, relax, yaml_as_json
from sizer.catalogue.sources import arch_of
from sizer.pasted.question import Draft, Question
from sizer.pasted.words import Words, find_model

LONGEST = 200  # characters of a name
_SIGNS = ("model_type", CONFIG_CLASS, "architectures", "_class_name", "n_layers")  # the last of Meta's and Mistral's params.json


def read_model(text: str) -> Question | None:
    """Return the question of a model's config or name; None for another text.

    Raises:
        ConfigError: The text is another file of a model's folder, or a config that is malformed.
    """
    name = text.strip().removeprefix("https://huggingface.co/")
    in_yaml = is_yaml(pasted_lines(text))
    if not in_yaml and "{" not in name and CONFIG_CLASS not in relax(text):
        arch = _named(name) if len(name) <= LONGEST else None
        return None if arch is None else _alone("the name of a model", {"arch": arch})
    try:
        value = json.loads(yaml_as_json(pasted_lines(text)) if in_yaml else relax(text))
    except (ValueError, RecursionError, ConfigError):
        return None
    if not isinstance(value, dict) or is_other_class(value):
        return None
    if (adapter := query_of_adapter(text)) is not None:
        return _alone("an adapter_config.json", {"mode": "training"} | dict(part.split("=", 1) for part in adapter.split("&")))
    config = canonical_config(text)  # raises for another file, by its name
    if not any(sign in value for sign in _SIGNS):
        return None
    return _alone("a model's config.json", {"arch": f"config:{encode_config(config)}"})


def _named(name: str) -> str | None:
    """Return the architecture that a text names, as a repository or in the catalogue, if it names nothing else."""
    if len(name.split()) == 1 and (arch := arch_of(name)) is not None:
        return arch
    words = Words(name)
    found = find_model(words)
    return found.means if found is not None and found.whole and len(words.text) == found.end - found.start else None


def _alone(title: str, items: dict[str, str]) -> Question:
    draft = Draft(title=title)
    shown = {key: "config:…" if value.startswith("config:") else value for key, value in items.items()}
    draft.take(title, **shown)
    draft.items = items
    return draft.whole(kind="model")
