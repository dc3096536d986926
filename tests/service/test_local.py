"""The direct path: one worker, one confined child, and imports that one question needs. Each test runs a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sizer.__main__ import main
from sizer.base.codec import encode
from sizer.base.errors import JobError, TimeLimitError
from sizer.commands.waiting import answers_alone, start_client, start_worker_client
from sizer.decision.peak import peak
from sizer.estimating.estimator import estimate
from sizer.processes.wire import error_to_wire
from sizer.query.text import parse_query
from sizer.service.settings import PUBLIC_VARIABLE
from sizer.service.variables import FOLDER_VARIABLE
from tests.processes.running import TESTS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

SMALL = "arch=torchvision:squeezenet1_1&dtype=float32&batch=2&image=64"
LANGUAGE = "arch=hf:gpt2&dtype=bfloat16&batch=1&seq=16"
DETECTION = "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn&mode=inference&dtype=float32&batch=1"  # calls roi_align


def run_python(program: str, **variables: str) -> str:
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_prints_what_the_library_returns_and_keeps_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert main(["estimate", SMALL, "--json"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(json.dumps(estimate(parse_query(SMALL)).to_dict()))
    assert len([*tmp_path.glob("reports/*")]) == 2
    assert len([*tmp_path.glob("tapes/*")]) == 1
    monkeypatch.setattr(subprocess, "Popen", None)  # a second worker would fail
    assert main(["estimate", SMALL, "--json"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["estimate", SMALL]) == 0  # made of the report that is kept
    assert "squeezenet1_1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("arch=torchvision:resnet49", 2, "resnet49"),
        ("arch=torchvision:squeezenet1_1&batch=0", 2, "batch"),
    ],
)
def test_errors_of_a_worker_are_those_of_the_command(monkeypatch, capsys, query, status, said):
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert main(["estimate", query]) == status
    assert said in capsys.readouterr().err


WHAT_IS_IMPORTED = """
import sys
from sizer.query.text import parse_query
from sizer.service.local import answering, placeholders
request = parse_query({query!r})
answering.prepare(request, "estimate", compiles=False)
from sizer.estimating.estimator import estimate
report = estimate(request)
real = [name for name, one in sys.modules.items() if one is not None and not isinstance(one, placeholders._Placeholder)]
print(report.to_json())
print(sorted({heavy!r} & set(real)))
"""
HEAVY = {
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "scipy.optimize", "numba", "transformers", "timm",
    "peft", "torch.export", "torch.onnx", "torchvision", "torchvision.datasets",
}  # fmt: skip


@pytest.mark.parametrize(
    ("query", "imported"),
    [
        (SMALL, ["torchvision"]),
        (DETECTION, ["torchvision"]),
        (LANGUAGE, ["numba", "transformers"]),
    ],
)
def test_a_question_imports_its_own_source_and_the_report_is_the_same(query, imported):
    report, found = run_python(WHAT_IS_IMPORTED.format(query=query, heavy=HEAVY)).splitlines()
    assert found == str(imported)
    assert json.loads(report) == json.loads(estimate(parse_query(query)).to_json())


def test_a_placeholder_makes_way_for_the_real_module():
    program = """
import sys, importlib.util
from sizer.service.local import placeholders
placeholders.install()
placeholders.install_transformers()
import torch
for name in ("torch._dynamo", "sympy", "scipy.optimize", "torch.export", "transformers.image_utils"):
    assert isinstance(sys.modules[name], placeholders._Placeholder), name
    assert importlib.util.find_spec(name).origin
from transformers.masking_utils import TransformGetItemToIndex
with TransformGetItemToIndex():  # of a file of the package, which alone is loaded
    found = torch.func.vmap(lambda index: torch.arange(4)[index])(torch.tensor([2, 1]))
assert found.tolist() == [2, 1] and isinstance(sys.modules["torch._dynamo"], placeholders._Placeholder)
import torch._dynamo as early
from torch._dynamo import disable
assert disable(len) is len and disable(recursive=False)(len) is len
import torch._dynamo.config as config
assert config is torch._dynamo.config and not isinstance(torch._dynamo, placeholders._Placeholder)
assert early.is_compiling is torch._dynamo.is_compiling
from torch._dynamo.utils import is_compile_supported
assert is_compile_supported("cpu") in (True, False)
import sympy.printing
assert sympy.Integer(2) + 1 == 3 and isinstance(sympy.Integer(1), sympy.Basic)
from scipy.optimize import linear_sum_assignment
assert linear_sum_assignment([[1, 2], [2, 1]])[1].tolist() == [0, 1]
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
assert guard_or_false(True) is True and ShapeEnv.__module__ == "torch.fx.experimental.symbolic_shapes"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
from torch.export.dynamic_shapes import Dim
assert Dim is torch.export.Dim and not isinstance(torch.export, placeholders._Placeholder)
program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
assert program.module()(torch.ones(1, 2)).shape == (1, 2)
import torchvision
assert torchvision.datasets.MNIST.__module__ == "torchvision.datasets.mnist"
from torchvision.datasets.folder import ImageFolder
from transformers.processing_utils import ProcessorMixin, Unpack
from transformers import LlavaProcessor
assert issubclass(LlavaProcessor, ProcessorMixin)
from transformers.image_utils import ChannelDimension, PILImageResampling
from transformers.image_transforms import center_to_corners_format
assert center_to_corners_format(torch.tensor([[2.0, 2, 2, 2]])).tolist() == [[1, 1, 3, 3]]
print("done")
"""
    assert run_python(program) == "done\n"


def test_functions_of_shapes_answer_as_the_real_ones():
    program = """
