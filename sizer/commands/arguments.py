"""Arguments that several commands have: a query with a config from a file, and a number of minutes."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from sizer.base.config_json import MAX_CONFIG_BYTES, encode_config, query_of_adapter, read_config
from sizer.base.errors import ConfigError, PipelineError, quote, suggest
from sizer.commands.terminal import to_printable
from sizer.query.other_words import items_for, told_of_stage
from sizer.query.several import as_pipeline, with_keys
from sizer.query.text import QueryKey, format_query, parse_query, query_keys

QUANTIZATION = "hf_quant_config.json"  # beside the config.json of a checkpoint of ModelOpt


def add_query(parser: argparse.ArgumentParser, help: str, *, is_optional: bool = False) -> None:
    """Add the query, a flag for each of its keys, and `--config`, all of which `query_of` reads."""
    parser.usage = f"%(prog)s {'[QUERY]' if is_optional else 'QUERY'} [--KEY VALUE ...] [OPTION ...]"
    query = parser.add_argument("query", metavar="QUERY", help=help)
    if is_optional:
        query.nargs, query.default, query.required = "?", "", False
    parser.add_argument("--config", metavar="FILE", type=Path, help="a config.json, or its folder, in the place of arch")
    keys = parser.add_argument_group("keys of QUERY", "each is a flag or a part of QUERY: --seq 2048 is &seq=2048")
    for key in _flags():
        text = f"{key.allowed}{f' (default: {key.default})' if key.default else ''}".replace("%", "%%")
        kind = {"action": argparse.BooleanOptionalAction} if key.toggles else {"metavar": "VALUE"}
        flag = f"--{key.name.replace('_', '-')}"
        keys.add_argument(flag, dest=f"key_{key.name}", default=None, help=text, **kind)


def query_of(options: argparse.Namespace) -> str:
    """Return the query that was given, with its flags, and with the config of `--config` in the place of its arch.

    The first part of a query may be the architecture without its key: "resnet50" is "arch=resnet50". It may be the path of a
    config.json, too, or of its folder, as `--config` takes it.

    Raises:
        ConfigError: The file of `--config` cannot be read.
    """
    given, path = options.query, options.config
    arch, _, others = given.partition("&")
    if path is None and "=" not in arch and _is_config(Path(arch)):
        given, path = others, Path(arch)
    query = with_keys(given, {key.name: getattr(options, f"key_{key.name}") for key in _flags()})
    return query if path is None else _with_config(query, path)


def print_link(options: argparse.Namespace) -> None:
    """Print the link of a command's question on the page, below an answer in words."""
    given = vars(options)
    if "query" in given and not any(given.get(name) for name in ("json", "csv", "script", "snapshot")):
        print(f"\nLink: /?{format_query(parse_query(query_of(options)))}")


def answer_as_pipeline(options: argparse.Namespace, found: PipelineError) -> None:
    """Have a command ask for the diffusion pipeline that a repository holds, and say so on stderr.

    Raises:
        PipelineError: The command has no single query.
    """
    if "query" not in options:
        raise found
    options.query = as_pipeline(query_of(options))
    for key in _flags():
        setattr(options, f"key_{key.name}", None)  # they are in the query now
    print(to_printable(f"{found.what}, which is answered"), file=sys.stderr)


def instead_of(unknown: list[str], flags: list[str]) -> str | None:
    """Return what to write for arguments that no option takes: flags of a query's keys, for another program's words, too."""
    word, equals, value = unknown[0].partition("=")
    if not equals and unknown[1:] and not unknown[1].startswith("-"):
        value = unknown[1]
    name = word.lstrip("-").replace("-", "_")
    if (told := told_of_stage(name, value)) is not None:
        return told
    items = items_for(name, value) if "--batch" in flags else None
    if items is None and f"--{name}".replace("_", "-") in flags and equals:
        items = f"{name}={value}"
    if not items:
        return suggest(word, flags)
    return f"write {' '.join(_as_flag(item) for item in items.split('&'))}"


def _as_flag(item: str) -> str:
    """Return an item of a query, such as "seq=2048", as a command line has it; an architecture stands by itself."""
    key, _, value = item.partition("=")
    if key == "arch":
        return "the name of the model alone" if value == "..." else value
    flag = key.replace("_", "-")
    if any(known.name == key and known.toggles for known in _flags()):
        return f"--{flag}" if value == "1" else f"--no-{flag}"
    return f"--{flag} {value}"


def _flags() -> list[QueryKey]:
    return [key for key in query_keys() if key.name not in ("v", "arch")]


def describe_keys() -> str:
    """The keys of a query with what they take and their defaults, as lines for a terminal of 80 columns."""
    wide = max(len(key.name) for key in query_keys())
    indent = " " * (wide + 4)
    lines = (
        textwrap.fill(
            f"  {key.name.ljust(wide)}  {key.allowed}{f' (default: {key.default})' if key.default else ''}",
            width=80,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        for key in query_keys()
    )
    return "\n".join(["QUERY is key=value with & between, as in a link of the page. The keys:", *lines])


def _with_config(query: str, path: Path) -> str:
    """The query with a file's config in the place of its arch, which it need not have. Raises ConfigError.

    The path may be that of a model's folder. A hf_quant_config.json there is read with a config that names no quantization.
    """
    data = _read(_file_of(path) if path.is_dir() else path)
    others = [item for item in query.removeprefix("?").split("&") if item and item.partition("=")[0] != "arch"]
    if (adapter := query_of_adapter(data)) is not None:
        asked = {item.partition("=")[0] for item in others}
        return "&".join([*(item for item in adapter.split("&") if item.partition("=")[0] not in asked), *others])
    config = read_config(data)
    beside = path.parent / QUANTIZATION if path.is_file() else path / QUANTIZATION
    if "quantization_config" not in config and path.name != QUANTIZATION and beside.is_file():
        data += b"\n" + _read(beside)
        read_config(data)
    return "&".join([f"arch=config:{encode_config(data.decode())}", *others])


def _is_config(path: Path) -> bool:
    files = ("config.json", "adapter_config.json")
    return path.suffix in (".json", ".yaml", ".yml") or any((path / name).is_file() for name in files)


def _file_of(folder: Path) -> Path:
    """Return the config.json of a folder, or its adapter_config.json if it holds an adapter alone."""
    adapter = folder / "adapter_config.json"
    return adapter if adapter.is_file() and not (folder / "config.json").is_file() else folder / "config.json"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError("config file cannot be read", given=quote(str(path)), todo=error.strerror) from error


def minutes(text: str) -> float:
    """The number of minutes that a text names. Raises ArgumentTypeError where it is not between 0 and a day."""
    found = float(text) if re.fullmatch(r"\d{1,4}(\.\d+)?", text) else 0
    if not 0 < found < 24 * 60:
        raise argparse.ArgumentTypeError(f"{quote(text)} is no number of minutes between 0 and a day")
    return found
