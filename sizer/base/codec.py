"""Frozen dataclasses to and from plain JSON values, checked on the way in: reports come from a process not trusted."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable

LIMIT_TEXT = 100_000
LIMIT_ITEMS = 400_000
LIMIT_INTEGER = 2**63  # nothing in a report is negative, except for differences

Difference = typing.NewType("Difference", int)  # an integer that may be negative

_SURROGATE = re.compile("[\ud800-\udfff]")


class DecodeError(ValueError):
    """A plain value does not match its dataclass; the message gives the path, the value found and the values allowed."""


def encode(value: typing.Any) -> typing.Any:
    """Return the lists, dicts and scalars of a dataclass for json.dumps; a field's metadata "json" renames its key."""
    if (names := _names(type(value))) is not None:  # type: ignore[arg-type]  # mypy looks for the class's own hash
        found = {key: getattr(value, name) for key, name in names}
        return {key: item if type(item) in _SCALARS else encode(item) for key, item in found.items()}
    if isinstance(value, (tuple, list)):
        return [item if type(item) in _SCALARS else encode(item) for item in value]
    if isinstance(value, dict):
        return {key: item if type(item) in _SCALARS else encode(item) for key, item in value.items()}
    return value


_SCALARS = frozenset({str, int, float, bool, types.NoneType})  # most of a report: encoded without a call for each


