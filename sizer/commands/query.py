"""The question as the command line asks it: a query, and perhaps a config from a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from sizer.config_json import MAX_CONFIG_BYTES, encode_config, read_config
from sizer.errors import ConfigError, quote


def query_of(options: argparse.Namespace) -> str:
    """The query that was given, with the config of `--config` in the place of its arch. Raises ConfigError."""
    return options.query if options.config is None else _with_config(options.query, options.config)


def _with_config(query: str, path: Path) -> str:
    """The query with a file's config in the place of its arch, which it need not have. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError("config file cannot be read", given=quote(str(path)), todo=error.strerror) from error
    read_config(data)
    others = [item for item in query.removeprefix("?").split("&") if item and item.partition("=")[0] != "arch"]
    return "&".join([f"arch=config:{encode_config(data.decode())}", *others])
