"""PyTorch's memory history as a tape: one recorded run, replayed for other capacities and settings. No torch.

Each event of the history carries a stamp, the number that was set by `torch.cuda.memory._set_memory_metadata` before it. The
child process records the events of each stamp: phases that ended, modules that began, tensors that became parameters or
gradients.

*Known limitation*: events of threads that set no stamp (autograd's, and those in which libraries load weights) have the latest
stamp of other threads.
"""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sizer.tape.tape import CATEGORIES, EMPTY_CACHE, PRIVATE, Tape

LOAD, REST = "load", "rest"
BACKWARD = "backward pass"  # the line of blocks that autograd's own thread allocates
_NO_LINE, _TEXT = "no Python line", "<string>"
_COMMON = (0, 0)  # the pool of memory outside of private pools
_GIVEN_BACK = ("segment_free", "segment_unmap")
_OURS = str(Path(__file__).parent) + os.sep


def phase_of_step(number: int) -> str:
    """Return the phase of an optimizer step, from 1 on."""
    return f"step{number}"


def columns_of(
    trace: Sequence[Mapping[str, Any]],
    *,
    modules: Sequence[tuple[int, str]],
    labels: Iterable[tuple[int, int, str, str]],
    backwards: Iterable[tuple[int, bool]],
    phase_ends: Sequence[tuple[int, str]],
    library_folders: tuple[str, ...],
) -> dict[str, Any]:
    """Return the columns of a tape, as JSON lists, for one device's events in the memory history.

    Args:
        trace: The events of `torch.cuda.memory._snapshot()["device_traces"]`.
        modules: The path of the module that runs from a stamp on, ascending.
        labels: (stamp, address, category, path of the module) of tensors.
        backwards: (stamp, begins): backward passes that begin or end.
        phase_ends: (stamp, phase): the phases, each up to its stamp, ascending. The events after the last one are "rest".
        library_folders: Folders of libraries, whose lines do not belong to the script.
    """
    actions = sorted(
        [
            *((stamp, 0, (address, CATEGORIES.index(category), path)) for stamp, address, category, path in labels),
            *((stamp, 1, begins) for stamp, begins in backwards),
            *((stamp, 2, phase) for stamp, phase in phase_ends),
        ],
        key=lambda action: action[0],
    )
    writer = _Writer(modules, library_folders)
    following = stamp = 0
    emptied: set[Any] = set()  # the pools of the events that give memory back, as far as they follow on another
    for event in trace:
        written = event.get("user_metadata") or ""
        stamp = max(stamp, int(written)) if written.isdigit() else stamp
        of_autograd = not written and not _is_of_python_thread(event)
        until = stamp if not of_autograd or writer.backward_runs else _next_backward(actions, following, stamp)
        while following < len(actions) and actions[following][0] <= until:
            writer.act(*actions[following][1:])
            following += 1
        if event["action"] == "alloc":
            writer.allocate(event, None if of_autograd else stamp)
        elif event["action"] == "free_completed":
            writer.free(event["addr"])
        elif event["action"] in _GIVEN_BACK:
            writer.empty(event, emptied)
            continue
        emptied.clear()
    for _, kind, value in actions[following:]:
        writer.act(kind, value)
    writer.end_phase(REST)
    return writer.columns()


def _is_of_python_thread(event: Mapping[str, Any]) -> bool:
    """Return True if a thread that Python started allocates, or releases; autograd's threads are started by C++."""
    return any(frame["name"] == "_bootstrap" and frame["filename"] == threading.__file__ for frame in event.get("frames", ()))


def _next_backward(actions: Sequence[tuple[int, int, Any]], following: int, stamp: int) -> int:
    """Return the stamp at which the next backward pass begins: an event without a stamp shows that autograd's thread is at work."""
    begins = (at for at, kind, value in actions[following:] if kind == 1 and value)
    return max(stamp, next(begins, stamp))


def tape_of(columns: Mapping[str, Any], *, by_address: bool, host_bytes: int = 0) -> Tape:
    """Return the tape with the columns that `columns_of` made; `by_address` is as in Tape."""
    return Tape(
        batch=1,
        order=array("q", columns["order"]),
        sizes=array("q", columns["sizes"]),
        categories=bytes(columns["categories"]),
        ops=array("l", columns["lines"]),
        modules=array("l", columns["modules"]),
        op_names=tuple(columns["line_names"]),
        module_names=tuple(columns["module_names"]),
        marks=tuple((position, phase) for position, phase in columns["phases"]),
        streams=bytes(columns["streams"]) if any(columns["streams"]) else b"",
        by_address=by_address,
        host_bytes=host_bytes,
    )


