"""What the estimate reaches against the measurements of the CPU. A change that is worse fails; a better one moves a number.

They are exact truth, since torch.profiler sees every allocation: the estimate is held to single bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from sizer.catalogue.modes import MODES
from sizer.device.comparison.row import Row
from sizer.device.ledger.ledger import Ledger
from sizer.device.record.recording import Measured, read_measured
from sizer.tracing.cpu import bitsandbytes, processor
from tests.benchmarks.bench_accuracy import (
    Held,
    changes,
    error_table,
    farthest_phase,
    find_measured,
    hold,
    ranges_of,
    statistics_of,
)

MEASURED = Path(__file__).parents[2] / "measured"
CPU = next(iter(sorted(MEASURED.glob("cpu-*"))))
CASES = [case.name for case in read_measured(CPU)]

# With other versions than those that were measured with, the models' own code may differ: a fraction of what was measured.
OTHER_VERSIONS = 0.001
# The worst signed error of the peak, as a fraction, and the median without signs.
WORST_PEAK, MEDIAN_PEAK = 0.0005, 0.00001


@pytest.fixture(autouse=True, scope="module")
def _as_on_the_measured_processor() -> Iterator[None]:
    """One thread, and the kernels of oneDNN and bitsandbytes for AVX-512, whatever the processor of this computer has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "floats_per_register", lambda: 16)
        patch.setattr(processor, "multiplies_bfloat16", lambda: True)
        patch.setattr(processor, "onednn_takes", lambda dtype: dtype in (torch.bfloat16, torch.float16))
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        bitsandbytes._kernels.cache_clear()
        yield
    bitsandbytes._kernels.cache_clear()
    torch.set_num_threads(threads)


@cache
def measured() -> dict[str, Measured]:
    return {name.rpartition("/")[2]: found for name, found in find_measured([CPU])}


@cache
def held(name: str) -> Held:
    return hold(name, measured()[name])


def slack(name: str, row: Row) -> int:
    """Bytes that other versions than the measured ones may make."""
    measured_with = measured()[name].measurement.versions
    same = all(measured_with[package] == version(package) for package in ("torch", "torchvision", "transformers"))
    return 0 if same else int(OTHER_VERSIONS * row.measured_bytes)


def test_at_least_six_real_models_were_measured():
    assert len(CASES) >= 6
    assert all(found.measurement.failure is None for found in measured().values())


@pytest.mark.parametrize("name", CASES)
def test_every_phase_ends_with_the_bytes_that_were_measured(name: str):
    comparison = held(name).comparison
    rows = [row for row in comparison.rows if row.quantity.endswith(".allocated_bytes")]
    assert {row.phase for row in rows} == set(MODES[comparison.mode].phases)
    off = {row.phase: abs(row.difference_bytes) - row.allowance_bytes - slack(name, row) for row in rows}
    assert max(off.values()) <= 0, off  # beside the Python numbers that autograd saved


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_counted_exactly(name: str):
    exact = ("weights_bytes", "buffers_bytes", "inputs_bytes", "gradients_bytes", "optimizer_bytes")
    rows = [row for row in held(name).comparison.rows if row.quantity in exact]
    assert len(rows) >= 3
    assert {row.quantity: row.difference_bytes for row in rows if row.difference_bytes} == {}


def test_peaks():
    rows = [row for row in statistics_of([held(name) for name in CASES]) if row.quantity == "peak_allocated_bytes"]
    assert {row.family for row in rows} == {"transformer", "CNN"}
    assert sum(row.count for row in rows) == len(CASES)
    other = any(slack(name, held(name).comparison.rows[0]) for name in CASES) * OTHER_VERSIONS
    assert max(abs(row.worst) for row in rows) <= WORST_PEAK + other
    assert max(row.median_size for row in rows) <= MEDIAN_PEAK + other


def test_the_farthest_phase_is_named():
    row = farthest_phase(held("resnet18-b2-float32").comparison)
    # the one that differs most holds two Python numbers more: an 8-byte tensor, and 4 in the dtype of the computation
    assert row is not None
    assert abs(row.difference_bytes) <= 16


# ------------------------------------------------------------------------------------------------------- the benchmark


def with_process(low: int, high: int, read: int) -> Held:
    """A comparison of a device whose driver says what the process holds."""
    whole = held("resnet18-b2-float32").comparison
    row = Row(quantity="process_bytes", estimated_bytes=100, measured_bytes=read, tolerance=0.08)
    estimate = replace(whole.estimate, process_low_bytes=low, process_high_bytes=high)
    return Held(name="case", comparison=replace(whole, rows=(*whole.rows, row), estimate=estimate))


def test_ranges_of_the_process():
    # held: 90 <= 100 <= 110, half as wide as 10 of 100; not held: 130 > 110, 10 of 130
    (ranges,) = ranges_of([with_process(90, 110, 100), with_process(90, 110, 130)])
    assert (ranges.family, ranges.count, ranges.coverage) == ("CNN", 2, 0.5)
    assert ranges.median_half_width == pytest.approx((10 / 100 + 10 / 130) / 2)
    assert ranges.widest_half_width == pytest.approx(0.1)


def test_the_cpu_has_no_range_of_the_process():
    assert ranges_of([held("resnet18-b2-float32")]) == ()


def test_what_a_change_did_is_said():
    # 100 estimated for 125 measured: 20 % too low; it was 10 % too high, then 30 % too low
    case = with_process(90, 110, 125)
    assert case.errors["process_bytes"] == pytest.approx(-0.2)
    worse, better = ({"case": {"process_bytes": before}} for before in (0.1, -0.3))
    assert list(changes([case], worse)) == ["WORSE: case process_bytes: +10.00% -> -20.00%"]
    assert list(changes([case], better)) == ["better: case process_bytes: -30.00% -> -20.00%"]
    header, row, *_ = [line.split() for line in error_table([case], better) if line.startswith(("quantity", "process"))]
    assert header[-4:] == ["median", "before", "worst", "before"]
    assert row[-5:] == ["20.00%", "-20.00%", "-20.00%", "30.00%", "-30.00%"]


def test_a_ledger_is_a_source_too(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    comparison = held("resnet18-b2-float32").comparison
    number = ledger.add(comparison)
    (found,) = find_measured([tmp_path / "ledger.sqlite3"])
    assert found == (f"ledger.sqlite3/{number}", Measured(measurement=comparison.measurement))
