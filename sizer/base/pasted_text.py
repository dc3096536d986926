"""JSON and YAML as people paste them: Markdown fences, Python dicts, printed configs, comments; and which file a text is.

JSON is changed as text only: nothing is evaluated, and every pattern takes linear time. YAML gives plain values alone, without
anchors, tags and deep nesting. No torch here.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from sizer.base.errors import ConfigError, quote

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[\w.+-]*[ \t]*$", re.MULTILINE)
# Text before the object: `LlamaConfig {`, `config = {`, a file's name.
_HEAD = re.compile(r"[\w\s.:=#/\"'-]{0,200}+(?=\{)")
# A config's constructor, or a dict's, as code writes it, behind comments and imports.
_CONSTRUCTOR = re.compile(
    r"(?:\s*+(?:\#|from\b|import\b)[^\n]*+\n)*+\s*+(?:[\w.]{1,100}+\s*+=\s*+)?(?=(?:\w{1,100}+\.){0,5}+(?:\w{0,100}Config|dict)\()",
    re.ASCII,
)
_SIZE = re.compile(r"model_type|\w*(?:hidden|layer|embd|embed|d_model|dim|vocab)\w*")
_REST = re.compile(r"[{}]|[\"']\s{0,20}:")  # not found in a sentence around an object: a brace, or a key
_QUOTED_LINE = re.compile(r"\s*+(?:$|[>+|]\s?)")  # of a quoted mail, or of a diff
_NUMBERED_LINE = re.compile(r"[ \t]*+(\d{1,6}+)(?:[ \t]?[:.|)│→][ \t]?|\t|[ \t]|$)")  # of `cat -n` or a web page
_KEYS_ALONE = re.compile(r"""\s*+["'][\w.-]{1,200}["']\s*+:""")
_PRINTED_MODEL = re.compile(r"\s*+\w++\(\s*\n\s*\(\w++\): ")
CONFIG_CLASS = "_config_class"  # key of the class of a pasted constructor
_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z))'
    r"|(?P<quoted>'[^'\\]*+(?:\\.[^'\\]*+)*+(?:'|\Z))"
    r"|(?P<curly>[“”„][^“”„]*+(?:[“”„]|\Z))"
    r"|(?P<call>[A-Za-z_][\w.]*+\()|(?P<keyword>[A-Za-z_]\w*+\s{0,20}=(?!=))"
    r"|(?P<comment>//[^\n]*+|\#[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/|\Z))"
    r"|(?P<word>[A-Za-z_][\w.]*+)|(?P<number>-?[\d.][\w.+-]*+|-(?:Infinity|inf)\b)|(?P<space>\s++)|(?P<other>.)",
    re.DOTALL,
)
# A brace, or a whole string: to the end of the text if its closing quote is missing.
_PART = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{}]', re.DOTALL)
_WORDS = {"True": "true", "False": "false", "None": "null", "inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
_BRACKETS = {"(": "[", ")": "]"}  # a tuple is a list
_ESCAPE = re.compile(r"\\(.)|\"", re.DOTALL)


def relax(text: str) -> str:
    """Return strict JSON for a text that holds one object in the syntax of Markdown, Python or a printed config.

    Unreadable parts stay unchanged: the JSON reader then reports their place.
    """
    text = _from_start(pasted_lines(text))
    found: list[str] = []
    closing: list[str] = []
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup or "", match[0]
        if kind in ("comment", "space"):
            continue
        token = _BRACKETS.get(token, _strict(kind, token))
        if kind == "call" or token in ("{", "["):
            closing.append("]" if token == "[" else "}")
        elif token in ("}", "]"):
            if found and found[-1] == ",":
                found.pop()
            closed = closing.pop() if closing else token
            token = closed if match[0] == ")" else token
        found.append(token)
        if not closing and token == "}" and match[0] == "}" and not _REST.search(text, match.end()):
            break  # a sentence follows
    return " ".join(found)


def _strict(kind: str, token: str) -> str:
    """Return a token of Python or of a word processor as JSON writes it."""
    if kind in ("quoted", "curly"):
        return '"' + _ESCAPE.sub(_escaped, token[1:-1]) + '"'
    if kind == "keyword":
        return f'"{token[:-1].rstrip()}" :'
    if kind == "call":
        name = token[:-1].rpartition(".")[2]
        return f'{{ "{CONFIG_CLASS}" : "{name}" ,' if name.endswith("Config") else "{"
    if kind == "number":
        return token.replace("_", "")
    return _WORDS.get(token, f'"{token[6:]}"' if token.startswith("torch.") else token) if kind == "word" else token


def is_other_class(value: dict) -> bool:
    """Return True for the constructor of a config other than a model's, for example LoraConfig: it has no sizes."""
    return CONFIG_CLASS in value and not any(map(_SIZE.fullmatch, value))


def pasted_lines(text: str) -> str:
    """Return a text without the decoration of its lines: numbers, a Markdown fence, the marks of a mail or of a diff."""
    return textwrap.dedent(_unnumbered(first_fence(_unquoted(_unnumbered(text)))))


def _unnumbered(text: str) -> str:
    """Return a text without its line numbers.

    They are before each line or on lines of their own, and must increase by one.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or not lines[0].lstrip()[:1].isdecimal():
        return text
    marks = [_NUMBERED_LINE.match(line) for line in lines]
    numbers = [int(mark[1]) for mark in marks if mark]
    if len(numbers) == len(lines) and numbers == [*range(numbers[0], numbers[0] + len(lines))]:
        return "\n".join(line[mark.end() :] for line, mark in zip(lines, marks, strict=True) if mark)
    found, rest = 0, []
    for line in lines:  # a page with numbers as lines, such as a table's cells
        if numbers and line.strip() == str(numbers[0] + found):
            found += 1
        else:
            rest.append(line)
    return "\n".join(rest) if found > 1 and found >= len(rest) else text


def _unquoted(text: str) -> str:
    """Return a text without the marks that a mail or a diff has before each of its lines."""
    lines = text.splitlines()
    marks = [_QUOTED_LINE.match(line) for line in lines]
    if "".join(lines).lstrip()[:1] not in (">", "+", "|") or not all(marks):
        return text
    return "\n".join(line[mark.end() :] for line, mark in zip(lines, marks, strict=True) if mark)


def _from_start(text: str) -> str:
    """Return a text from its object, or from the constructor of a config, on. Keys without braces around them get these."""
    brace = text.find("{")
    if made := _CONSTRUCTOR.match(text):
        return text[made.end() :]
    if head := _HEAD.match(text):
        return text[head.end() :]
    if _KEYS_ALONE.match(text):
        return "{" + text + "}"
    return text[brace:] if brace > 0 and not _REST.search(text, 0, brace) else text


def first_fence(text: str) -> str:
    """Return the text inside the first Markdown fence; the whole text if it has none."""
    fences = [match.span() for match in _FENCE.finditer(text)]
    if not fences:
        return text
    end = fences[1][0] if len(fences) > 1 else len(text)
    return text[fences[0][1] : end]


def two_objects(text: str) -> tuple[str, str] | None:
    """Return the two parts of a text that holds two JSON objects behind each other, as two files are pasted; None for another text.

    A name of a file or a Markdown fence may be before each object.
    """
    depth, ends = 0, []
    for match in _PART.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match[0] == "}" and depth == 0:
            ends.append(match.end())
    if len(ends) != 2:
        return None
    first, second = text[: ends[0]], text[ends[0] : ends[1]]
    return first[first.index("{") :], second[second.index("{") :]


def is_quantization(value: dict) -> bool:
    """Return True for a hf_quant_config.json of ModelOpt."""
    settings = value.get("quantization")
    return "model_type" not in value and isinstance(settings, dict) and ("producer" in value or "quant_algo" in settings)


def with_quantization(config: dict, quantization: dict) -> dict:
    """Return a config with the content of a hf_quant_config.json, in the form of newer checkpoints' configs."""
    producer = {key: value for key, value in quantization.items() if key == "producer"}
    return {**config, "quantization_config": {"quant_method": "modelopt", **producer, **quantization["quantization"]}}


def _escaped(match: re.Match[str]) -> str:
    """Return a part of a Python string as JSON writes it."""
    if match[0] == '"':
        return '\\"'
    return "'" if match[1] == "'" else match[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFile:
    """Describe a JSON file other than config.json: its name, how to recognize it, and which file to paste instead."""

    name: str
    matches: Callable[[dict], bool]
    todo: str = "paste the config.json next to it"


def _has(*keys: str) -> Callable[[dict], bool]:
    return lambda value: all(key in value for key in keys)


_GENERATION = {"eos_token_id", "transformers_version", "do_sample"}
_BUNDLE = (
    'put the files of its pipeline into one JSON object by their paths, {"model_index.json": {...}, "vae/config.json": {...}}, '
    "or ask for arch=diffusers:<org/name>"
)


_SAMPLING = _GENERATION | {
    "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "max_length", "repetition_penalty", "num_beams", "bos_token_id",
    "pad_token_id", "decoder_start_token_id", "use_cache", "no_repeat_ngram_size", "length_penalty", "early_stopping",
}  # fmt: skip
_VOCABULARY = 100  # entries, more than a config has that are integers alone
_OF_TRAINER = "paste the config.json of the model; a trainer's config goes into \"Paste what you have\" on the page"


def _is_vocabulary(value: dict) -> bool:
    special = any(key.startswith("<") for key in value)
    return (special or len(value) >= _VOCABULARY) and all(type(number) is int for number in value.values())


def _is_index(value: dict) -> bool:
    return str(value.get("_class_name", "")).endswith("Pipeline") and "model_type" not in value


OTHER_FILES = (
    OtherFile(name="the index of sharded weights (safetensors.index.json)", matches=_has("weight_map")),
    OtherFile(name="tokenizer_config.json", matches=_has("tokenizer_class")),
    OtherFile(name="tokenizer.json", matches=_has("added_tokens", "pre_tokenizer")),
    OtherFile(name="special_tokens_map.json", matches=lambda value: bool(value) and all(key.endswith("_token") for key in value)),
    OtherFile(
        name="generation_config.json",
        matches=lambda value: "_from_model_config" in value or value.keys() >= _GENERATION,
    ),
    OtherFile(name="preprocessor_config.json", matches=_has("image_processor_type")),
    OtherFile(name="preprocessor_config.json", matches=_has("feature_extractor_type")),
    OtherFile(name="video_preprocessor_config.json", matches=_has("video_processor_type")),
    OtherFile(name="chat_template.json", matches=lambda value: set(value) == {"chat_template"}),
    OtherFile(name="generation_config.json", matches=lambda value: bool(value) and set(value) <= _SAMPLING),
    OtherFile(name="trainer_state.json", matches=_has("global_step", "log_history")),
    OtherFile(name="a list of tokens, such as vocab.json", matches=_is_vocabulary),
    OtherFile(name="a config of DeepSpeed", matches=_has("zero_optimization"), todo=_OF_TRAINER),
    OtherFile(name="a file of trainer arguments", matches=_has("per_device_train_batch_size"), todo=_OF_TRAINER),
    OtherFile(name="a training config", matches=_has("base_model"), todo=_OF_TRAINER),
    OtherFile(name="a training config", matches=_has("model_name_or_path"), todo=_OF_TRAINER),
    OtherFile(name="an adapter's config of MLX", matches=_has("lora_parameters"), todo=_OF_TRAINER),
    OtherFile(name="quantize_config.json of GPTQ", matches=lambda value: set(value) >= {"bits", "group_size"} and len(value) < 20),
    OtherFile(name="a config of LitGPT", matches=_has("padded_vocab_size"), todo="paste the config.json of the model on the hub"),
    OtherFile(name="processor_config.json", matches=_has("processor_class")),
    OtherFile(name="model_index.json of diffusers, without the configs of its parts", matches=_is_index, todo=_BUNDLE),
    OtherFile(name="one part of a pipeline of diffusers", matches=_has("_diffusers_version"), todo=_BUNDLE),
    OtherFile(
        name="the files of a pipeline without model_index.json",
        matches=lambda value: "model_index.json" not in value and any(key.endswith("/config.json") for key in value),
        todo="add model_index.json of the pipeline's repository",
    ),
    OtherFile(
        name="open_clip_config.json",
        matches=lambda value: isinstance(value.get("model_cfg"), dict) or {"embed_dim", "vision_cfg", "text_cfg"} <= value.keys(),
        todo="paste the config.json of the transformers version of this CLIP model",
    ),
    OtherFile(
        name="hf_quant_config.json",
        matches=is_quantization,
        todo="paste the config.json of the same folder before it, in one text, or give the folder with --config",
    ),
    OtherFile(name="config_sentence_transformers.json", matches=_has("__version__")),
    OtherFile(name="sentence_bert_config.json", matches=_has("max_seq_length", "do_lower_case")),
    OtherFile(name="the config of a pooling layer (1_Pooling)", matches=_has("word_embedding_dimension")),
)


def check_kind(value: dict) -> None:
    """Raise ConfigError for a file that is not a model's config.json, by its name, with the file that is needed."""
    if "peft_type" in value:
        raise ConfigError("this is adapter_config.json", given=quote(value["peft_type"]), todo=_of_adapter(value))
    if "model_type" in value:
        return
    if is_other_class(value):
        raise ConfigError(f"this is a {value[CONFIG_CLASS]}, not a model's config", todo=_OF_TRAINER)
    if (found := next((one for one in OTHER_FILES if one.matches(value)), None)) is not None:
        raise ConfigError(f"this is {found.name}, not a model's config.json", todo=found.todo)


def check_text(text: str) -> None:
    """Raise ConfigError for the text of a file other than a JSON object.

    These are weights, a web page, a printed model, or the list of a sentence-transformers folder.
    """
    if text.lstrip()[:1] == "<":
        raise ConfigError("this is a web page, not a model's config.json", todo="paste the text of the file: the hub's raw view")
    if _PRINTED_MODEL.match(text):
        raise ConfigError("this is a printed model, not its config", todo="paste the output of print(model.config)")
    if "llama_model_loader:" in text[:2000] or "general.architecture" in text[:2000]:
        what = "these are the settings of a GGUF file, not a model's config.json"
        raise ConfigError(what, todo="paste the config.json of the original model")
    if text.startswith("GGUF"):
        raise ConfigError("this is a GGUF file, not a model's config.json", todo="paste the config.json of the original model")
    if "sentence_transformers." in text[:2000] and text.lstrip().startswith("["):
        raise ConfigError("this is modules.json, not a model's config.json", todo="paste the config.json next to it")


def adapter_query(value: dict) -> str | None:
    """Return the keys of a query for an adapter_config.json: its base model and its adapter; None if it is another file."""
    base, kind = value.get("base_model_name_or_path"), value.get("peft_type")
    if not isinstance(base, str) or not isinstance(kind, str):
        return None
    keys = {"arch": f"hub:{base}", "train": "adapter", "adapter": "dora" if value.get("use_dora") is True else kind.lower()}
    for key, name in (("r", "r"), ("alpha", "lora_alpha")):
        if type(value.get(name)) is int:
            keys[key] = str(value[name])
    targets = value.get("target_modules")
    if isinstance(targets, list) and targets and all(isinstance(one, str) for one in targets):
        keys["targets"] = ",".join(targets)
    elif isinstance(targets, str) and targets == "all-linear":
        keys["targets"] = targets
    saved = value.get("modules_to_save")
    if isinstance(saved, list) and saved and all(isinstance(one, str) for one in saved):
        keys["modules_to_save"] = ",".join(saved)
    if type(value.get("lora_dropout")) in (int, float) and value["lora_dropout"]:
        keys["adapter_dropout"] = json.dumps(value["lora_dropout"])
    return "&".join(f"{key}={text}" for key, text in keys.items())


def _of_adapter(value: dict) -> str:
    query = adapter_query(value)
    return f"ask for {query}" if query else "paste the config.json of its base model, with train=adapter"


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
