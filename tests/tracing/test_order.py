"""The same question has one answer, whatever the process was asked before."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sizer.tracing.meta.imports import untraced_imports
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import repeatable
from tests.tracing.estimates import QUESTIONS

ROOT = Path(__file__).parent.parent.parent
NAMES = tuple(QUESTIONS)

# As torch.fx.wrap did up to PyTorch 2.11: a frame that holds itself, and so every frame below it.
KEEPS_ITS_FRAME = """
import inspect
import torch
def keep():
    frame = inspect.currentframe()
keep()
constant = torch.ones(2)
"""


SOME = NAMES[:4]
ORDERS = [
    (SOME, (SOME[::-1],)),
    # Some alone, too; of the first the first order asked a fresh process.
    pytest.param(NAMES, (NAMES[::-1], *((name,) for name in NAMES[1::4])), marks=pytest.mark.exhaustive),
]


def answers(orders: tuple[tuple[str, ...], ...]) -> list[dict[str, dict]]:
    """The answers to each order, of a process that was asked nothing before."""
    command = [sys.executable, "-m", "tests.tracing.estimates", *map(",".join, orders)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("names", "orders"), ORDERS, ids=["some", "all"])
def test_the_order_of_questions_does_not_matter(names: tuple[str, ...], orders: tuple[tuple[str, ...], ...]) -> None:
    first, *others = answers((names, *orders))
    for order, answer in zip(orders, others, strict=True):
        assert answer == {name: first[name] for name in order}, order


@pytest.fixture
def lazy_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that nobody has imported yet and that does what PyTorch's did."""
    name = "sizer_lazy_module"
    (tmp_path / f"{name}.py").write_text(KEEPS_ITS_FRAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    gc.unfreeze()  # as in a process of its own, whose import freezes and thaws
    gc.disable()  # as in a trace
    yield name
    gc.enable()
    sys.modules.pop(name, None)


def _imports_beside_a_tensor(name: str) -> weakref.ref:
    tensor = torch.empty(3, device="meta")
    alive = weakref.ref(tensor)
    __import__(name)
    return alive


def test_an_import_keeps_no_tensor_of_the_step(lazy_module: str) -> None:
    with untraced_imports():
        assert _imports_beside_a_tensor(lazy_module)() is None


def test_without_care_an_import_keeps_the_tensors_of_the_step(lazy_module: str) -> None:
    assert _imports_beside_a_tensor(lazy_module)() is not None


def test_tensors_that_a_module_makes_are_no_part_of_the_step(lazy_module: str, recorder: Recorder) -> None:
    with untraced_imports(), recorder, torch.inference_mode(), torch.device("meta"):
        module = __import__(lazy_module)
    assert (module.constant.device.type, module.constant.is_inference()) == ("cpu", False)
    assert recorder.log.order == []


def test_garbage_of_the_step_itself_is_left_alone(lazy_module: str) -> None:
    tensor = torch.empty(3, device="meta")
    alive = weakref.ref(tensor)
    cycle = [tensor]
    cycle.append(cycle)
    del tensor, cycle
    with untraced_imports():
        __import__(lazy_module)
        assert alive() is not None
    assert gc.get_freeze_count() == 0


def test_a_module_keeps_its_own_loader(lazy_module: str) -> None:
    finders = [*sys.meta_path]
    with untraced_imports():
        module = __import__(lazy_module)
    assert module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    "draw", [np.random.random, random.random, lambda: float(torch.rand(()))], ids=["numpy", "random", "torch"]
)
def test_random_numbers_are_the_same_in_every_trace(draw: Callable[[], float]) -> None:
    # transformers masks speech with NumPy's numbers, drops layers with PyTorch's and Python's
    before = np.random.get_state()[1].tolist()
    drawn = []
    for _ in range(2):
        with repeatable():
            drawn.append([draw(), draw()])
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]
    assert np.random.get_state()[1].tolist() == before
