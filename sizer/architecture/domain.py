"""Valid values of a config: the domain rules behind the guard, over plain values. No torch, no transformers.

transformers checks types loosely and ranges hardly at all: -1 layers are counted, 10**9 layers never end. The rules here use a
key's name and the annotation and default of its field, so that they apply to every model type.
"""

from __future__ import annotations

import re

from sizer.base.errors import ConfigError, quote
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