@functools.cache
def _names(kind: type) -> tuple[tuple[str, str], ...] | None:
    """Return the keys that `encode` gives the fields of a dataclass, and the fields' names; None for any other type."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple((_key(field), field.name) for field in dataclasses.fields(kind))


class Document:
    """Dataclass with the same keys in JSON, written and read back; errors name it by its class, in lower case."""

    __slots__ = ()

    def to_dict(self) -> dict:
        """Dicts, lists and scalars."""
        return encode(self)

    @classmethod
    def from_dict(cls, data: object) -> typing.Self:
        """Return the value from the data of `to_dict`. Raises DecodeError for any other data."""
        return decode(cls, data, cls.__name__.lower())


def json_names(kind: type) -> list[str]:
    """Return the keys that `encode` gives the fields of a dataclass, in order."""
    return [_key(field) for field in dataclasses.fields(kind)]


def decode(kind: object, value: object, where: str = "report") -> typing.Any:
    """Return the value of type `kind` (a dataclass, tuple[X, ...], dict[str, X], union, Literal or scalar) that was encoded.

    Raises DecodeError if a key is missing or unknown, a type differs, or a text, list or number exceeds its limit.
    """
    try:
        return _decoder(kind)(value)
    except _Refused as refused:
        raise DecodeError(f"{where}{refused.path}{refused}") from None


class _Refused(Exception):
    """Raised for a value that cannot be decoded, with the allowed values. `path` leads to it from the decoded value."""

    path = ""

    def under(self, step: str) -> _Refused:
        """Return the error with the path of its parent value in front."""
        self.path = step + self.path
        return self


_Decoder = Callable[[typing.Any], typing.Any]


@functools.cache
def _decoder(kind: typing.Any) -> _Decoder:
    """Return the decoder of a type. It is cached, since a report has tens of thousands of values of a dozen types."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return functools.partial(_decode_dataclass, kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if len(arguments) != 2 or arguments[1] is not Ellipsis:
            return functools.partial(_decode_fixed, tuple(map(_decoder, arguments)))
        return _decode_integers if arguments[0] is int else functools.partial(_decode_tuple, _decoder(arguments[0]))
    if origin is dict:
        return functools.partial(_decode_dict, _decoder(arguments[1]))
    if origin is typing.Literal:
        return functools.partial(_decode_literal, arguments)
    if origin in (typing.Union, types.UnionType):
        return functools.partial(_decode_union, arguments)
    if kind is None or kind is types.NoneType:
        return _decode_none
    if kind is Difference:
        return _decode_difference
    scalars: dict[type, _Decoder] = {str: _decode_text, int: _decode_integer, float: _decode_float}
    return scalars.get(kind, functools.partial(_decode_plain, kind))


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a dataclass, for `decode`.

    It has by key the field and its decoder, the required keys, the fields that the class computes itself, and the known schema.
    """

    fields: dict[str, tuple[str, _Decoder]]
    required: frozenset[str]
    computed: frozenset[str]
    schema: object


@functools.cache
def _layout(kind: type) -> _Layout:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    return _Layout(
        {_key(field): (field.name, _decoder(hints[field.name])) for field in fields},
        frozenset(_key(field) for field in fields if _is_required(field)),
        frozenset(field.name for field in fields if not field.init),
        next((field.default for field in fields if field.name == "schema"), None),
    )


def _decode_dataclass(kind: type, value: typing.Any) -> object:
    _require(isinstance(value, dict), value, "an object")
    layout = _layout(kind)
    if unknown := value.keys() - layout.fields.keys():
        _require(False, sorted(map(str, unknown))[:3], f"only the keys of {kind.__name__}")
    if missing := layout.required - value.keys():
        _require(False, "nothing", f"the keys {', '.join(sorted(missing))}")
    found = {}
    for key, (name, decoder) in layout.fields.items():
        if key in value:
            try:
                found[name] = decoder(value[key])
            except _Refused as refused:
                raise refused.under(f".{key}") from None
    made = kind(**{name: item for name, item in found.items() if name not in layout.computed})
    for name in layout.computed & found.keys():
        _require(found[name] == getattr(made, name), found[name], f"{getattr(made, name)!r} for {name}")
    if layout.schema is not None and made.schema != layout.schema:
        raise _Refused(f".schema was {made.schema}; allowed is {layout.schema}: read it with another version")
    return made


def _decode_dict(decoder: _Decoder, value: typing.Any) -> dict:
    _require(isinstance(value, dict), value, "an object")
    _require(len(value) <= LIMIT_ITEMS, len(value), f"at most {LIMIT_ITEMS} keys")
    found = {}
    for key, item in value.items():
        try:
            _decode_text(key)
        except _Refused as refused:
            raise refused.under(" key") from None
        try:
            found[key] = decoder(item)
        except _Refused as refused:
            raise refused.under(f".{key[:80]}") from None
    return found


def _decode_tuple(decoder: _Decoder, value: typing.Any) -> tuple:
    _require(isinstance(value, (list, tuple)), value, "a list")
    _require(len(value) <= LIMIT_ITEMS, len(value), f"at most {LIMIT_ITEMS} items")
    found = []
    try:
        for item in value:
            found.append(decoder(item))
    except _Refused as refused:
        raise refused.under(f"[{len(found)}]") from None
    return tuple(found)


def _decode_integers(value: typing.Any) -> tuple[int, ...]:
    _require(isinstance(value, (list, tuple)), value, "a list")
    _require(len(value) <= LIMIT_ITEMS, len(value), f"at most {LIMIT_ITEMS} items")
    for item in value:
        if type(item) is not int or not 0 <= item < LIMIT_INTEGER:
            raise _Refused(f" contains {_clip(item)}; allowed are integers from 0 to 2**63 - 1")
    return tuple(value)


def _decode_fixed(decoders: tuple[_Decoder, ...], value: typing.Any) -> tuple:
    _require(isinstance(value, (list, tuple)), value, "a list")
    _require(len(value) == len(decoders), value, f"{len(decoders)} items")
    return tuple([decoder(item) for decoder, item in zip(decoders, value, strict=True)])


def _decode_literal(allowed: tuple, value: typing.Any) -> object:
    _require(any(type(value) is type(one) and value == one for one in allowed), value, f"one of {allowed}")
    return value


def _decode_union(kinds: tuple, value: typing.Any) -> object:
    for kind in kinds:
        try:
            return _decoder(kind)(value)
        except _Refused:
            continue
    names = ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise _Refused(f" was {_clip(value)}; allowed are {names}")


def _decode_none(value: typing.Any) -> None:
    _require(value is None, value, "null")


def _decode_text(value: typing.Any) -> str:
    if type(value) is not str:
        _require(False, value, "str")
    if len(value) > LIMIT_TEXT:
        _require(False, f"{len(value)} characters", f"at most {LIMIT_TEXT} characters")
    if _SURROGATE.search(value):
        _require(False, ascii(value), "text without lone surrogates")
    return value


def _decode_integer(value: typing.Any) -> int:
    if type(value) is not int:
        _require(False, value, "int")
    if not 0 <= value < LIMIT_INTEGER:
        _require(False, value, "an integer from 0 to 2**63 - 1")
    return value


def _decode_difference(value: typing.Any) -> int:
    if type(value) is not int:
        _require(False, value, "int")
    if abs(value) >= LIMIT_INTEGER:
        _require(False, value, "an integer from 1 - 2**63 to 2**63 - 1")
    return value


def _decode_float(value: typing.Any) -> float:
    if type(value) is int and abs(value) < LIMIT_INTEGER:
        return float(value)
    _require(type(value) is float, value, "float")
    _require(math.isfinite(value), value, "a finite number")
    return value


def _decode_plain(kind: object, value: typing.Any) -> object:
    _require(type(value) is kind, value, getattr(kind, "__name__", str(kind)))
    return value


def _require(holds: bool, found: object, allowed: str) -> None:
    if not holds:
        raise _Refused(f" was {_clip(found)}; allowed is {allowed}")


def _clip(value: object) -> str:
    """Return a value as short printable text.

    A huge integer is given as its size, since printing it would be slow or fail.
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return ascii(str(value)[:80])


def _key(field: dataclasses.Field) -> str:
    return field.metadata.get("json", field.name)


def _is_required(field: dataclasses.Field) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
