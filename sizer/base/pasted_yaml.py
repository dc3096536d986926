"""YAML as people paste it: plain values alone, without anchors, tags and deep nesting. No torch here."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import yaml

from sizer.base.errors import ConfigError, quote

MAX_YAML_BYTES = 64 * 1024  # PyYAML reads some hundred KB a second
_MAX_DEPTH = 16
_PAIR = re.compile(r"^[A-Za-z_][\w.-]*+[ \t]*+:(?:[ \t]|$)", re.MULTILINE)
_OBJECT = re.compile(r"^[ \t]*\{", re.MULTILINE)
_CARD = re.compile(r"\s*---[ \t]*\n(?:[^\n]*\n)*?---[ \t]*(?:\n|$)")
_ANCHORS = "write the values themselves: a few anchors can expand to gigabytes"


class PlainLoader(yaml.SafeLoader):
    """YAML's plain values. Anchors are refused: a few bytes of them can expand to gigabytes."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.constructor.ConstructorError(None, None, "anchors are not read", event.start_mark)
        self.depth += 1
        if self.depth > _MAX_DEPTH + 1:  # a scalar adds no level
            raise yaml.constructor.ConstructorError(None, None, "nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _ConfigLoader(PlainLoader):
    """The values that JSON has, as a config's reader takes them: 1e-05 is a number, a date is a text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in rows if not tag.endswith((":timestamp", ":merge", ":value"))]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_ConfigLoader.add_implicit_resolver(  # YAML 1.2's numbers: 1.1 wants a point and a sign in them
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def _pairs(loader: _ConfigLoader, node: yaml.MappingNode) -> dict:
    """Return a mapping. Raises ConfigError for a repeated key, for which YAML would take the last value."""
    found = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise yaml.constructor.ConstructorError(None, None, "a key is not text", key_node.start_mark)
        if str(key) in found:
            raise ConfigError("config has a key twice in one object", given=quote(str(key)), todo="keep one of them")
        found[str(key)] = loader.construct_object(value_node, deep=True)
    return found


_ConfigLoader.add_constructor("tag:yaml.org,2002:map", _pairs)


def is_yaml(text: str) -> bool:
    """Return True for a text with two lines `name: value` at its left edge and no JSON object on a separate line."""
    found = _PAIR.finditer(text)
    return next(found, None) is not None and next(found, None) is not None and _OBJECT.search(text) is None


def yaml_as_json(text: str) -> str:
    """Return a config in YAML as JSON, still unchecked.

    Raises:
        ConfigError: The text is too long, is no YAML, or has anchors, tags of Python or a key twice.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_YAML_BYTES:
        allowed = f"at most {MAX_YAML_BYTES:,} bytes of YAML"
        raise ConfigError("config is too large", allowed=allowed, todo="paste it as JSON, which may be larger")
    if _CARD.match(text):
        raise ConfigError("this is a model card (README.md), not a model's config.json", todo="paste the config.json next to it")
    try:
        return json.dumps(yaml.load(text, Loader=_ConfigLoader))
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", None) or error)
        place = f"{problem} at line {mark.line + 1}, column {mark.column + 1}" if mark else problem
        todo = _ANCHORS if "anchors" in problem else "paste the file unchanged"
        raise ConfigError("config is not valid YAML", given=quote(place, 120), todo=todo) from None
    except (ValueError, TypeError, RecursionError) as error:  # a number of 5,000 digits; a set; brackets without an end
        raise ConfigError("config is not valid YAML", given=quote(str(error), 120), todo="paste the file unchanged") from None
