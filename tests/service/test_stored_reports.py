"""Reports that are kept: found again for the same question and edition, and absent if anything that decides them changes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sizer.__main__ import main
from sizer.query.text import parse_query
from sizer.service import edition, stored_reports
from sizer.service.edition import code_digest, stored_digest
from sizer.service.stored_reports import StoredReports
from sizer.service.variables import FOLDER_VARIABLE
from tests.ui.reports import report_for

QUERY = "arch=torchvision:resnet50&dtype=float32,bfloat16&batch=1,32&gpu=a100-40gb"
REPORT = report_for(parse_query(QUERY))
TEXT = REPORT.to_json()
PROJECT = Path(edition.__file__).parents[2]


def written(folder: Path) -> list[Path]:
    return [*folder.rglob("*.report")]


def test_a_report_is_found_again(tmp_path):
    StoredReports(str(tmp_path)).keep(QUERY, REPORT)
    assert StoredReports(str(tmp_path)).find(QUERY) == REPORT
    assert StoredReports(str(tmp_path)).find(f"gpu=a100-40gb&{QUERY.removesuffix('&gpu=a100-40gb')}") == REPORT
    assert StoredReports(str(tmp_path)).find(QUERY.replace("32&", "64&")) is None


@pytest.mark.parametrize("changed", [{"pending": ("float32",)}, {"failures": {"float32": "the job was stopped"}}])
def test_a_part_of_an_answer_is_not_kept(tmp_path, changed):
    StoredReports(str(tmp_path)).keep(QUERY, replace(REPORT, **changed))
    assert written(tmp_path) == []


@pytest.mark.parametrize("query", ["arch=hub:org/name&batch=1", "arch=torchvision:resnet50&batch=0"])
def test_a_config_of_the_hub_and_a_refused_query_are_not_kept(tmp_path, query):
    StoredReports(str(tmp_path)).keep(query, REPORT)
    assert written(tmp_path) == []


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    StoredReports("").keep(QUERY, REPORT)
    assert StoredReports("").find(QUERY) is None
    assert not [*tmp_path.iterdir()]


def older_format(data: bytes) -> bytes:
    return zlib.decompress(data)  # reports were written without compression


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: bytes([*data[:100], data[100] ^ 1, *data[101:]]),
        lambda data: b"\xff",
        older_format,
        lambda data: zlib.compress(b"[]"),
        lambda data: zlib.compress(b"\xff"),
        lambda data: zlib.compress(b'{"schema": 1}'),
    ],
)
def test_a_file_that_is_no_report_counts_as_absent(tmp_path, spoil):
    StoredReports(str(tmp_path)).keep(QUERY, REPORT)
    (path,) = written(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert StoredReports(str(tmp_path)).find(QUERY) is None
    StoredReports(str(tmp_path)).keep(QUERY, REPORT)
    assert StoredReports(str(tmp_path)).find(QUERY) == REPORT


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "reports").write_text("a file in the place of the folder")
    StoredReports(str(tmp_path)).keep(QUERY, REPORT)
    assert StoredReports(str(tmp_path)).find(QUERY) is None


def test_the_least_recently_used_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_reports, "MOST_FILES", 2)
    kept = StoredReports(str(tmp_path))
    for batch in (1, 2, 3):
        kept.keep(f"arch=torchvision:resnet50&batch={batch}", REPORT)
    assert len(written(tmp_path)) == 2


@pytest.mark.parametrize(
    ("path", "before", "after", "changes"),
    [
        ("catalogue/gpus.csv", "a,1", "a,2", True),
        ("catalogue/presets.json", '{"a": 1}', '{"a": 2}', True),
        ("rule.py", "a = 1", "a = 2", True),
        ("rule.py", 'def f():\n    """One."""\n    return 1', 'def f():\n    """Two\n    "lines"."""\n    return 1', False),
        ("rule.py", 'def f():\n    """One."""\n    return 1', 'def f():\n    """One."""\n    return 2', True),
        ("rule.py", '"""One."""\na = 1', '"""Another."""\na = 1', False),
        ("rule.py", "# One\na = 1", "# Another\na = 1", False),
        ("rule.py", 'a = """One."""', 'a = """Another."""', True),
        ("rule.py", 'f(\n    """One."""\n)', 'f(\n    """Another."""\n)', True),
        ("notes.md", "One", "Another", False),
    ],
)
def test_code_and_data_change_the_edition_and_sentences_do_not(tmp_path, path, before, after, changes):
    digests = []
    for number, text in enumerate((before, after)):
        file = tmp_path / str(number) / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
        digests.append(code_digest(tmp_path / str(number)))
    assert (digests[0] != digests[1]) is changes


def test_the_edition_is_that_of_this_package():
    assert code_digest() == code_digest(Path(edition.__file__).parents[1])


@pytest.mark.parametrize("name", ["_installation", "stored_digest"])
def test_another_installation_has_reports_of_its_own(tmp_path, monkeypatch, name):
    StoredReports(str(tmp_path)).keep(QUERY, REPORT)
    changed = {"_installation": lambda: ["torch-9.9.dist-info"], "stored_digest": lambda folder: "another"}[name]
    monkeypatch.setattr(stored_reports, name, changed)
    assert StoredReports(str(tmp_path)).find(QUERY) is None


def test_the_installation_names_every_package():
    assert any(name.startswith("torch-") for name in stored_reports._installation())


def test_the_copies_that_setuptools_adds_to_the_path_change_no_key(monkeypatch):
    before = stored_reports._installation()
    vendored = Path(importlib.util.find_spec("setuptools").origin).parent / "_vendor"
    assert [*vendored.glob("*.dist-info")]
    monkeypatch.setattr(sys, "path", [*sys.path, str(vendored)])
    assert stored_reports._installation() == before


def test_the_command_starts_no_job_server_for_an_answer_that_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    job = SimpleNamespace(result=lambda timeout: REPORT, progress="")
    asked: list[str] = []

    def client():
        return closing_client(asked, job)

    assert main(["estimate", QUERY, "--json"], make_client=client) == 0
    first = capsys.readouterr().out
    assert main(["estimate", QUERY, "--json"], make_client=client) == 0
    assert capsys.readouterr().out == first
    assert asked == [QUERY]


def test_the_names_of_packages_are_kept_for_an_installation(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    asked: list[int] = []
    named = {"torchvision": [{"name": "resnet50", "family": "resnet"}]}

    def client():
        job = SimpleNamespace(result=lambda timeout: named, progress="")
        return SimpleNamespace(submit_models=lambda: asked.append(1) or job, close=lambda: None)

    printed = []
    for installed in (["torchvision-1"], ["torchvision-1"], ["torchvision-2"]):
        monkeypatch.setattr(stored_reports, "_installation", lambda installed=installed: installed)
        assert main(["models"], make_client=client) == 0
        printed.append(capsys.readouterr().out)
    assert "torchvision:resnet50" in printed[0] and len({*printed}) == 1
    assert len(asked) == 2, "another installation has names of its own"


def closing_client(asked: list[str], job: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(submit=lambda query: asked.append(query) or job, close=lambda: None)


@pytest.mark.parametrize("form", ["--json", None])
def test_the_client_of_a_kept_answer_imports_the_standard_library_and_little_else(tmp_path, form):
    arguments = ["estimate", QUERY, *([form] if form else [])]
    prepare = f"from sizer.__main__ import main; from tests.service.test_stored_reports import REPORT, closing_client;\
from types import SimpleNamespace as Of; job = Of(result=lambda timeout: REPORT, progress='');\
main({arguments!r}, make_client=lambda: closing_client([], job))"
    again = f"import sys; from sizer.__main__ import main; main({arguments!r}, make_client=None);\
print(sorted(name for name in sys.modules if name.startswith({HEAVY!r})))"
    first, second = (run_python(program, tmp_path) for program in (prepare, again))
    assert second.removesuffix("[]\n") == first
    assert second.endswith("\n[]\n")


# What the client of a kept answer must not import: each would take longer than all that it does import.
LIBRARIES = ("torch", "numpy", "pandas", "asyncio", "importlib.metadata", "subprocess")
HEAVY = (*LIBRARIES, "sizer.tape", "sizer.allocator", "sizer.report", "sizer.device", "sizer.estimating.estimator")


def run_python(program: str, folder: Path) -> str:
    environment = {FOLDER_VARIABLE: str(folder), "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_two_processes_that_write_one_entry_leave_a_whole_one(tmp_path):
    program = f"from tests.service.test_stored_reports import *; kept = StoredReports({str(tmp_path)!r});\
[(kept.keep(QUERY, REPORT), kept.keep_text(QUERY, 'json', TEXT)) for _ in range(200)]"
    writers = [subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        found, text = StoredReports(str(tmp_path)).find(QUERY), StoredReports(str(tmp_path)).find_text(QUERY, "json")
        assert found in (None, REPORT) and text in (None, TEXT)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert (StoredReports(str(tmp_path)).find(QUERY), StoredReports(str(tmp_path)).find_text(QUERY, "json")) == (REPORT, TEXT)
    assert len([*(tmp_path / "reports").iterdir()]) == 2


@pytest.mark.skipif(os.name != "posix", reason="no limit of a file's size on this system")
def test_a_full_disk_leaves_what_was_there(tmp_path):
    StoredReports(str(tmp_path)).keep_text(QUERY, "json", TEXT)
    program = f"import resource, signal; from tests.service.test_stored_reports import *; kept = StoredReports({str(tmp_path)!r});\
signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10));\
kept.keep(QUERY, REPORT); kept.keep_text(QUERY, 'json', 'another text ' * 100);\
print(kept.find(QUERY), kept.find_text(QUERY, 'json') == TEXT)"
    assert run_python(program, tmp_path) == "None True\n"
    assert len([*(tmp_path / "reports").iterdir()]) == 1


def test_the_digest_is_read_again_only_after_an_edit(tmp_path, monkeypatch):
    package, folder = tmp_path / "package", tmp_path / "kept"
    package.mkdir()
    file = package / "gpus.csv"
    file.write_text("a,1")
    settled = time.time() - 60
    os.utime(file, (settled, settled))
    monkeypatch.setattr(edition, "_SETTLED_SECONDS", 0.0)
    time.sleep(0.01)
    before = stored_digest(folder, package)
    assert before == code_digest(package)
    monkeypatch.setattr(edition, "code_digest", lambda package: "read again")
    assert stored_digest(folder, package) == before
    file.write_text("a,2")  # as many bytes, and a time that is set back
    os.utime(file, (settled, settled))
    assert stored_digest(folder, package) == "read again"
    (folder / "edition" / "code.json").write_text('{"')
    assert stored_digest(folder, package) == "read again"


def test_the_digest_of_files_that_were_just_edited_is_not_kept(tmp_path):
    (tmp_path / "rule.py").write_text("a = 1")
    assert stored_digest(tmp_path / "kept", tmp_path) == code_digest(tmp_path)
    assert not (tmp_path / "kept").exists()


def test_the_folder_is_shown_and_cleared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    StoredReports(str(tmp_path)).keep(QUERY, REPORT)
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*")]
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path), "files": len(sizes), "bytes": sum(sizes)}
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n0 files, 0 B\n"
    assert written(tmp_path) == []
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert main(["cache"]) == 0
    assert "SIZER_TAPES is empty" in capsys.readouterr().out
