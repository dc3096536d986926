"""Keys of transformers' config classes: the class of a model type, its keys, its parts, its annotations, defaults and valid values.

They are read from the classes themselves, so they fit every model type of the installed version. transformers is imported when
a function is called; classes are made from their defaults, never from untrusted values.

transformers checks types loosely and ranges hardly at all: -1 layers are counted, 10**9 layers never end. The rules of valid
values use a key's name and the annotation and default of its field, so that they apply to every model type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, NoneType
from typing import Any

from sizer.base.errors import ConfigError, quote, suggest
from sizer.base.pasted_text import CONFIG_CLASS
from sizer.query.values import MAX_IMAGE

MAX_LAYERS = 1024  # with twice as many PyTorch overruns the stack as it takes a graph of training apart (Llama, 2.15)
MAX_SIZE = 2**27  # two such sizes multiplied, times eight bytes, still fit in 64 bits
MAX_LABELS = 100_000

# Counts of layers. Those in _CORE_LAYERS are at least 1; others (extra heads, shared layers) may be 0.
_LAYERS = re.compile(r"(.*_)?(layers|blocks|depths?)|n_layer")
_NOT_LAYERS = re.compile(r"(max|min)_depth|.*(feature|target|cat|rope|extract|only|every_n)_layers")  # metres; indices
_CORE_LAYERS = re.compile(r"(num_hidden_|n_|num_|encoder_|decoder_|num_encoder_|num_decoder_)layers|n_layer|depths?")
# Sizes of tensors. Those in _CORE_SIZES are at least 1; others may be 0 (no experts, no second table).
_SIZES = re.compile(
    r".*(size|sizes|dim|dims|width|heads|channels|experts|groups|rank)|(.*_)?d_[a-z]+|n_(embd|head|inner)"
)
_CORE_SIZES = re.compile(
    r"(vocab|hidden|patch)_sizes?|d_model|n_embd|embed_dim|dim|num_channels"
    r"|(num_|n_|encoder_|decoder_|num_encoder_|num_decoder_)?(attention_)?heads?"
)
_IMAGE = re.compile(r"(.*_)?image_size|img_size")
_SWITCHES = re.compile(r"(dynamic|strict)_img_size")  # keys of timm
_LABELS = re.compile(r"num_labels|num_classes")

_NUMBER_WORDS = {"int", "float", "bool", "None", "list", "tuple", "Sequence", "collections", "abc"}


def annotation_words(annotation: object) -> frozenset[str]:
    """Return the words of a field's annotation: `int | list[int] | None` gives int, list, None."""
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return frozenset(re.findall(r"\w+", annotation.__name__))
    return frozenset(re.findall(r"\w+", str(annotation)))


def check_value(where: str, value: object, words: frozenset[str] = frozenset(), default: object = None) -> None:
    """Raise ConfigError unless the value of the key `where` ("text_config.num_heads") is in its domain.

    Args:
        where: Path of the key.
        value: Its value.
        words: The words of its field's annotation, empty if unknown.
        default: The field's default, None if unknown.

    Raises:
        ConfigError: A boolean or text for a number, a count or size out of range, too many labels.
    """
    key = where.rpartition(".")[2]
    _check_type(where, value, words)
    if key == "id2label":
        _check_labels(where, value)
        return
    if key == "architectures":
        _check_names(where, value)
        return
    bounds = _bounds(key, default)
    if bounds is None or value is None:
        return
    low, high = bounds
    if isinstance(value, bool) and "bool" not in words:
        raise _out_of_range(where, str(value).lower(), f"whole numbers from {low:,} to {high:,}")
    for number in _integers(value):
        if not low <= number <= high:
            raise _out_of_range(where, str(number), f"whole numbers from {low:,} to {high:,}")
    if high == MAX_LAYERS and sum(_integers(value)) > MAX_LAYERS and _CORE_LAYERS.fullmatch(key):
        raise _out_of_range(where, f"{sum(_integers(value)):,} layers in all", f"at most {MAX_LAYERS:,}")


