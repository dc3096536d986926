"""Files that a dry run does not write, under the names by which the script finds them again. No torch.

Each file is a sparse file of the same size in a folder of the run. `os.stat` answers for that file, so that `os.path.exists`,
`getsize` and pathlib do too. Renaming, copying and removing change only the name. The user's files are not changed.

*Known limitation*: listings of folders do not have these names, and `open` does not find them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file that was not written: a sparse file of its size, and the known parts of its content."""

    stand_in: Path
    content: Any


class KeptFiles:
    """Kept files by their absolute names."""

    def __init__(self, folder: Callable[[], str | os.PathLike]) -> None:
        """Keep sparse files in the folder that `folder` returns, which is called at the first file."""
        self._folder = folder
        self._files: dict[str, KeptFile] = {}
        self._count = 0

    def add(self, name: str | os.PathLike, size_bytes: int, *, head: bytes = b"", content: Any = None) -> None:
        """Keep a file.

        Args:
            name: The file's name.
            size_bytes: Its size. Bytes after `head` read as 0.
            head: Its first bytes.
            content: Anything that `find` shall return.

        Raises:
            RuntimeError: The folder does not exist, as PyTorch says it (caffe2/serialize/inline_container.cc, 2.15).
        """
        path = _absolute(name)
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            raise RuntimeError(f"Parent directory {parent} does not exist.")
        self._count += 1
        stand_in = Path(self._folder()) / f"kept-{os.getpid()}-{self._count}"
        with open(stand_in, "wb") as file:
            file.write(head)
            file.truncate(max(size_bytes, len(head)))
        self._files[path] = KeptFile(stand_in=stand_in, content=content)

    def find(self, name: object) -> KeptFile | None:
        """Return the kept file of a name, None for other names. A file disappears with its folder."""
        if not self._files or not isinstance(name, (str, os.PathLike)):
            return None
        path = _absolute(name)
        found = self._files.get(path)
        if found is not None and not os.path.isdir(os.path.dirname(path)):
            del self._files[path]
            return None
        return found

    def forget(self, name: str | os.PathLike | None) -> None:
        """Forget the kept file of a name, if there is one: a file was written in its place."""
        if name is not None:
            self._files.pop(_absolute(name), None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make functions of `os` and `shutil` find the kept files, within the context."""
        own = {name: getattr(os, name) for name in ("stat", "rename", "replace", "remove", "unlink")}
        copies: dict[str, Any] = {name: getattr(shutil, name) for name in ("copyfile", "copy", "copy2")}

        def stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            found = self.find(path) if not kwargs.get("dir_fd") else None
            return own["stat"](path if found is None else found.stand_in, *args, **kwargs)

        def moving(move: Callable[..., None]) -> Callable[..., None]:
            def moved(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
                found = self.find(source)
                if found is None:
                    move(source, target, *args, **kwargs)
                    self._move_folder(source, target)
                    return
                del self._files[_absolute(source)]
                self._files[_absolute(target)] = found

            return moved

        def removing(remove: Callable[..., None]) -> Callable[..., None]:
            def removed(path: Any, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("dir_fd") is None and self.find(path) is not None:
                    del self._files[_absolute(path)]
                else:
                    remove(path, *args, **kwargs)

            return removed

        def copying(copy: Callable[..., Any]) -> Callable[..., Any]:
            def copied(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
                found = self.find(source)
                if found is None:
                    return copy(source, target, *args, **kwargs)
                if os.path.isdir(target):
                    target = os.path.join(target, os.path.basename(source))
                self._files[_absolute(target)] = found
                return target

            return copied

        copies = {name: copying(copy) for name, copy in copies.items()}
        answers: dict[str, Any] = {"stat": stat}
        answers |= {name: moving(own[name]) for name in ("rename", "replace")}
        answers |= {name: removing(own[name]) for name in ("remove", "unlink")}
        # shutil checks whether os.stat is in these sets
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            able.update(answer for name, answer in answers.items() if own[name] in able)
        with (
            mock.patch.multiple(os, **answers),
            mock.patch.multiple(shutil, **copies),
        ):
            yield

    def _move_folder(self, source: Any, target: Any) -> None:
        """Rename the kept files of a renamed folder; a real file replaces a kept one of the same name."""
        if not self._files or isinstance(source, int):
            return
        old, new = _absolute(source), _absolute(target)
        self._files.pop(new, None)
        for name in [name for name in self._files if name.startswith(old + os.sep)]:
            self._files[new + name.removeprefix(old)] = self._files.pop(name)


def _absolute(name: Any) -> str:
    return os.path.abspath(os.fsdecode(name))
