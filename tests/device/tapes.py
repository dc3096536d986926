"""Tapes of both sides for tests, and a measurement that was read off a device's recording."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import live_by_category, running_bytes
from sizer.catalogue.gpus import Gpu
from sizer.device.record.measurement import COUNTED, PROFILED, DeviceFacts, Measurement, PhaseReading, TensorBytes
from sizer.device.record.recording import Measured
from sizer.report.census import Census
from sizer.report.column import read_columns
from sizer.report.report import Report, build_report
from sizer.tape.family import TapeFamily
from sizer.tape.tape import CATEGORIES, Tape
from tests.report.reports import CENSUS

GIB = 2**30
CPU = DeviceFacts(device="cpu", name="A processor", total_bytes=16 * GIB)
CUDA = DeviceFacts(device="cuda:0", name="NVIDIA H200", total_bytes=143_156 * 2**20, capability=(9, 0))
VERSIONS = {"torch": "2.15.0", "torchvision": "0.29.0", "transformers": "5.23.0"}
QUERY = "arch=torchvision:resnet18&dtype=float32&batch=2"

# ("+", name, bytes, operator, module[, category]) allocates, "-name" releases, "=phase" ends a phase.
Step = tuple | str


def tape_of(steps: Sequence[Step], *, batch: int = 2) -> Tape:
    """A tape written as one says it; the category is "temporary" where none is given."""
    blocks: dict[str, int] = {}
    order, sizes, categories = array("q"), array("q"), bytearray()
    ops, modules, marks = array("l"), array("l"), []
    op_names: dict[str, int] = {}
    module_names: dict[str, int] = {}
    for step in steps:
        if isinstance(step, str) and step.startswith("="):
            marks.append((len(order), step[1:]))
        elif isinstance(step, str):
            order.append(~blocks[step[1:]])
        else:
            _, name, size, op, module, category = (*step, "temporary")[:6]
            blocks[name] = len(sizes)
            order.append(len(sizes))
            sizes.append(size)
            categories.append(CATEGORIES.index(category))
            ops.append(op_names.setdefault(op, len(op_names)))
            modules.append(module_names.setdefault(module, len(module_names)))
    return Tape(
        batch=batch,
        order=order,
        sizes=sizes,
        categories=bytes(categories),
        ops=ops,
        modules=modules,
        op_names=tuple(op_names),
        module_names=tuple(module_names),
        marks=tuple(marks),
    ).validate()


def training(*, forward: Sequence[Step] = (), backward: Sequence[Step] = (), sides: str = "estimate") -> list[Step]:
    """Two layers trained in one step; `forward` and `backward` are put in before the second layer works there.

    1,000,000 bytes of weights in two tensors, 4,000 of input, 20,000 of activations in two, gradients like the weights, twice
    the weights of optimizer state. On the device operators have the profiler's names.
    """
    mm, back = (
        ("aten.mm.default", "aten.mm_backward.default") if sides == "estimate" else ("aten::mm", "aten::mm_backward")
    )
    return [
        ("+", "w1", 400_000, "Module.to", "one", "parameter"),
        ("+", "w2", 600_000, "Module.to", "two", "parameter"),
        "=load",
        ("+", "x", 4_000, "Tensor.to", "", "input"),
        ("+", "a1", 8_000, mm, "one", "activation"),
        *forward,
        ("+", "a2", 12_000, mm, "two", "activation"),
        "=forward",
        *backward,
        ("+", "g2", 600_000, back, "two", "gradient"),
        "-a2",
        ("+", "g1", 400_000, back, "one", "gradient"),
        "-a1",
        "=backward",
        ("+", "s2", 1_200_000, "aten.zeros_like.default", "", "optimizer state"),
        ("+", "s1", 800_000, "aten.zeros_like.default", "", "optimizer state"),
        "=optimizer",
        "-g1",
        "-g2",
        "=step2",
    ]


def report_of(
    tape: Tape, gpu: Gpu, *, query: str = QUERY, dtype: str = "float32", census: Census = CENSUS, **changes
) -> Report:
    """The report of one tape on a device."""
    arguments = {"versions": {"sizer": "0.1.0", **VERSIONS}, "mode": "training"} | changes
    columns = read_columns({dtype: TapeFamily(exact=(tape,))}, [2], gpu=gpu, mode=arguments["mode"])
    return build_report(query=query, census=census, columns=columns, gpu=gpu, **arguments)


def measured_from(recording: Tape, facts: DeviceFacts = CPU, *, query: str = QUERY, **changes) -> Measured:
    """What a device would have told that did just what its recording says; any field of the measurement can be changed."""
    kind = facts.kind
    placed = replay_events(recording, kind)
    reserved = placed.reserved.tolist()
    levels = running_bytes(recording.order, placed.block_bytes)
    live = live_by_category(recording)
    ends = [0, *(end for end, _ in recording.marks)]
    on_cuda = kind == "cuda"
    phases = tuple(
        PhaseReading(
            phase=phase,
            allocated_bytes=levels[end],
            peak_allocated_bytes=max(levels[begin : end + 1]),
            reserved_bytes=reserved[end - 1] if on_cuda else None,
            peak_reserved_bytes=max(reserved[begin:end], default=0) if on_cuda else None,
            driver_bytes=reserved[end - 1] + 697 * 2**20 if on_cuda else None,
        )
        for (begin, end), (_, phase) in zip(pairwise(ends), recording.marks, strict=True)
    )
    tensors = TensorBytes(
        weights_bytes=live["load"]["parameter"] if "load" in live else None,
        buffers_bytes=live["load"]["buffer"] if "load" in live else None,
        gradients_bytes=live["backward"]["gradient"] if "backward" in live else None,
        optimizer_bytes=live["optimizer"]["optimizer state"] if "optimizer" in live else None,
        inputs_bytes=live["forward"]["input"] if "forward" in live else None,
        activations_bytes=live["forward"]["activation"] if "forward" in live and not on_cuda else None,
    )
    values = {
        "query": query,
        "dtype": "float32",
        "batch": 2,
        "device": facts,
        "versions": VERSIONS,
        "measured_at": "2026-11-21T10:00:00+00:00",
        "source": COUNTED if on_cuda else PROFILED,
        "phases": phases,
        "tensors": tensors,
        "retries": 0 if on_cuda else None,
    }
    return Measured(measurement=Measurement(**(values | changes)), recording=recording)