def _check_type(where: str, value: object, words: frozenset[str]) -> None:
    if not words or "Any" in words:
        return
    if isinstance(value, bool) and "int" in words and "bool" not in words:
        raise _out_of_range(where, str(value).lower(), "numbers")
    if isinstance(value, str) and words & {"int", "float"} and words <= _NUMBER_WORDS:
        raise _out_of_range(where, quote(value), "numbers")
    if isinstance(value, list):
        for item in value:
            _check_type(where, item, words)


def _bounds(key: str, default: object) -> tuple[int, int] | None:
    """Return the smallest and the largest allowed integer of a key, None if any is allowed."""
    if _SWITCHES.fullmatch(key):
        return None
    if _LABELS.fullmatch(key):
        return 1, MAX_LABELS
    if _IMAGE.fullmatch(key):
        return 1, MAX_IMAGE
    if _LAYERS.fullmatch(key) and not _NOT_LAYERS.fullmatch(key):
        return _least(1 if _CORE_LAYERS.fullmatch(key) else 0, default), MAX_LAYERS
    if _SIZES.fullmatch(key):
        return _least(1 if _CORE_SIZES.fullmatch(key) else 0, default), MAX_SIZE
    return None


def _least(low: int, default: object) -> int:
    """Return the lower bound, or the field's own default (0 or -1 for "none") if that is lower."""
    return min([low, *_integers(default)])


def _integers(value: object) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def _check_labels(where: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(re.fullmatch(r"-?\d{1,9}", str(key), re.ASCII) for key in value):
        raise _out_of_range(where, "something else", "an object of number: label")
    if len(value) > MAX_LABELS:
        raise _out_of_range(where, f"{len(value):,} labels", f"at most {MAX_LABELS:,}")


def _check_names(where: str, value: object) -> None:
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise _out_of_range(where, quote(value), "a list of class names")


def _out_of_range(where: str, given: str, allowed: str) -> ConfigError:
    todo = "correct it in the config"
    return ConfigError("config has a value out of range", given=f"{where} = {given}", allowed=allowed, todo=todo)


ConfigClass = Any  # a class of transformers' PreTrainedConfig, which is not imported here

REFUSED_TYPES = {"rwkv": "it compiles its own code when it is built"}

# Functions of a config class that read further keys from their arguments ("kwargs.pop(...)").
_READERS = ("__init__", "__post_init__", "convert_rope_params_to_dict", "from_dict")
# Keys that backbone_utils.consolidate_backbone_kwargs_to_config (transformers 5.23) reads for every class with a backbone.
BACKBONE_KEYS = frozenset({"backbone", "backbone_kwargs", "use_timm_backbone"})
# Keys in which transformers' get_text_config looks for a config inside a config (configuration_utils.py, 5.23).
_TEXT_PARTS = frozenset({"text_encoder", "decoder", "generator", "text_config"})
_OWN_CODE = "code of a repository never runs here: estimate your own script with `sizer run`, or choose another model"
# config.name, self.config.name, getattr(config, "name", ...)
_TAKEN = re.compile(r"""config(?:\.|,\s*["'])([A-Za-z]\w*)""")


def class_of_type(model_type: object, where: str = "model_type") -> type:
    """Return transformers' config class for a model_type. Raises ConfigError if it has none, or it is refused."""
    from transformers import CONFIG_MAPPING, __version__

    if not isinstance(model_type, str):
        given = "nothing" if model_type is None else quote(model_type)
        raise ConfigError(
            f"config has no {where}",
            given=given,
            allowed="a model type of transformers, such as llama",
            todo='add it, as in "model_type": "llama", or paste the whole config.json of the model',
        )
    refuse_type(model_type, where)
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{where} is not known",
            given=quote(model_type),
            allowed=f"the model types of transformers {__version__}",
            todo="; ".join(filter(None, (_OWN_CODE, suggest(model_type, CONFIG_MAPPING)))),
        )
    return CONFIG_MAPPING[model_type]


