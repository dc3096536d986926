"""A pasted text as plain values: YAML or JSON, strict and bounded."""

from __future__ import annotations

import json
from typing import Any

import yaml

from sizer.base.config_json import read_object
from sizer.base.errors import ConfigError, quote
from sizer.base.pasted_json import pasted_lines
from sizer.base.pasted_yaml import PlainLoader
from sizer.pasted.code import is_command, read_calls, read_command

MAX_BYTES = 64 * 1024


def read_mapping(text: str) -> dict[str, Any]:
    """Return the mapping that a text holds: JSON, YAML, a command's flags, known calls of Python code.

    Raises:
        ConfigError: The text is something else.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(
            "this text is too long", allowed=f"at most {MAX_BYTES:,} bytes", todo="paste the config alone"
        )
    text = pasted_lines(text)
    if text.lstrip().startswith("{"):
        return read_object(text)
    if found := read_command(text) if is_command(text) else read_calls(text):
        return found
    try:
        value = yaml.load(text, Loader=PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        given = f"{place}{quote(str(getattr(error, 'problem', None) or error), 120)}"
        raise ConfigError("this text is not YAML", given=given, todo="paste the file as it is") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            "this text is not YAML", given=quote(str(error), 120), todo="paste the file as it is"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            "this text is not understood", given=quote(text.strip(), 60), allowed=ALLOWED, todo="paste one of these"
        )
    return {str(key): part for key, part in value.items()}


ALLOWED = (
    "a training config (Axolotl, LLaMA-Factory, TRL, torchtune, DeepSpeed, accelerate), a command or Python code with a Trainer's "
    "arguments, these as JSON, or an out-of-memory message"
)


def as_number(value: object) -> int | None:
    """Return a whole number that a config states, None for anything else ("auto")."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else None


def as_flag(value: object) -> bool | None:
    """Return a switch that a config states, None for anything else ("auto")."""
    if isinstance(value, bool):
        return value
    return {"true": True, "yes": True, "false": False, "no": False}.get(str(value).strip().lower())


def as_text(value: object) -> str:
    """Return a value as a config writes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
