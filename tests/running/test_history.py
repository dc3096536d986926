"""PyTorch's memory history as a tape: events by hand."""

from __future__ import annotations

import csv
import threading
from pathlib import Path
from typing import Any

from sizer.allocator.allocator import replay_events
from sizer.running.history import BACKWARD, columns_of, tape_of
from sizer.running.run_outcome import alive_at_peak
from sizer.tape.tape import CATEGORIES, EMPTY_CACHE, PRIVATE


def event(action: str, address: int, size: int, stamp: str, line: int = 1) -> dict[str, Any]:
    frames = [{"filename": "/lib/torch/nn.py", "line": 9}, {"filename": "train.py", "line": line}]
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "user_metadata": stamp,
        "frames": frames if stamp else [],
    }


TRACE = [
    event("alloc", 1, 100, "1"),  # a parameter
    event("alloc", 2, 10, "3", line=2),  # an activation
    event("alloc", 3, 100, ""),  # a gradient, by autograd's thread
    event("free_completed", 2, 10, ""),
    event("segment_free", 7, 512, "5"),
    event("segment_free", 8, 512, "5"),
    event("alloc", 2, 300, "6", line=3),
    event("free_completed", 2, 300, "6"),
    event("free_completed", 99, 5, "6"),  # from before the recording
]


def tape():
    columns = columns_of(
        TRACE,
        modules=[(2, "layer"), (3, "layer.0"), (4, "")],
        labels=[(2, 1, "parameter", "layer"), (6, 3, "gradient", "layer")],
        backwards=[(4, True), (5, False)],
        phase_ends=[(2, "load"), (7, "step1")],
        library_folders=("/lib/torch/",),
    )
    return tape_of(columns, by_address=False, host_bytes=3)


def test_events_are_blocks_with_categories_lines_and_modules():
    found = tape()
    # blocks: parameter, activation, gradient, the call of empty_cache, the last one; a call of empty_cache is released at once
    assert list(found.order) == [0, 1, 2, ~1, 3, ~3, 4, ~4]
    assert list(found.sizes) == [100, 10, 100, 0, 300]
    assert [CATEGORIES[kind] for kind in found.categories] == [
        "parameter",
        "activation",
        "gradient",
        "temporary",
        "temporary",
    ]
    assert [found.op_names[op] for op in found.ops] == ["train.py:1", "train.py:2", BACKWARD, EMPTY_CACHE, "train.py:3"]
    assert [found.module_names[module] for module in found.modules] == ["layer", "layer.0", "layer", "", ""]
    assert found.marks == ((1, "load"), (8, "step1"), (8, "rest")) and found.host_bytes == 3


def test_weights_that_a_library_loads_in_a_thread_are_loaded_weights():
    """transformers loads weights in threads, which set no stamp; they are not autograd's."""
    frames = [
        {"filename": "/lib/transformers/loading.py", "line": 12, "name": "_job"},
        {"filename": threading.__file__, "line": 1002, "name": "_bootstrap"},
    ]
    loaded = event("alloc", 1, 100, "") | {"frames": frames}
    columns = columns_of(
        [loaded, *TRACE[1:]],
        modules=[],
        labels=[(2, 1, "frozen parameter", "layer")],
        backwards=[(4, True), (5, False)],
        phase_ends=[(2, "load"), (7, "step1")],
        library_folders=("/lib/", str(Path(threading.__file__).parent)),
    )
    found = tape_of(columns, by_address=False)
    assert CATEGORIES[found.categories[0]] == "frozen parameter"
    assert found.op_names[found.ops[0]] == "/lib/transformers/loading.py:12"
    assert found.marks[0] == (1, "load")


def test_code_without_a_file_is_named_if_no_line_of_the_script_is_known():
    """`python -c` has no file, and neither has code that a library executes."""
    inner = [{"filename": "/lib/torch/nn.py", "line": 9}, {"filename": "<string>", "line": 41}]
    of_script = event("alloc", 1, 100, "1") | {"frames": [*inner, {"filename": "train.py", "line": 13}]}
    ours = {"filename": "<string>", "line": 1}  # the command with which Sizer starts the script's process
    of_command = event("alloc", 2, 100, "1") | {"frames": [*inner, ours]}
    of_library = event("alloc", 3, 100, "1") | {"frames": [*inner[:1], ours]}
    columns = columns_of(
        [of_script, of_command, of_library], modules=[], labels=[], backwards=[], phase_ends=[], library_folders=("/lib/",)
    )
    assert columns["line_names"] == ["train.py:13", "<string>:41", "/lib/torch/nn.py:9"]


def test_the_pool_of_a_graph_is_a_stream_of_its_own():
    common, pool = event("alloc", 1, 100, "1"), event("alloc", 2, 10, "1") | {"pool_id": (0, 1)}
    columns = columns_of(
        [common, pool, common | {"addr": 3, "pool_id": (0, 0)}, pool | {"addr": 4, "stream": 7}],
        modules=[], labels=[], backwards=[], phase_ends=[], library_folders=(),
    )  # fmt: skip
    assert columns["streams"] == [0, PRIVATE + 1, 0, PRIVATE + 2]


def test_what_is_alive_at_the_peak_is_by_line_and_module():
    lines, modules = alive_at_peak(tape())  # 100 + 100 + 300
    assert lines == (("train.py:3", 300), ("train.py:1", 100), (BACKWARD, 100))
    assert modules == (("", 300), ("layer", 200))


def test_the_recorded_public_scripts_replay_as_pytorch_counted():
    with Path(__file__).with_name("scripts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 20 and len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        for figure in ("allocated", "reserved"):
            assert int(row[f"replay_{figure}_bytes"]) == int(row[f"pytorch_{figure}_bytes"]) > 0, row["name"]


def test_a_deleted_pool_gives_back_its_own_memory_alone():
    pool = {"pool_id": (0, 1)}
    trace = [
        event("alloc", 1, 30 * 2**20, "1"), event("alloc", 2, 30 * 2**20, "1") | pool,
        event("free_completed", 1, 0, "1"), event("free_completed", 2, 0, "1") | pool,
        event("segment_free", 2, 30 * 2**20, "1") | pool,
    ]  # fmt: skip
    columns = columns_of(trace, modules=[], labels=[], backwards=[], phase_ends=[], library_folders=())
    assert columns["streams"] == [0, PRIVATE + 1, PRIVATE + 1]
    tape = tape_of(columns, by_address=False)
    for expandable in (False, True):  # with expandable segments in pages of 20 MiB
        reserved = [size // 2**20 for size in replay_events(tape, "cuda", None, expandable).reserved]
        assert reserved[-1] == (40 if expandable else 30) and max(reserved) == 2 * reserved[-1]