import torch
from sizer.service.local import placeholders
from torch.fx.experimental import symbolic_shapes as real
assert not isinstance(real, placeholders._Placeholder)
values = [(True,), (False,), (3,), (True, False), (True, True), (2, 2), (2, 3), ([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2])]
compared = 0
for name in placeholders._SHAPE_FUNCTIONS:
    stands_in = placeholders._of_numbers(name, placeholders._SHAPE_FUNCTIONS[name])
    for arguments in values:
        try:
            expected = getattr(real, name)(*arguments)
        except (AssertionError, TypeError, AttributeError):
            continue  # no such question is asked
        assert stands_in(*arguments) == expected, (name, arguments)
        compared += 1
assert compared > 20, compared
print("done")
"""
    assert run_python(program) == "done\n"


ANSWERED = """
from sizer.base.errors import SizerError
from sizer.service.local.answering import answer
from sizer.service.settings import Settings
def run(script, argument=None, **limits):
    settings = Settings(function="tests.service.scripted:run", readable=({tests!r},), tapes={tapes!r}, **limits)
    try:
        query = f"arch=hub:script/{{script}}&dtype=float32&batch=1"
        print(answer("estimate", query, argument, settings, lambda text: None, prepares=False))
    except SizerError as error:
        print(type(error).__name__, error)
"""


def answered(call: str, tapes: Path | str = "") -> str:
    return run_python(ANSWERED.format(tests=TESTS, tapes=str(tapes)) + call)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("run('echo', 'hello')", "hello"),
        ("run('crash')", "the job crashed (SIGABRT)"),
        ("run('leave')", "the job ended without an answer"),
        ("run('hold', wall_seconds=0.5)", "the job was stopped after 0.5 s"),
        ("run('garbage', 'no JSON\\n')", "the job wrote something that is not an answer"),
        ("run('large', '100000', result_bytes=10_000)", "the job wrote more than 10,000 bytes"),
        ("run('fail', 'BuildError')", "BuildError"),
        ("run('fill_and_hold', '300', budget_bytes=100 * 2**20)", "the job was stopped: it held"),
        ("run('write_file', '/tmp/written-by-a-job')", "a job may not open files for writing"),
        ("run('connect', '9')", "a job may not use the network"),
    ],
)
def test_every_end_of_a_child_is_an_answer(call, said):
    assert said in answered(call)


STOPPED = """
from sizer.commands.estimate_worker import _answer
from sizer.service.settings import Settings
settings = Settings(function="tests.service.scripted:found_one_by_one", readable=({tests!r},), tapes="", wall_seconds=3)
message = {{"query": {query!r}, "config_text": None, "form": "csv", "width": None}}
found = _answer(message, settings, lambda message: None)["answer"]
print([line.split(",")[:2] for line in found["text"].splitlines()], found["report"], found["ended"]["kind"])
"""


def test_what_a_job_had_found_is_shown_when_it_is_ended(monkeypatch, capsys):
    said = run_python(STOPPED.format(tests=TESTS, query="arch=torchvision:resnet18&dtype=float32&batch=1,2"))
    assert said == "[['dtype', 'batch'], ['float32', '1'], ['float32', '2']] None TimeLimitError\n"

    ended = {"text": "a report\n", "report": None, "failures": {}, "fits": True, "ended": error_to_wire(TimeLimitError("long"))}
    monkeypatch.setattr("sizer.service.local.asking.ask", lambda *asked: ended)
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    assert main(["estimate", SMALL]) == TimeLimitError.exit_status
    printed = capsys.readouterr()
    assert printed.out == "a report\n"
    assert "SIZER_JOB_SECONDS" in printed.err


def test_a_cell_that_was_kept_is_not_made_again_after_a_crash_of_the_file(tmp_path):
    first, again = (answered("run('cells', '2')", tmp_path) for _ in range(2))
    (path,) = tmp_path.glob("tapes/*")
    path.write_bytes(path.read_bytes()[:-1])  # truncated: the last cell is missing
    third = answered("run('cells', '2')", tmp_path)
    assert [eval(text)["given"] for text in (first, again, third)] == [0, 2, 1]


def test_each_question_of_other_commands_has_a_worker_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("sizer.service.supervisor.Connection", None)  # a job server would fail
    assert main(["peak", SMALL, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    *_, found = peak(parse_query(SMALL))
    assert printed == json.loads(json.dumps(encode(found)))
    assert main(["placement", "arch=hf:gpt2&dtype=float32&batch=1&seq=16&train=adapter&targets=nothere"]) == 2
    assert "nothere" in capsys.readouterr().err


def test_workers_end_with_their_client(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    client = start_worker_client(start_client)
    jobs = [client.submit(SMALL), client.submit(LANGUAGE)]
    jobs[0].cancel()
    client.close()
    for job in jobs:
        with pytest.raises(JobError, match=r"cancelled|closed"):
            job.result()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(_ask)")]
    assert not [*tmp_path.glob("tapes/*")]  # a worker that went on would have kept its trace


def test_a_worker_that_crashes_fails_its_question(monkeypatch):
    monkeypatch.setattr("sizer.service.local.connection.WORKER", "sizer.no_such_program")
    with contextlib.closing(start_worker_client(start_client)) as client, pytest.raises(JobError, match="no_such_program"):
        client.submit(SMALL).result()


def test_a_public_server_has_no_worker(monkeypatch):
    assert answers_alone(start_client)
    assert not answers_alone(lambda: None)
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    assert not answers_alone(start_client)
