"""A pasted text as plain values: YAML or JSON, strict and bounded."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any

import yaml

from sizer.base.config_json import read_object
from sizer.base.errors import ConfigError, RefusedValueError, quote
from sizer.base.pasted_text import PlainLoader, pasted_lines
from sizer.catalogue.gpu_keys import find_gpu
from sizer.pasted.code import is_command, read_calls, read_command
from sizer.pasted.other_programs import refuse_other_program

MAX_BYTES = 64 * 1024


def read_mapping(text: str) -> dict[str, Any]:
    """Return the mapping that a text holds: JSON, YAML, a command's flags, known calls of Python code.

    Raises:
        ConfigError: The text is something else.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(
            "this text is too long", allowed=f"at most {MAX_BYTES:,} bytes", todo="paste only the config"
        )
    text = pasted_lines(text)
    if text.lstrip().startswith("{"):
        return read_object(text)
    if found := read_command(text) if is_command(text) else read_calls(text):
        return found
    _refuse_other_texts(text)
    if is_command(text):
        raise ConfigError(
            "the flags of this script are not read",
            given=quote(text.strip(), 60),
            allowed="flags of transformers', TRL's and diffusers' example scripts, and of kohya's train_network.py",
            todo="run it without a GPU: write `sizer run -- ` before the command",
        )
    if _PYTHON.search(text):
        raise ConfigError(
            "this Python code has no call that is read here",
            given=quote(text.strip(), 60),
            allowed="arguments of a Trainer, or calls of from_pretrained, torchvision, timm and vLLM's LLM",
            todo="run the script without a GPU: sizer run -- SCRIPT.py",
        )
    if (tables := _tables_in(text)) is not None:
        return tables
    try:
        value = yaml.load(text, Loader=PlainLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        given = f"{place}{quote(str(getattr(error, 'problem', None) or error), 120)}"
        raise ConfigError("this text is not YAML", given=given, todo="paste the file unchanged") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(
            "this text is not YAML", given=quote(str(error), 120), todo="paste the file unchanged"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            "this text is not understood",
            given=quote(text.strip(), 60),
            allowed=ALLOWED,
            todo="paste one of these, or use the form",
        )
    return {str(key): part for key, part in value.items()}


def _tables_in(text: str) -> dict[str, Any] | None:
    """Return the tables of a TOML file, or the flags that kohya's scripts read from one; None for another text.

    Raises ConfigError for a file with tables that is not TOML.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if _TABLE.search(text) is None:
            return None
        raise ConfigError("this text is not TOML", given=quote(str(error), 120), todo="paste the file unchanged") from None
    except RecursionError:
        return None
    # sd-scripts, library/train_util.py, read_config_from_file: tables are one list of flags
    flags: dict[str, Any] = {}
    for name, value in tables.items():
        flags |= value if isinstance(value, dict) else {name: value}
    if "pretrained_model_name_or_path" in flags and not flags.keys().isdisjoint(("network_module", "network_dim")):
        script = "sdxl_train_network.py" if _SDXL.search(" ".join(map(as_text, flags.values()))) else "train_network.py"
        words = [f"--{key}={as_text(part)}" for key, part in flags.items() if part not in (False, "", [])]
        return read_command(shlex.join(["accelerate", "launch", script, *words]))
    return tables if _TABLE.search(text) else None


_TABLE = re.compile(r"(?m)^\[[\w.-]{1,64}\][ \t]*(?:#.*)?$")
_SDXL = re.compile(r"sdxl|[_-]xl|xl[_-]|illustrious|pony", re.IGNORECASE)

ALLOWED = (
    "a training config (Axolotl, LLaMA-Factory, TRL, torchtune, torchtitan, DeepSpeed, accelerate, ms-swift, kohya), a command or "
    "Python code with a Trainer's arguments, these as JSON, the command or log of a server (vLLM, SGLang, llama.cpp), Python "
    "code of diffusers, transformers, torchvision, timm or vLLM, a model's config.json or name, a question in words that names "
    "a model, or an out-of-memory message"
)

_PYTHON = re.compile(r"^[ \t]*(?:import [A-Za-z_][\w.]*|from [A-Za-z_][\w.]* import )", re.MULTILINE)

def _refuse_other_texts(text: str) -> None:
    """Raise ConfigError for the command of a program that is not read, and for nvidia-smi's table."""
    if "NVIDIA-SMI" in text:
        names = re.findall(r"\|\s{1,9}[0-9]{1,3}\s{1,9}([A-Z].{2,40}?)\s{2}", text)
        raise ConfigError("nvidia-smi's table names devices, not work", given="NVIDIA-SMI", todo=_device_of(names))
    refuse_other_program(text)


def _device_of(names: list[str]) -> str:
    """Return the sentence that says which device of the catalogue has one of these names."""
    for name in names:
        try:
            return f"choose the model, and gpu={find_gpu(name.strip()).key}"
        except RefusedValueError:
            continue
    return "choose the model and the device in the form"


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
