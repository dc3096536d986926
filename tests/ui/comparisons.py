"""Comparisons for the pages' tests: the small network of `reports`, measured by hand on devices that nobody has."""

from __future__ import annotations

from dataclasses import replace

from sizer.device.comparison.comparison import Comparison, Level
from sizer.device.comparison.counterpart import gpu_of
from sizer.device.comparison.divergence import Divergence, Scratch
from sizer.device.comparison.row import Row
from sizer.device.record.measurement import (
    COUNTED,
    PROFILED,
    DeviceFacts,
    DeviceOutOfMemory,
    Measurement,
    PhaseReading,
    Spread,
    TensorBytes,
    Timing,
    Transfer,
)
from sizer.device.record.recording import Measured
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from tests.ui.reports import MIB, report_for

GIB = 2**30
CPU = DeviceFacts(device="cpu", name="A processor", total_bytes=16 * GIB, free_bytes=12 * GIB)
CUDA = DeviceFacts(
    device="cuda:0",
    name="NVIDIA A100-SXM4-80GB",
    total_bytes=80 * GIB,
    free_bytes=79 * GIB,
    capability=(8, 0),
    versions={"driver": "570.1", "cuda": "12.8"},
)
CELL = Request(source="torchvision", name="resnet18", dtypes=("float32",), batches=(2,))
VERSIONS = {"sizer": "0.1.0", "torch": "2.15.0", "torchvision": "0.29.0", "transformers": "5.23.0"}
DIVERGENCE = Divergence(
    kind="missing",
    phase="forward",
    op="aten.convolution.default",
    module="layer1",
    device_op="aten::mkldnn_convolution",
    device_module="layer1",
    estimated_bytes=0,
    measured_bytes=3 * MIB,
    most_bytes=3 * MIB,
    times=4,
    estimated_level_bytes=100 * MIB,
    measured_level_bytes=103 * MIB,
)
SCRATCH = Scratch(
    op="aten::mkldnn_convolution", module="layer1", phase="forward", most_bytes=3 * MIB, estimated_bytes=0, times=4
)


def measured_on(
    facts: DeviceFacts, cell: Request = CELL, *, more_bytes: int = 0, at: str = "2026-11-21T10:00:00Z"
) -> Measured:
    """A measurement whose peaks are `more_bytes` above the estimate's and whose every other figure is equal to it."""
    request = replace(cell, gpu=gpu_of(facts).key)
    estimate = report_for(request).estimates[0]
    on_cuda = facts.kind == "cuda"
    phases = tuple(
        PhaseReading(
            phase=use.phase,
            allocated_bytes=use.allocated_bytes,
            peak_allocated_bytes=use.peak_allocated_bytes + more_bytes,
            reserved_bytes=use.reserved_bytes if on_cuda else None,
            peak_reserved_bytes=use.reserved_bytes if on_cuda else None,
            driver_bytes=estimate.process_bytes if on_cuda else None,
        )
        for use in estimate.phases
    )
    spread = Spread(median_seconds=0.0125, low_seconds=0.012, high_seconds=0.014, runs=10)
    issued = Spread(median_seconds=0.0004, low_seconds=0.0003, high_seconds=0.0005, runs=10)
    transfer = Transfer(pinned=True, non_blocking=True, bytes=2 * 150_528 * 4, issued=issued, done=spread)
    measurement = Measurement(
        query=format_query(request, complete=True),
        dtype=estimate.dtype,
        batch=estimate.batch,
        device=facts,
        versions=VERSIONS,
        measured_at=at,
        source=COUNTED if on_cuda else PROFILED,
        phases=phases,
        tensors=TensorBytes(weights_bytes=estimate.weights_bytes, gradients_bytes=estimate.gradients_bytes),
        retries=0 if on_cuda else None,
        timing=Timing(
            clock="CUDA events" if on_cuda else "a clock",
            warm_up=3,
            step=spread,
            unsynchronized=issued,
            transfers=(transfer,) if on_cuda else (),
        ),
    )
    return Measured(measurement=measurement)


def comparison_of(measured: Measured, *, architecture: str = "resnet18", recorded: bool = True) -> Comparison:
    """The comparison of a measurement of `measured_on`: peaks within 5 percent hold, weights must be exact."""
    measurement = measured.measurement
    request = parse_query(measurement.query)
    report = report_for(request)
    estimate = report.estimates[0]
    rows = [
        Row(
            quantity="peak_allocated_bytes",
            estimated_bytes=estimate.peak_allocated_bytes,
            measured_bytes=measurement.peak_allocated_bytes,
            tolerance=0.05,
        ),
        Row(
            quantity="weights_bytes",
            estimated_bytes=estimate.weights_bytes,
            measured_bytes=measurement.tensors.weights_bytes,
            tolerance=0.0,
        ),
    ]
    if measurement.process_bytes is not None:
        rows += [
            Row(
                quantity="peak_reserved_bytes",
                estimated_bytes=estimate.peak_reserved_bytes,
                measured_bytes=measurement.peak_reserved_bytes,
                tolerance=0.12,
            ),
            Row(
                quantity="process_bytes",
                estimated_bytes=estimate.process_bytes,
                measured_bytes=measurement.process_bytes,
                tolerance=0.08,
            ),
        ]
    for use, reading in zip(estimate.phases, measurement.phases, strict=False):
        for name, tolerance in (("allocated_bytes", 0.0), ("peak_allocated_bytes", None)):
            rows.append(
                Row(
                    quantity=f"phases.{use.phase}.{name}",
                    phase=use.phase,
                    estimated_bytes=getattr(use, name),
                    measured_bytes=getattr(reading, name),
                    tolerance=tolerance,
                )
            )
    curve = tuple(
        Level(at=float(number), phase=use.phase, allocated_bytes=use.allocated_bytes)
        for number, use in enumerate(estimate.phases, 1)
    )
    wrong = tuple(f"{row.quantity} is off by {row.difference_bytes} bytes" for row in rows if row.holds is False)
    return Comparison(
        architecture=architecture,
        class_name="ResNet",
        family="CNN",
        mode=request.mode,
        versions=VERSIONS,
        gpu=gpu_of(measurement.device),
        estimate=estimate,
        measurement=measurement,
        rows=tuple(rows),
        first_divergence=DIVERGENCE if recorded and wrong else None,
        scratch=(SCRATCH,) if recorded and wrong else (),
        estimated_curve=curve,
        measured_curve=curve if recorded else (),
        verdict="the peak holds" if not wrong else "the peak does not hold",
        wrong=wrong,
        notes=("The process is not compared on a CPU.",),
    )


def out_of_memory(comparison: Comparison, message: str = "CUDA out of memory.") -> Comparison:
    """The same work, ended in its backward pass because nothing was left."""
    measurement = comparison.measurement
    ended = DeviceOutOfMemory(
        phase="backward",
        requested_bytes=2 * GIB,
        free_bytes=GIB,
        allocated_bytes=70 * GIB,
        reserved_bytes=72 * GIB,
        message=message,
    )
    measurement = replace(measurement, phases=measurement.phases[:2], out_of_memory=ended, timing=None)
    rows = tuple(row for row in comparison.rows if row.phase in ("load", "forward"))
    wrong = ("The estimate said that it fits, the device ran out of memory.",)
    return replace(comparison, measurement=measurement, rows=rows, wrong=wrong)
