"""The edition of answers: the code and data of this package, and the versions of the packages that it runs.

An answer that was kept holds for its own edition only. Docstrings and comment lines decide no figure and are left out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = (".py", ".csv", ".json")
# A string literal by itself at the top of a file, or behind the colon of a class or function
_DOCSTRING = re.compile(rb'(\A|:[ \t]*(?:#[^\n]*)?\n)[ \t]*r?"""(?:[^"\\]+|\\.|"(?!""))*"""', re.DOTALL)
_COMMENT = re.compile(rb"^[ \t]*#[^\n]*\n", re.MULTILINE)


@functools.cache
def code_digest(package: Path = _PACKAGE) -> str:
    """Return a digest of the code and data files of a package, in hexadecimal."""
    found = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in _DATA):
        data = path.read_bytes()
        if path.suffix == ".py":
            data = _DOCSTRING.sub(rb"\1", _COMMENT.sub(b"", data))
        found.update(path.relative_to(package).as_posix().encode() + b"\0" + data + b"\0")
    return found.hexdigest()


def edition_of(versions: Mapping[str, str]) -> str:
    """Return a text for all that answers depend on except the question: versions of packages, and this package's code and data."""
    return json.dumps([dict(versions), code_digest()])
