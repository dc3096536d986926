"""A config's JSON as the value of `arch=config:` in a link, and back: base64url(zlib(JSON)), bounded both ways."""

from __future__ import annotations

import base64
import binascii
import json
import zlib

from sizer.errors import ConfigError, quote

MAX_CONFIG_BYTES = 2 * 2**20

_HOW = "make it with base64url(zlib(JSON)), or pass the file with --config"


def encode_config(text: str) -> str:
    """A config's JSON text as the value of `arch=config:`, without padding.

    Raises ConfigError where the text is more than 2 MiB or not Unicode.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("config is not valid Unicode", todo="remove the lone surrogates (\\ud800...)") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise too_large(f"{len(data):,} bytes")
    return base64.urlsafe_b64encode(zlib.compress(data, 9)).rstrip(b"=").decode()


def decode_config(value: str) -> str:
    """The JSON text inside the value of `arch=config:`; whether it is good JSON is not checked here.

    Raises ConfigError where it is not base64url, not zlib, cut short, not UTF-8, or unpacks to more than 2 MiB
    (it never holds more than that in memory, however well it was compressed).
    """
    try:
        packed = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise too_large(f"more than {MAX_CONFIG_BYTES:,} bytes once unpacked")
        if not unpacker.eof or unpacker.unused_data:
            raise ConfigError("packed config is cut short or goes on behind its end", given=quote(value), todo=_HOW)
        return data.decode()
    except (binascii.Error, zlib.error, ValueError) as error:  # ValueError: characters outside ASCII; bad UTF-8
        raise ConfigError("packed config cannot be unpacked", given=quote(value), todo=_HOW) from error


def canonical_config(text: str) -> str:
    """A config's JSON text in canonical form: strict JSON, keys sorted, no white space. Raises ConfigError."""
    from sizer.architecture.ingest import read_config  # here: that package may import sizer.request, which imports us

    return json.dumps(read_config(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def too_large(given: str) -> ConfigError:
    """The error for a config of more than MAX_CONFIG_BYTES."""
    return ConfigError(
        "config is too large",
        given=given,
        allowed=f"at most {MAX_CONFIG_BYTES:,} bytes",
        todo="keep only the architecture's keys",
    )
