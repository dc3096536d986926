"""The edition of answers: the code and data of this package, and the versions of the packages that it uses.

A stored answer is valid only for its edition. Docstrings and comment lines do not affect figures and are left out.

Reading all files takes 80 ms. The digest is therefore stored in a folder with sizes and times of the files. They are read again
if one of them differs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_DATA = (".py", ".csv", ".json")
# A string literal by itself at the top of a file, or behind the colon of a class or function
_DOCSTRING = re.compile(rb'(\A|:[ \t]*(?:#[^\n]*)?\n)[ \t]*r?"""(?:[^"\\]+|\\.|"(?!""))*"""', re.DOTALL)
_FOLDER, _FILE = "edition", "code.json"
_SETTLED_SECONDS = 3.0  # a file may be edited twice within one tick of its file system's clock: 2 s on FAT
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


def stored_digest(folder: Path, package: Path = _PACKAGE) -> str:
    """Return the result of `code_digest`, from a folder if it is stored there for files of these sizes and times."""
    states = sorted(_states(str(package)))
    asked = hashlib.sha256(json.dumps(states).encode()).hexdigest()
    path = folder / _FOLDER / _FILE
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads(path.read_bytes())[asked])
    found = code_digest(package)
    newest_ns = max((max(changed, written) for _, _, written, changed, _ in states), default=0)
    if time.time_ns() - newest_ns > _SETTLED_SECONDS * 1e9:
        with contextlib.suppress(OSError):
            write_whole(path, json.dumps({asked: found}).encode())
    return found


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that other processes may read or write at the same time: they see either all of it, or the previous content.

    Raises:
        OSError: The file cannot be written. The previous content remains.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _states(folder: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the path, size in bytes, two times in nanoseconds and number of each code and data file."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _states(entry.path)
        elif entry.name.endswith(_DATA):
            state = entry.stat()
            yield entry.path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def edition_of(versions: Mapping[str, str], folder: str = "") -> str:
    """Return a text for all that answers depend on except the question: versions of packages, and this package's code and data.

    With a folder the digest of these is kept there.
    """
    return json.dumps([dict(versions), stored_digest(Path(folder)) if folder else code_digest()])
