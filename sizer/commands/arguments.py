"""Arguments of several commands: a query, also with a file in its place, and a number of minutes."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sizer.base.config_json import MAX_CONFIG_BYTES, encode_config, query_of_adapter, read_config
from sizer.base.errors import ConfigError, PipelineError, RequestError, SizerError, quote, suggest
from sizer.commands.terminal import to_printable
from sizer.query.hints import hint_of_stage, items_for
from sizer.query.text import QueryKey, as_pipeline, format_query, parse_query, query_keys, with_keys

if TYPE_CHECKING:
    from sizer.pasted.question import Question

QUANTIZATION = "hf_quant_config.json"  # in the same folder as the config.json of a ModelOpt checkpoint
_STDIN = Path("-")
_CALLS = "calls of a Trainer, or of pipelines and models of diffusers, transformers and vLLM"
_CONFIGS = (".json", ".yaml", ".yml")
_TEXTS = (".py", ".sh", ".txt", ".toml", ".md", ".log")
_OF_MODELS = frozenset(("model_type", "architectures"))  # lines that configs of models have


_FILES = (
    "a model's config.json or its folder, a training config, a command, or Python code, in the place of QUERY's arch; - for stdin"
)


def add_query(parser: argparse.ArgumentParser, help: str, *, is_optional: bool = False) -> None:
    """Add the query, a flag for each of its keys, and `--config`. `query_of` reads them."""
    parser.usage = f"%(prog)s {'[QUERY]' if is_optional else 'QUERY'} [--KEY VALUE ...] [OPTION ...]"
    parser.add_argument("query", metavar="QUERY", help=help, nargs="?")
    parser.set_defaults(needs_query=not is_optional)
    parser.add_argument("--config", metavar="FILE", type=Path, help=_FILES)
    keys = parser.add_argument_group("keys of QUERY", "each is a flag or a part of QUERY: --seq 2048 is &seq=2048")
    for key in _flags():
        text = f"{key.allowed}{f' (default: {key.default})' if key.default else ''}".replace("%", "%%")
        kind = {"action": argparse.BooleanOptionalAction} if key.toggles else {"metavar": "VALUE"}
        flag = f"--{key.name.replace('_', '-')}"
        keys.add_argument(flag, dest=f"key_{key.name}", default=None, help=text, **kind)


def query_of(options: argparse.Namespace) -> str:
    """Return the given query with its flags, and with the question of a file in the place of its arch.

    The first part of a query may be the architecture without its key: "resnet50" is "arch=resnet50". It may also be the path of a
    file, as `--config` takes it. A file is read once: the options then hold its query. A query may be a question in words.

    Raises:
        ConfigError: The file cannot be read, or is of no known kind.
        RequestError: The file is a training config that names no model.
    """
    given, path = options.query or "", options.config
    if path is None:
        given, path = _without_file(given)
    keys = {key.name: getattr(options, f"key_{key.name}") for key in _flags()}
    if path is None and (question := _question_in_words(given)) is not None:
        return _replace_query(options, _asked_by(question, with_keys("", keys)))
    query = with_keys(given, keys)
    return query if path is None else _replace_query(options, _with_file(query, path))


def question_of(text: str) -> str:
    """Return a text as a query; the path of a file before other keys is replaced by its question. Raises as `query_of`."""
    given, path = _without_file(text)
    if path is None and (question := _question_in_words(text)) is not None:
        return _asked_by(question, "")
    return text if path is None else _with_file(given, path)


def _question_in_words(text: str) -> Question | None:
    """Return the question of a sentence such as "can I run qwen3 32b on a 3090?"; None for a query.

    Raises RequestError for a sentence that names no known model, or neither a task nor a device.
    """
    words = text.split()
    if "&" in text or len(words) < 2 or "=" in words[0]:
        return None
    from sizer.pasted.sentence import read_sentence  # not needed for other questions

    if (found := read_sentence(text)) is None and len(words) > 2:
        allowed = "a query, or a question that names a model, and a task or a device"
        raise RequestError("query", given=quote(text), allowed=allowed, todo="`sizer models` lists the models")
    return found


def _without_file(text: str) -> tuple[str, Path | None]:
    """Return a query without the path of a file at its beginning, and that path; None without one."""
    arch, _, others = text.partition("&")
    return (others, Path(arch)) if "=" not in arch and _is_file(arch) else (text, None)


def _replace_query(options: argparse.Namespace, query: str) -> str:
    """Make a query the one of the options, in the place of a file and of flags."""
    options.query, options.config = query, None
    for key in _flags():
        setattr(options, f"key_{key.name}", None)  # they are in the query now
    return query


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
    _replace_query(options, as_pipeline(query_of(options)))
    print(to_printable(f"{found.what}, which is answered"), file=sys.stderr)


def instead_of(unknown: list[str], flags: list[str]) -> str | None:
    """Return a suggestion for unknown arguments: flags of a query's keys, or translations of other programs' options."""
    word, equals, value = unknown[0].partition("=")
    if not equals and unknown[1:] and not unknown[1].startswith("-"):
        value = unknown[1]
    name = word.lstrip("-").replace("-", "_")
    if (hint := hint_of_stage(name, value)) is not None:
        return hint
    items = items_for(name, value) if "--batch" in flags else None
    if items is None and f"--{name}".replace("_", "-") in flags and equals:
        items = f"{name}={value}"
    if not items:
        return suggest(word, flags)
    return f"write {' '.join(_as_flag(item) for item in items.split('&'))}"


def _as_flag(item: str) -> str:
    """Return an item of a query, such as "seq=2048", as a command-line argument; an architecture is positional."""
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
    """Return the keys of a query with allowed values and defaults, as lines for a terminal of 80 columns."""
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


def _with_file(query: str, path: Path) -> str:
    """Return the query with the question of a file, whose values the query's own replace. Raises ConfigError or RequestError.

    The path may be a model's folder. If the config names no quantization, a hf_quant_config.json in the folder is read too.
    """
    data = sys.stdin.buffer.read(MAX_CONFIG_BYTES + 1) if path == _STDIN else _read(_file_of(path) if path.is_dir() else path)
    if (question := _question_in(data, path, query)) is not None:
        return _asked_by(question, query)
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


def _question_in(data: bytes, path: Path, query: str) -> Question | None:
    """Return the question of a training config, a command or code; None for a model's config, and for an unreadable text."""
    if path.name == QUANTIZATION or path.is_dir():
        return None
    with contextlib.suppress(ConfigError):
        if not _OF_MODELS.isdisjoint(read_config(data)):
            return None
    from sizer.pasted.reading import read_question  # not needed for other questions
    from sizer.serving.startup import is_startup

    gpu = dict(item.partition("=")[::2] for item in query.removeprefix("?").split("&")).get("gpu")
    text = data.decode("utf-8-sig", "replace")
    if is_startup(text):
        raise RequestError("the file is a server's log", given=quote(str(path)), todo=f"sizer startup --log {path}")
    try:
        question = read_question(text, gpu)
    except SizerError as error:
        if path.suffix in _CONFIGS:
            return None  # the reader of configs refuses it by name
        if path.suffix == ".py" and isinstance(error, ConfigError):
            todo = f"run it without a GPU: sizer run -- {path}"
            raise ConfigError("no known call is in this code", given=quote(str(path)), allowed=_CALLS, todo=todo) from error
        raise
    return None if question.kind == "model" else question


