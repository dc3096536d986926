"""A disk that is full, and a home that cannot be written: answers are given all the same, and nothing that was kept is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sizer.processes.environment import own_environment
from tests.service.test_tapes import reopened

resource = pytest.importorskip("resource", reason="limits of processes need POSIX")

# What a process may write to one file stands for the disk: beyond it every write fails, as on a full one (OSError, SQLITE_IOERR).
FULL = """
import resource, sys
def fill(most_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
def empty():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def run(program: str, *arguments: object) -> str:
    """What a program prints that can `fill` and `empty` the disk."""
    command = [sys.executable, "-c", FULL + program, *map(str, arguments)]
    return subprocess.run(
        command, env=own_environment(), check=True, capture_output=True, text=True, timeout=300
    ).stdout


TAPES = """
from sizer.service.tapes import TapeStore
def wait(store):
    store._thread.submit(int).result()
store = TapeStore(sys.argv[1])
store.put("architecture", "first", b"x" * 100)
wait(store)
fill(1000)
store.put("architecture", "second", b"y" * 5000)
print(sorted(store.of("architecture")))
wait(store)
empty()
store.put("architecture", "third", b"z" * 5000)
"""


def test_tapes_on_a_full_disk_are_kept_in_memory_and_leave_nothing_behind(tmp_path: Path):
    assert run(TAPES, tmp_path) == "['first', 'second']\n"
    assert sorted(reopened(tmp_path, "architecture").of("architecture")) == ["first", "third"]
    assert len(list((tmp_path / "tapes").iterdir())) == 1


LEDGER = """
from pathlib import Path
from sizer.device.ledger.ledger import Ledger
from sizer.base.errors import JobError
from tests.device.ledger.test_ledger import comparison_of, day
ledger = Ledger(Path(sys.argv[1]))
kept = [ledger.add(comparison_of(measured_at=day(number))) for number in (1, 2)]
fill(ledger.path.stat().st_size)
for number in range(3, 9):
    try:
        kept.append(ledger.add(comparison_of(name="long" * 1000, measured_at=day(number))))
    except JobError as error:
        print(str(error).partition(" (")[0])
        break
empty()
kept.append(ledger.add(comparison_of(measured_at=day(9))))
print(sorted(row.id for row in ledger.rows()) == kept, len(kept))
"""


def test_a_ledger_on_a_full_disk_says_so_and_loses_no_row(tmp_path: Path):
    told, kept = run(LEDGER, tmp_path / "ledger.sqlite3").splitlines()
    assert told == "the ledger cannot be used"
    assert kept.startswith("True ")


HOME = """
from sizer.service.variables import default_folder
from sizer.service.tapes import TapeStore
from sizer.device.ledger.ledger import Ledger, ledger_path
from sizer.base.errors import JobError
store = TapeStore(default_folder())
store.put("architecture", "tape", b"x")
print(sorted(store.of("architecture")), Ledger(ledger_path()).rows())
from tests.device.ledger.test_ledger import comparison_of
try:
    Ledger(ledger_path()).add(comparison_of())
except JobError as error:
    print(str(error).partition(" (")[0])
"""


def test_a_home_that_cannot_be_written_is_no_reason_not_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    home.write_text("a file, in which nobody can make a folder, whoever asks: root may write where others may not")
    monkeypatch.setenv("HOME", str(home))
    for name in ("SIZER_TAPES", "SIZER_LEDGER", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert run(HOME).splitlines() == ["['tape'] ()", "the ledger cannot be used"]
    assert os.path.isfile(home)