def renamed_type(config: dict) -> tuple[dict, tuple[str, ...]]:
    """Return a config with its type in transformers, and a sentence on it if the type changes.

    A `mistral` with `layer_types` is a `ministral` (models/auto/configuration_auto.py, AutoConfig.from_pretrained, 5.24); the
    `ministral` class does not compute `head_dim`, unlike the `mistral` class. A type may be missing, as in files of 2019, or
    unknown to transformers, as for Kimi K2. The class in `architectures` is then used, if transformers has that class.
    """
    from transformers import CONFIG_MAPPING

    model_type, architectures = config.get("model_type"), config.get("architectures")
    if model_type is None and (known := _type_of_config(config.get(CONFIG_CLASS))) is not None:
        return {key: value for key, value in config.items() if key != CONFIG_CLASS} | {"model_type": known}, ()
    if model_type == "mistral" and "layer_types" in config and "ministral" in CONFIG_MAPPING:
        width, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if type(width) is int and type(heads) is int and heads > 0:
            config = {**config, "head_dim": config.get("head_dim") or width // heads}
        return {**config, "model_type": "ministral"}, ("A mistral with layer_types is read as ministral, as transformers does.",)
    if not isinstance(model_type, (str, NoneType)) or model_type in CONFIG_MAPPING or model_type in REFUSED_TYPES:
        return config, ()
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if (known := _type_of_class(name)) is None:
        return config, ()
    if model_type is None:
        caution = f"The config names no model_type; it is read as {known}, the type of its {name}."
        return {**config, "model_type": known}, (caution,)
    caution = f"transformers does not know the type {model_type}; it is read as {known}, the type of its {name}."
    return {**config, "model_type": known}, (caution,)


def _type_of_config(name: object) -> str | None:
    """Return the model type of a config class of transformers by its name; None if there is no such class."""
    from transformers import CONFIG_MAPPING

    return next((kind for kind, held in CONFIG_MAPPING._mapping.items() if held == name), None)


def _type_of_class(name: object) -> str | None:
    """Return the model type of a class of transformers by its name; None if transformers has no such model."""
    from transformers.models.auto import modeling_auto

    if not isinstance(name, str):
        return None
    tables = (table for key, table in vars(modeling_auto).items() if key.endswith("_MAPPING_NAMES"))
    types = (kind for table in tables for kind, held in table.items() if name in (held if isinstance(held, tuple) else (held,)))
    return next(types, None)


def refuse_type(model_type: str, where: str) -> None:
    """Raise ConfigError if this model type is refused."""
    if model_type in REFUSED_TYPES:
        todo = f"{REFUSED_TYPES[model_type]}: choose another model"
        raise ConfigError(f"{where} is refused", given=quote(model_type), todo=todo)


def class_of_part(cls: ConfigClass, part: str, model_type: str | None, where: str) -> type:
    """Return the class of the config inside a config: the class that `cls` names, else by its model_type, else the usual one.

    Raises ConfigError if the model type is not known, or is needed and not given.
    """
    declared = cls.sub_configs[part]
    if _is_config(declared):
        return declared
    if model_type is not None and (renamed := _renamed_part(cls, part, model_type)) is not None:
        return renamed
    if model_type is None and _is_config(type(usual_part(cls, part))):
        return type(usual_part(cls, part))
    return class_of_type(model_type, where)


def _renamed_part(cls: ConfigClass, part: str, model_type: str) -> type | None:
    """Return the class that a config class itself makes of a part of an unknown type, None if it makes none.

    Configs of the hub name types that transformers' own classes rename: `kimi_k2` in Kimi_K25Config, `exaone4_5_text`.
    """
    from transformers import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return None
    with contextlib.suppress(Exception):  # any error means that it does not know the type
        made = getattr(cls(**{part: {"model_type": model_type}}), part, None)
        return type(made) if _is_config(type(made)) else None
    return None


def usual_part(cls: ConfigClass, part: str) -> Any:
    """Return the config inside the default config of `cls`, None if there is none."""
    return getattr(_usual(cls), part, None)


def has_output_layer(config: dict, cls: ConfigClass) -> bool:
    """Return True if a checkpoint has a separate output layer, although `cls` ties it by default.

    Release 4 reads `tie_word_embeddings` of the text part (`config.get_text_config(decoder=True)`, modeling_utils.py, 4.57).
    Release 5 reads that of the whole config, whose class may have another default, and does not tie tensors that the file
    stores twice (modeling_utils.py, `tie_weights`, 5.24): Mistral Small 3.1 and InternVL 3 have both matrices.
    """
    part = config.get("text_config")
    if "tie_word_embeddings" in config or "text_config" not in cls.sub_configs or not isinstance(part, dict):
        return False
    if getattr(_usual(cls), "tie_word_embeddings", False) is not True:
        return False
    if "tie_word_embeddings" in part:
        return part["tie_word_embeddings"] is False
    if not str(config.get("transformers_version", "")).startswith("4."):
        return False
    inner = class_of_part(cls, "text_config", part.get("model_type"), "text_config.model_type")
    return getattr(_usual(inner), "tie_word_embeddings", True) is False


def reads(cls: ConfigClass, words: set[str]) -> bool:
    """Return whether the code of a config class that reads its arguments contains one of these words."""
    return not words.isdisjoint(_words_read(cls))


@cache
def known_keys(cls: ConfigClass) -> frozenset[str]:
    """Return the keys that a config class accepts.

    These are:

    - its fields, their other names, and its settable properties;
    - the keys that it reads and sets;
    - the keys that its models' code reads (Qwen3-MoE's `head_dim` and DeBERTa's `conv_kernel_size` are declared nowhere).

    A config of several parts also takes the keys of its text part, because older files have them at the top level. A text part
    that only the models' code reads belongs to a larger model in the same package, and is excluded.
    """
    properties = {
        name for name, value in inspect.getmembers(cls, inspect.isdatadescriptor) if getattr(value, "fset", None)
    }
    keys = {"model_type", "num_labels", *field_rows(cls), *cls.attribute_map, *properties, *_words_read(cls)}
    keys |= keys_set(_usual(cls)) | (_words_of_models(cls) - _TEXT_PARTS.difference(cls.sub_configs))
    if "backbone_config" in cls.sub_configs:
        keys |= BACKBONE_KEYS
    methods = {name for name in keys - properties if inspect.isroutine(inspect.getattr_static(cls, name, None))}
    return frozenset(keys - methods)


def keys_set(config: object) -> set[str]:
    """Return the attributes that the library's own code sets on a config object, declared or not; empty for None."""
    return set() if config is None else set(vars(config))


@cache
def field_rows(cls: ConfigClass) -> dict[str, tuple[frozenset[str], object]]:
    """Return for each field of a class, and of its text part, the words of its annotation and its default (None: it has none)."""
    text: ConfigClass = type(usual_part(cls, "text_config"))
    rows = {} if "text_config" not in cls.sub_configs or not _is_config(text) else dict(field_rows(text))
    for row in dataclasses.fields(cls):
        default = None if row.default is dataclasses.MISSING else row.default
        rows[row.name] = annotation_words(row.type), default
    return rows


@cache
def _usual(cls: ConfigClass) -> object:
    """Return the default config of a class, None if it needs arguments."""
    try:
        return cls()
    except Exception:  # any error means that there is no default config
        return None


def _is_config(cls: object) -> bool:
    from transformers import PreTrainedConfig

    return isinstance(cls, type) and issubclass(cls, PreTrainedConfig)


def _words_read(cls: ConfigClass) -> Iterator[str]:
    """Yield every string constant in the code with which a class and its bases read their arguments."""
    for base in cls.__mro__:
        for reader in _READERS:
            function: Any = vars(base).get(reader)
            function = inspect.unwrap(getattr(function, "__func__", function))
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                yield from _texts(code)


def _words_of_models(cls: ConfigClass) -> set[str]:
    """Return every name that the source of the models next to a config class reads from a config."""
    modeling = sorted(Path(inspect.getfile(cls)).parent.glob("modeling_*.py"))
    return {name for path in modeling for name in _TAKEN.findall(path.read_text(encoding="utf-8"))}


def _texts(constant: object) -> Iterator[str]:
    if isinstance(constant, str) and constant.isidentifier():
        yield constant
    elif isinstance(constant, CodeType):
        yield from constant.co_varnames[: constant.co_argcount + constant.co_kwonlyargcount]
        for item in constant.co_consts:
            yield from _texts(item)
    elif isinstance(constant, (tuple, frozenset)):
        for item in constant:
            yield from _texts(item)