class _Writer:
    """The columns of a tape as events are read."""

    def __init__(self, modules: Sequence[tuple[int, str]], library_folders: tuple[str, ...]) -> None:
        self._stamps, self._paths = [stamp for stamp, _ in modules], [path for _, path in modules]
        self._libraries = library_folders
        self._order: list[int] = []
        self._sizes: list[int] = []
        self._categories: list[int] = []
        self._lines: list[int] = []
        self._modules: list[int] = []
        self._streams: list[int] = []
        self._phases: list[tuple[int, str]] = []
        self._line_names: dict[str, int] = {}
        self._module_names: dict[str, int] = {"": 0}
        self._stream_numbers: dict[tuple[int, tuple[int, int]], int] = {(0, _COMMON): 0}
        self._living: dict[int, int] = {}
        self._labelled: set[int] = set()
        self._in_backward: set[int] = set()
        self.backward_runs = False
        self._step_began = 0

    def allocate(self, event: Mapping[str, Any], stamp: int | None) -> None:
        """Add a block; without a stamp, autograd's thread allocates it."""
        block = self._add(
            event["size"],
            "temporary",
            BACKWARD if stamp is None else self._line(event.get("frames", ())),
            (event["stream"], tuple(event.get("pool_id", _COMMON))),
        )
        if stamp is not None and not self.backward_runs:
            place = bisect_right(self._stamps, stamp) - 1
            path = self._paths[place] if place >= 0 else ""
            self._modules[block] = self._module_number(path)
        if self.backward_runs:
            self._in_backward.add(block)
        self._living[event["addr"]] = block

    def free(self, address: int) -> None:
        """Release the block at an address; an older one, from before the recording, is unknown."""
        if (block := self._living.pop(address, None)) is not None:
            self._order.append(~block)

    def act(self, kind: int, value: Any) -> None:
        """Apply an action that the child process noted at a stamp."""
        if kind == 0:
            address, category, path = value
            if (block := self._living.get(address)) is not None:
                self._categories[block] = category
                self._labelled.add(block)
                if path:
                    self._modules[block] = self._module_number(path)
        elif kind == 1:
            self.backward_runs = value
            if value:
                self._find_activations()
        else:
            self.end_phase(value)
            self._step_began = len(self._sizes)

    def empty(self, event: Mapping[str, Any], emptied: set[Any]) -> None:
        """Release unused cached blocks, as `torch.cuda.empty_cache()`, cuDNN's benchmark and a deleted private pool do.

        `emptied` are the pools of the preceding events that belong to the same call.
        """
        pool = tuple(event.get("pool_id", _COMMON))
        stream = (0, _COMMON) if pool == _COMMON else (event["stream"], pool)
        if stream not in emptied:
            emptied.add(stream)
            block = self._add(0, "temporary", EMPTY_CACHE, stream)
            self._order.append(~block)

    def end_phase(self, phase: str) -> None:
        """End a phase here."""
        self._phases.append((len(self._order), phase))

    def columns(self) -> dict[str, Any]:
        """Return the columns."""
        return {
            "order": self._order,
            "sizes": self._sizes,
            "categories": self._categories,
            "lines": self._lines,
            "modules": self._modules,
            "streams": self._streams,
            "phases": self._phases,
            "line_names": [*self._line_names] or [_NO_LINE],
            "module_names": [*self._module_names],
        }

    def _add(self, size: int, category: str, line: str, stream: tuple[int, tuple[int, int]]) -> int:
        block = len(self._sizes)
        self._order.append(block)
        self._sizes.append(size)
        self._categories.append(CATEGORIES.index(category))
        self._lines.append(self._line_names.setdefault(line, len(self._line_names)))
        self._modules.append(0)
        number = self._stream_numbers.setdefault(stream, len(self._stream_numbers))
        self._streams.append(number if stream[1] == _COMMON else PRIVATE + number)
        return block

    def _module_number(self, path: str) -> int:
        return self._module_names.setdefault(path, len(self._module_names))

    def _find_activations(self) -> None:
        """Classify the unnamed blocks of this step as activations: the backward pass begins."""
        for block in self._living.values():
            if block >= self._step_began and block not in self._labelled and block not in self._in_backward:
                self._categories[block] = CATEGORIES.index("activation")

    def _line(self, frames: Sequence[Mapping[str, Any]]) -> str:
        """Return the innermost line of the script, else of code without a file (`python -c`), else of a library or PyTorch."""
        inner = text = None
        for frame in frames:
            name = frame["filename"]
            if (not name.endswith(".py") and name != _TEXT) or name.startswith(_OURS):
                continue
            here = f"{name}:{frame['line']}"
            if name == _TEXT:  # also what a library has executed, and at the end Sizer's own command
                text = text or (None if frame is frames[-1] else here)
                continue
            inner = inner or here
            if not name.startswith(self._libraries):
                return here
        return text or inner or _NO_LINE
