"""Records of torch.profiler about a run: every allocation and release, with the current operator and module.

The profiler records without a dispatch mode, so no code path changes. Modules are marked by global forward hooks. In the
backward pass, autograd's sequence numbers lead back to the module whose forward ran.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from sizer.base.versions import installed_version
from sizer.device.readers.events import AllocatorEvent, LiveTensors, PhaseEnd

_PHASE, _MODULE, _OPERATOR = "phase:", "module:", "aten::"
_NODE = "autograd::engine::evaluate_function: "
_MEMORY = "[memory]"
# Operators that other operators call to allocate: the allocation is attributed to the caller.
_FACTORIES = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Allocations and releases in the order of time, with the type of their device, and the ends of phases.

    `calls` are the operators that ran, (name, start, end) by the profiler's clock (ns), as for the other times.
    """

    events: tuple[tuple[int, str, AllocatorEvent], ...] = ()
    ends: tuple[tuple[int, str], ...] = ()
    calls: tuple[tuple[str, int, int], ...] = ()

    def on(self, kind: str) -> list[AllocatorEvent]:
        """Return the events of one type of device."""
        return [event for _, where, event in self.events if where == kind]

    def phase_ends(self, kind: str, live: dict[str, LiveTensors]) -> list[PhaseEnd]:
        """Return the ends of the phases in the list `on(kind)`; `live` has the live tensors by phase."""
        times = [time for time, where, _ in self.events if where == kind]
        return [
            PhaseEnd(position=bisect_left(times, end), phase=phase, live=live.get(phase, {}))
            for end, phase in self.ends
        ]

    def scratch(self, kind: str) -> dict[str, int]:
        """Return, per operator, the peak bytes inside one call beyond those before and after it."""
        rows = [(time, event.bytes) for time, where, event in self.events if where == kind]
        times, levels = [time for time, _ in rows], [0]
        for _, size in rows:
            levels.append(levels[-1] + size)
        most: dict[str, int] = defaultdict(int)
        for name, start, end in self.calls:
            first, last = bisect_left(times, start), bisect_left(times, end)
            most[name] = max(most[name], max(levels[first : last + 1]) - max(levels[first], levels[last]))
        return dict(most)


class Profiler:
    """Records between `start` and `stop`; `mark` ends a phase, `watch` learns the names of a module's children."""

    def __init__(self) -> None:
        # Without acc_events PyTorch parses its own table of events only on request, and it is not needed here. Up to 2.11 PyTorch
        # warns about that (torch/autograd/profiler.py), so acc_events stays on for versions before the one that was checked.
        older = installed_version() < (2, 15)
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=older)
        self._paths: dict[int, str] = {}
        self._scopes: list[record_function] = []
        self._handles: list[Any] = []
        self._running = False

    def start(self) -> None:
        """Start recording."""
        register = nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(self._enter),
            register.register_module_forward_hook(self._leave, always_call=True),
        ]
        self._profile.start()
        self._running = True

    def watch(self, module: nn.Module) -> None:
        """Learn the dotted paths of a module and its children."""
        for path, child in module.named_modules():
            self._paths.setdefault(id(child), path)

    def mark(self, phase: str) -> None:
        """End a phase here."""
        with record_function(f"{_PHASE}{phase}"):
            pass

    def stop(self) -> Profiled:
        """Return the recording; empty at a second call."""
        for handle in self._handles:
            handle.remove()
        if not self._running:
            return Profiled()
        self._running = False
        while self._scopes:  # left open by an error
            self._scopes.pop().__exit__(None, None, None)
        self._profile.stop()
        return read_trees(self._profile.profiler.kineto_results.experimental_event_tree())

    def _enter(self, module: nn.Module, args: Any) -> None:
        if (path := self._paths.get(id(module))) is not None:
            scope = record_function(f"{_MODULE}{path}")
            scope.__enter__()
            self._scopes.append(scope)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if id(module) in self._paths and self._scopes:
            self._scopes.pop().__exit__(None, None, None)


class _Place(NamedTuple):
    """Place of an event in the program: operator, module, and for a node of a backward pass its sequence number."""

    op: str = ""
    module: str | None = None
    number: int = -1


def read_trees(roots: Iterable[Any]) -> Profiled:
    """Return the events of the profiler's trees (torch._C._profiler._ProfilerEvent), each node after its parent."""
    rows, ends, calls = [], [], []
    forward: dict[int, str] = {}
    for event, place in _walk(roots):
        name = event.name
        if name == _MEMORY:
            rows.append((event.start_time_ns, event.extra_fields, place))
        elif name.startswith(_PHASE):
            ends.append((event.start_time_ns, name.removeprefix(_PHASE)))
        elif name.startswith(_OPERATOR):
            calls.append((name, event.start_time_ns, event.end_time_ns))
            if place.module is not None and event.extra_fields.sequence_number >= 0:
                forward[event.extra_fields.sequence_number] = place.module
    rows.sort(key=lambda row: row[0])
    events = [(time, fields.device.type, _event(fields, place, forward)) for time, fields, place in rows]
    return Profiled(events=tuple(events), ends=tuple(sorted(ends)), calls=tuple(calls))


def _walk(roots: Iterable[Any]) -> Iterator[tuple[Any, _Place]]:
    """Yield every event with its own place, parents first, children in their order."""
    todo = [(root, _Place()) for root in reversed(list(roots))]
    while todo:
        event, place = todo.pop()
        place = _inside(event, place)
        yield event, place
        todo += [(child, place) for child in reversed(event.children)]


def _inside(event: Any, place: _Place) -> _Place:
    name = event.name
    if name.startswith(_MODULE):
        return place._replace(module=name.removeprefix(_MODULE))
    if name.startswith(_NODE):
        return _Place(op=name.removeprefix(_NODE), number=event.extra_fields.sequence_number)
    if name.startswith(_OPERATOR) and not (name in _FACTORIES and place.op.startswith(_OPERATOR)):
        return place._replace(op=name)
    return place


def _event(fields: Any, place: _Place, forward: dict[int, str]) -> AllocatorEvent:
    module = forward.get(place.number, "") if place.module is None else place.module
    return AllocatorEvent(address=fields.ptr, bytes=fields.alloc_size, op=place.op, module=module)
