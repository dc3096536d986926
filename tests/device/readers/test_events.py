"""From addresses to tapes: what is paired, named, marked; and the CUDA allocator's history read so."""

from __future__ import annotations

from sizer.device.readers.events import AllocatorEvent, PhaseEnd, SegmentEvent, make_recording, make_tape, read_trace
from sizer.device.record.recording import Segment
from sizer.tape.tape import CATEGORIES, Tape


def event(address: int, size: int, op: str = "aten::mm", module: str = "") -> AllocatorEvent:
    return AllocatorEvent(address=address, bytes=size, op=op, module=module)


def categories(tape: Tape) -> list[str]:
    return [CATEGORIES[index] for index in tape.categories]


def test_addresses_that_come_again_are_other_blocks() -> None:
    tape = make_tape([event(16, 100), event(16, -100), event(16, 50), event(32, 7)], [], batch=3).validate()
    assert list(tape.order) == [0, ~0, 1, 2]
    assert list(tape.sizes) == [100, 50, 7]
    assert tape.batch == 3


def test_what_was_there_before_is_no_part_of_it() -> None:
    tape = make_tape([event(16, -100), event(32, 0), event(48, 8)], [], batch=1).validate()
    assert (list(tape.order), list(tape.sizes)) == ([0], [8])


def test_a_release_that_was_not_seen_is_made_up_for() -> None:
    tape = make_tape([event(16, 100), event(16, 60)], [], batch=1).validate()
    assert list(tape.order) == [0, ~0, 1]


def test_phases_end_where_they_end_and_say_what_lives() -> None:
    events = [
        event(1, 40, "aten::empty"),
        event(2, 8),
        event(3, 16),
        event(3, -16),
        event(4, 12, module="head"),
        event(5, 40),
        event(6, 20, module="head"),
    ]
    ends = [
        PhaseEnd(position=7, phase="backward", live={5: ("gradient", "body"), 6: ("gradient", "other")}),
        PhaseEnd(position=1, phase="load", live={1: ("parameter", "body.weight"), 9: ("buffer", "not there")}),
        PhaseEnd(position=5, phase="forward", live={2: ("input", "")}),
    ]
    tape = make_tape(events, ends, batch=1).validate()
    assert tape.marks == ((1, "load"), (5, "forward"), (7, "backward"))
    assert categories(tape) == ["parameter", "input", "temporary", "activation", "gradient", "gradient"]
    named = [tape.module_names[index] for index in tape.modules]
    assert named == ["body.weight", "", "", "head", "body", "head"]
    assert [tape.op_names[index] for index in tape.ops][:2] == ["aten::empty", "aten::mm"]


def test_segments_stand_among_the_events() -> None:
    events = [
        SegmentEvent(address=5000, bytes=2048, stream=77),
        event(5000, 512),
        SegmentEvent(address=1000, bytes=4096, stream=0),
        event(1000, 4096),
        event(1000, -4096),
        SegmentEvent(address=1000, bytes=-4096, stream=0),
    ]
    _, segments = make_recording(events, [], batch=1)
    assert segments == (
        Segment(position=0, action="alloc", address=4000, bytes=2048, stream=0),
        Segment(position=1, action="alloc", address=0, bytes=4096, stream=1),
        Segment(position=3, action="free", address=0, bytes=4096, stream=1),
    )


HISTORY = [
    {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 0, "time_us": 1},
    {"action": "alloc", "addr": 4096, "size": 100, "stream": 0, "time_us": 2},
    {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 3},
    {"action": "free_requested", "addr": 4096, "size": 100, "stream": 0, "time_us": 4},
    {"action": "free_completed", "addr": 4096, "size": 100, "stream": 0, "time_us": 5},
    {"action": "alloc", "addr": 4096, "size": 60, "stream": 0, "time_us": 6},
    {"action": "oom", "size": 10**12, "stream": 0, "device_free": 5, "time_us": 7},
]


def test_history_and_profiler_tell_one_story() -> None:
    # the profiler sees blocks as rounded, 512 bytes; the history what was requested
    profiled = [event(4096, 512, "aten::mm", "one"), event(4096, -512), event(4096, 512, "aten::add", "two")]
    ends = [PhaseEnd(position=3, phase="load"), PhaseEnd(position=7, phase="forward")]
    events, places = read_trace(HISTORY, ends, profiled)
    tape, segments = make_recording(events, places, batch=1)
    assert list(tape.validate().order) == [0, ~0, 1]
    assert list(tape.sizes) == [100, 60]
    assert [tape.op_names[op] for op in tape.ops] == ["aten::mm", "aten::add"]
    assert [tape.module_names[module] for module in tape.modules] == ["one", "two"]
    assert tape.marks == ((1, "load"), (3, "forward"))
    assert segments == (Segment(position=0, action="alloc", address=0, bytes=2097152, stream=0),)


def test_a_history_without_the_profiler_has_no_names() -> None:
    events, _ = read_trace(HISTORY, [], [])
    assert [e.op for e in events if isinstance(e, AllocatorEvent)] == ["", "", ""]
