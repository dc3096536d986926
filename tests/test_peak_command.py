"""The command `peak`, over the real job server."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest

from sizer.__main__ import main
from sizer.base.codec import decode
from sizer.commands.decisions import format_peak
from sizer.commands.waiting import in_focus
from sizer.query.text import parse_query
from sizer.report.peak import PeakReport
from sizer.service.client import JobClient

QUERY = "arch=torchvision:resnet18&image=64&dtype=float32&batch=2&optimizer=sgd"


@pytest.fixture(scope="module")
def client():
    client = JobClient()
    yield client
    client.close()


@pytest.fixture
def run(client, capsys, monkeypatch):
    """Runs the command; (exit status, stdout, stderr). The job server lives on from one to the next."""
    monkeypatch.setattr(client, "close", lambda: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["peak", *arguments], make_client=lambda: client)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    yield run
    monkeypatch.undo()


def test_text_and_json_say_the_same(run):
    status, text, _ = run(QUERY)
    assert status == 0
    found = decode(PeakReport, json.loads(run(QUERY, "--json")[1]))
    lines = text.splitlines()
    assert lines[0] == found.sentence
    assert any(line.startswith(found.tensors[0].tensor) and found.tensors[0].op in line for line in lines)
    assert any(line.startswith("(all)") for line in lines)
    assert max(map(len, list(format_peak(found, 95))[1:])) <= 95 < max(map(len, lines[1:]))


def test_the_snapshot_is_a_pickle_of_plain_values(run, tmp_path):
    path = tmp_path / "peak.pickle"
    assert run(QUERY, "--snapshot", str(path)) == (0, "", "")
    found = decode(PeakReport, json.loads(run(QUERY, "--json")[1]))
    snapshot = pickle.loads(path.read_bytes())
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == found.allocated_bytes
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == found.reserved_bytes


def test_a_snapshot_that_cannot_be_written_is_said(run, tmp_path):
    status, _, error = run(QUERY, "--snapshot", str(tmp_path / "absent" / "peak.pickle"))
    assert status == 2
    assert "the snapshot cannot be written" in error


def test_the_script_is_printed_as_it_is(run):
    status, script, _ = run(QUERY, "--script")
    assert status == 0
    compile(script, "script", "exec")
    assert "torch.optim.SGD(parameters, lr=0.001)" in script


def test_of_ranks_the_script_is_for_torchrun(run):
    status, script, _ = run(f"{QUERY}&parallel=zero1&ranks=2", "--script")
    assert status == 0
    assert "torchrun --nproc-per-node 2" in script and "ZeroRedundancyOptimizer(" in script


def test_each_cell_in_focus_has_its_own_answer(client):
    query = QUERY.replace("batch=2", "batch=2,4")
    found = [client.submit_peak(f"{query}&focus=float32:{batch}").result(timeout=120) for batch in (2, 4)]
    assert [report.batch for report in found] == [2, 4]


def test_of_several_cells_it_is_the_one_that_the_page_opens_with(run, client):
    query = QUERY.replace("batch=2", "batch=2,4")
    focus = client.submit(query).result(timeout=120).focus
    status, text, told = run(query)
    assert (status, told) == (0, f"{focus.dtype} at batch {focus.batch}; name another with focus=float32:4\n")
    asked = [run(f"{query}&focus=float32:{batch}")[1].partition("\nLink: /?") for batch in (4, 2)]
    assert text.partition("\nLink: /?")[0] == asked[0][0] != asked[1][0]
    assert asked[0][2].endswith("&focus=float32:4\n")


def test_where_no_step_can_be_traced_any_is_asked_for_and_says_why(capsys):
    done = SimpleNamespace(progress="", result=lambda timeout: SimpleNamespace(focus=None))
    asked = in_focus(
        SimpleNamespace(submit=lambda query: done), "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=2,4"
    )
    assert parse_query(asked).focus == ("float32", 2)
    assert capsys.readouterr().err == ""
