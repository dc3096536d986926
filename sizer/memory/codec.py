"""Frozen dataclasses to and from plain JSON values, checked on the way in: reports come from a process not trusted."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing

LIMIT_TEXT = 100_000
LIMIT_ITEMS = 400_000
LIMIT_INTEGER = 2**63  # nothing in a report is negative

_SURROGATE = re.compile("[\ud800-\udfff]")


class DecodeError(ValueError):
    """A plain value is not what its dataclass promises; the message says where, what was found and what is allowed."""


def encode(value: object) -> object:
    """Lists, dicts and scalars (what json.dumps takes) of a dataclass; a field's metadata "json" renames its key."""
    if dataclasses.is_dataclass(value):
        return {_key(field): encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


class Document:
    """A dataclass that is written to JSON as it is and read back; errors name it as its class, in lower case."""

    __slots__ = ()

    def to_dict(self) -> dict:
        """Dicts, lists and scalars."""
        return encode(self)

    @classmethod
    def from_dict(cls, data: object) -> typing.Self:
        """The value that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        return decode(cls, data, cls.__name__.lower())


def json_names(kind: type) -> list[str]:
    """The keys that `encode` gives the fields of a dataclass, in order."""
    return [_key(field) for field in dataclasses.fields(kind)]


def decode(kind: object, value: object, where: str = "report") -> typing.Any:
    """The value of type `kind` (a dataclass, tuple[X, ...], dict[str, X], union, Literal or scalar) that was encoded.

    Raises DecodeError where a key is missing or unknown, a type is another, or a text, list or number passes its limit.
    """
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _decode_tuple(arguments, value, where)
    if origin is dict:
        _require(isinstance(value, dict), where, value, "an object")
        _require(len(value) <= LIMIT_ITEMS, where, len(value), f"at most {LIMIT_ITEMS} keys")
        return {
            decode(str, key, f"{where} key"): decode(arguments[1], item, f"{where}.{str(key)[:80]}")
            for key, item in value.items()
        }
    if origin is typing.Literal:
        allowed = any(type(value) is type(one) and value == one for one in arguments)
        _require(allowed, where, value, f"one of {arguments}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, value, where)
    return _decode_scalar(kind, value, where)


def _decode_dataclass(kind: type, value: object, where: str) -> object:
    _require(isinstance(value, dict), where, value, "an object")
    hints, fields = _hints(kind), dataclasses.fields(kind)
    unknown = value.keys() - {_key(field) for field in fields}
    _require(not unknown, where, sorted(map(str, unknown))[:3], f"only the keys of {kind.__name__}")
    missing = {_key(field) for field in fields if _is_required(field)} - value.keys()
    _require(not missing, where, "nothing", f"the keys {', '.join(sorted(missing))}")
    found = kind(
        **{
            field.name: decode(hints[field.name], value[_key(field)], f"{where}.{_key(field)}")
            for field in fields
            if _key(field) in value
        }
    )
    known = next((field.default for field in fields if field.name == "schema"), None)
    if known is not None and found.schema != known:
        raise DecodeError(f"{where}.schema was {found.schema}; allowed is {known}: read it with another version")
    return found


def _decode_tuple(arguments: tuple, value: object, where: str) -> tuple:
    _require(isinstance(value, (list, tuple)), where, value, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        _require(len(value) <= LIMIT_ITEMS, where, len(value), f"at most {LIMIT_ITEMS} items")
        if arguments[0] is int:
            return _decode_integers(value, where)
        return tuple(decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    _require(len(value) == len(arguments), where, value, f"{len(arguments)} items")
    return tuple(decode(kind, item, where) for kind, item in zip(arguments, value, strict=True))


def _decode_integers(value: list | tuple, where: str) -> tuple[int, ...]:
    for item in value:
        if type(item) is not int or not 0 <= item < LIMIT_INTEGER:
            raise DecodeError(f"{where} holds {_clip(item)}; allowed are integers from 0 to 2**63 - 1")
    return tuple(value)


def _decode_union(arguments: tuple, value: object, where: str) -> object:
    for kind in arguments:
        try:
            return decode(kind, value, where)
        except DecodeError:
            continue
    names = ", ".join(getattr(kind, "__name__", str(kind)) for kind in arguments)
    raise DecodeError(f"{where} was {_clip(value)}; allowed are {names}")


def _decode_scalar(kind: object, value: object, where: str) -> object:
    if kind is None or kind is types.NoneType:
        _require(value is None, where, value, "null")
        return None
    if kind is float and type(value) is int and abs(value) < LIMIT_INTEGER:
        value = float(value)
    _require(type(value) is kind, where, value, getattr(kind, "__name__", str(kind)))
    if kind is str:
        _require(len(value) <= LIMIT_TEXT, where, f"{len(value)} characters", f"at most {LIMIT_TEXT} characters")
        _require(not _SURROGATE.search(value), where, ascii(value), "text without lone surrogates")
    if kind is int:
        _require(0 <= value < LIMIT_INTEGER, where, value, "an integer from 0 to 2**63 - 1")
    if kind is float:
        _require(math.isfinite(value), where, value, "a finite number")
    return value


def _require(holds: bool, where: str, found: object, allowed: str) -> None:
    if not holds:
        raise DecodeError(f"{where} was {_clip(found)}; allowed is {allowed}")


def _clip(value: object) -> str:
    """A value as short printable text; a huge integer as its size, since printing it would take long or fail."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return ascii(str(value)[:80])


def _key(field: dataclasses.Field) -> str:
    return field.metadata.get("json", field.name)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)