def _asked_by(question: Question, query: str) -> str:
    """Return the query of a question, and say on stderr how it was read. Raises RequestError without a model."""
    own = dict(item.partition("=")[::2] for item in query.removeprefix("?").split("&") if item)
    items = {key: value for key, value in question.items.items() if key not in own} | own
    said = [f"read as {question.title}: {question_text(question.items)}"]
    said += [f"assumed: {line}" for line in question.assumed if "model of the form" not in line]
    said += [f"not counted: {line}" for line in question.unmatched]
    print(to_printable("\n".join(said)), file=sys.stderr)
    if "arch" not in items:
        todo = "write the model before the file's flags: sizer estimate hf:llama-3.1-8b --config FILE"
        raise RequestError("the file names no model", given=quote(question.title), todo=todo)
    return question_text(items)


def question_text(items: Mapping[str, str]) -> str:
    """Return keys and values as a query, the architecture first."""
    ordered = {key: items[key] for key in ("arch",) if key in items} | dict(items)
    return "&".join(f"{key}={value}" for key, value in ordered.items())


def _is_file(text: str) -> bool:
    """Return True for a path that is read in the place of an architecture."""
    path, files = Path(text), ("config.json", "adapter_config.json")
    if path == _STDIN or path.suffix in _CONFIGS:
        return True
    return (path.suffix in _TEXTS and path.is_file()) or any((path / name).is_file() for name in files)


def _file_of(folder: Path) -> Path:
    """Return the config.json of a folder, or its adapter_config.json if it only holds an adapter."""
    adapter = folder / "adapter_config.json"
    return adapter if adapter.is_file() and not (folder / "config.json").is_file() else folder / "config.json"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError("config file cannot be read", given=quote(str(path)), todo=error.strerror) from error


def minutes(text: str) -> float:
    """Return the number of minutes in a text. Raises ArgumentTypeError unless it is between 0 and a day."""
    found = float(text) if re.fullmatch(r"\d{1,4}(\.\d+)?", text) else 0
    if not 0 < found < 24 * 60:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not a number of minutes between 0 and a day")
    return found
