"""A small report made from tapes by hand, for tests."""

from __future__ import annotations

from sizer.catalogue.gpus import GPUS
from sizer.report.census import Census, DtypeRow, ModuleRow, TensorRow
from sizer.report.column import read_columns
from sizer.report.report import Report, build_report
from sizer.tape.affine import fit_affine
from sizer.tape.family import TapeFamily
from tests.tape.tapes import make_tape

MIB = 2**20

CENSUS = Census(
    name="tiny",
    class_name="Tiny",
    parameters=250,
    trainable_parameters=200,
    buffers=3,
    parameter_bytes=1000,
    buffer_bytes=24,
    by_dtype=(DtypeRow(dtype="float32", parameters=250, buffers=0, bytes=1000),),
    tied_parameters=(("head.weight", "embedding.weight"),),
    unregistered_tensors=(
        TensorRow(name="rope.table", shape=(2, 3), dtype="float32", device="cpu", bytes=24, why="plain attribute"),
    ),
    modules=(
        ModuleRow(
            path="", class_name="Tiny", parameters=0, trainable_parameters=0, buffers=3, parameter_bytes=0, buffer_bytes=24
        ),
        ModuleRow(
            path="head", class_name="Linear", parameters=250, trainable_parameters=200, buffers=0, parameter_bytes=1000,
            buffer_bytes=0,
        ),
    ),
)  # fmt: skip


def step(batch: int, *, scale: int = 1, stand_ins: tuple[str, ...] = ()):
    """A training step: 1000 bytes of weights and 24 of buffers, 100 a sample of input, 300 of activations; AdamW's state."""
    return make_tape(
        [
            ("weight", 1000 * scale, "parameter"),
            ("buffer", 24, "buffer"),  # load: 2 events
            ("input", 100 * batch * scale, "input"),
            ("relu", 300 * batch * scale),
            ("workspace", 8 * MIB, "workspace"),
            ("loss", 4),  # forward: 6
            ("grad", 1000 * scale, "gradient"),
            "-relu",
            "-loss",  # backward: 9
            ("state", 2000 * scale, "optimizer state"),
            ("scratch", 500 * scale, "temporary"),
            "-scratch",  # optimizer: 12
            "-input",
            "-grad",  # step2: 14
        ],
        batch=batch,
        marks=[(2, "load"), (6, "forward"), (9, "backward"), (12, "optimizer"), (14, "step2")],
        stand_ins=stand_ins,
    )


def family(*, scale: int = 1, stand_ins: tuple[str, ...] = ()) -> TapeFamily:
    line = fit_affine(step(2, scale=scale, stand_ins=stand_ins), step(3, scale=scale, stand_ins=stand_ins))
    return TapeFamily(lines=((1, line),))


def make_report(**changes) -> Report:
    """The report of float32 and bfloat16 at batches 4 and 16 on a T4, with any of their arguments changed."""
    arguments = {
        "query": "arch=torchvision:tiny",
        "versions": {"sizer": "0.1.0", "torch": "2.15.0"},
        "census": CENSUS,
        "tapes": {"float32": family(), "bfloat16": family(stand_ins=("balanced routing",))},
        "batches": [4, 16],
        "oracle": None,
        "gpu": GPUS["t4"],
        "mode": "training",
        "request": {"optimizer": "adamw", "image_size": [224, 224], "checkpointing": False},
        "failures": {"float16": "aten.foo has no meta kernel"},
        "notes": ["traced at 2 and 3"],
        "assumptions": ["flash attention"],
        "uncounted": ["NCCL"],
    }
    arguments |= changes
    tapes, batches, oracle = (arguments.pop(name) for name in ("tapes", "batches", "oracle"))
    columns = read_columns(tapes, batches, gpu=arguments["gpu"], mode=arguments["mode"], oracle=oracle)
    return build_report(columns=columns, **arguments)
