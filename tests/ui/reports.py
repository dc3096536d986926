"""Reports for the page's tests: a small network written down as a tape by hand, taken through the real arithmetic. No torch."""

from __future__ import annotations

from array import array
from dataclasses import replace

from sizer.allocator.allocator import describe
from sizer.catalogue.gpu_keys import find_gpu
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.census import Census, DtypeRow, ModuleRow, TensorRow
from sizer.report.column import read_columns
from sizer.report.explanation import Explanation, KernelUse
from sizer.report.peak import PeakReport, find_peak
from sizer.report.report import Report, build_report, default_focus
from sizer.tape.affine import AffineTape
from sizer.tape.family import TapeFamily
from sizer.tape.tape import CATEGORIES, BlockNotes, PhaseOfStep, Tape, Tensor

MIB = 2**20
LAYERS = 8
PARAMETERS = 25_557_032  # ResNet-50's
BUFFERS = 53_120
WIDTH_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "amp-bfloat16": 4, "amp-float16": 4}
SAMPLE_MIB = {"float32": 88, "bfloat16": 44, "float16": 44, "amp-bfloat16": 60, "amp-float16": 60}  # activations
INPUT_BYTES = 3 * 224 * 224

EXPLANATION = Explanation(
    rules="CUDA capability 8.0 in PyTorch 2.15",
    kernels=(
        KernelUse(operator="batch norm", kernel="cuDNN", why="float32, training", dtypes=("float32",), modules=53),
        KernelUse(operator="optimizer", kernel="foreach", why="adamw", dtypes=("float32", "bfloat16"), modules=0),
    ),
    exact=("weights: the tensors themselves",),
    modelled=("workspaces of convolutions: modelled",),
    allocator=describe("cuda"),
)


def report_for(request: Request, *, failures: dict[str, str] | None = None, model: Census | None = None) -> Report:
    """The report on a request; the dtypes in `failures` have no estimates."""
    failures = failures or {}
    tapes = {dtype: TapeFamily(lines=((1, tape(request, dtype)),)) for dtype in request.dtypes if dtype not in failures}
    columns = read_columns(tapes, request.batches, gpu=find_gpu(request.gpu), mode=request.mode)
    first = next(iter(columns.values()), None)
    return build_report(
        query=format_query(request),
        versions={"sizer": "0.1.0", "torch": "2.15.0", "torchvision": "0.29.0", "transformers": "5.23.0"},
        census=model or census(request.name or "config"),
        columns=columns,
        gpu=find_gpu(request.gpu),
        mode=request.mode,
        request={
            "mode": request.mode,
            "dtypes": request.dtypes,
            "batches": request.batches,
            "optimizer": request.optimizer,
            "optimizer_impl": request.optimizer_impl,
            "attention": request.attention,
            "checkpointing": request.checkpointing,
            "train": request.train,
            "adapter": request.adapter,
            "adapter_rank": request.adapter_rank,
        },
        failures=failures,
        cautions=[f"the rules are those of PyTorch {request.torch}"] if request.torch else [],
        target={"torch": request.torch or "2.15"},
        notes=["The loss is cross entropy over 1000 classes."],
        assumptions=["cuBLAS takes its default workspace of 8 MiB."],
        uncounted=["cuDNN may choose a faster convolution with a larger workspace."],
        explanation=EXPLANATION,
        focus=first and default_focus(first.estimates),
    ).focused(request.focus)


def peak_for(request: Request) -> PeakReport:
    """What is alive at the peak of a request's one dtype and batch size; every block is a vector of bytes."""
    (dtype,), (batch,) = request.dtypes, request.batches
    own = TapeFamily(lines=((1, tape(request, dtype)),)).evaluate(batch)
    workspace = CATEGORIES.index("workspace")
    notes = BlockNotes(
        tensors={
            block: Tensor(shape=(size,), dtype="uint8")
            for block, size in enumerate(own.sizes)
            if own.categories[block] != workspace
        },
        ends=[(end, PhaseOfStep(step=2 if phase == "step2" else 1, phase=phase)) for end, phase in own.marks],
    )
    found = find_peak(
        own, notes, find_gpu(request.gpu), query=format_query(request), dtype=dtype, expandable_segments=False
    )
    return replace(found, script="import torch\n")


def tape(request: Request, dtype: str) -> AffineTape:
    """Load, two steps of `LAYERS` equal layers; AdamW's state is made in the first step and kept, gradients stay too."""
    training, width = request.mode == "training", WIDTH_BYTES[dtype]
    script = _Script()
    for layer in range(LAYERS):
        script.allocate("parameter", PARAMETERS // LAYERS * width, 0, "Module.to", f"layer{layer}")
    script.allocate("buffer", BUFFERS * 4, 0, "Module.to", "")
    script.mark("load")
    activation = SAMPLE_MIB[dtype] * MIB // LAYERS
    gradients, states = [], []
    for step in (1, 2):
        taken = [script.allocate("input", 0, INPUT_BYTES * width, "Tensor.to", "")]
        for layer in range(LAYERS):
            taken.append(script.allocate("activation", 0, activation, "aten.convolution.default", f"layer{layer}"))
            script.release(script.allocate("workspace", 8 * MIB, 0, "aten.convolution.default", f"layer{layer}"))
            if not training:
                script.release(taken.pop(-2))
        script.mark("forward" if step == 1 else None)
        for layer in reversed(range(LAYERS if training else 0)):
            temporary = script.allocate(
                "temporary", 0, activation, "aten.convolution_backward.default", f"layer{layer}"
            )
            if step == 1:
                gradient = PARAMETERS // LAYERS * width
                gradients.append(
                    script.allocate("gradient", gradient, 0, "aten.convolution_backward.default", f"layer{layer}")
                )
            script.release(taken.pop())
            script.release(temporary)
        script.mark("backward" if step == 1 and training else None)
        if training and step == 1 and request.optimizer == "adamw":
            for layer in range(LAYERS):
                state = 2 * PARAMETERS // LAYERS * width
                states.append(script.allocate("optimizer state", state, 0, "aten._foreach_add.List", f"layer{layer}"))
        script.mark("optimizer" if step == 1 and training else None)
        for block in taken:
            script.release(block)
    script.mark("step2")
    return script.tape()


def census(name: str, class_name: str = "ResNet") -> Census:
    """A model with three modules that hold tensors, and one tensor that is not registered."""
    rows = (("conv1", "Conv2d", 9_408), ("layer1.0.conv3", "Conv2d", 16_384), ("fc", "Linear", 2_049_000))
    mask = TensorRow(name="mask", shape=(16, 16), dtype="float32", device="meta", bytes=1024, why="a plain attribute")
    return Census(
        name=name,
        class_name=class_name,
        parameters=PARAMETERS,
        trainable_parameters=PARAMETERS,
        buffers=BUFFERS,
        parameter_bytes=PARAMETERS * 4,
        buffer_bytes=BUFFERS * 4,
        by_dtype=(DtypeRow(dtype="float32", parameters=PARAMETERS, buffers=BUFFERS, bytes=(PARAMETERS + BUFFERS) * 4),),
        unregistered_tensors=(mask,),
        modules=tuple(
            ModuleRow(
                path=path,
                class_name=kind,
                parameters=count,
                trainable_parameters=count,
                buffers=0,
                parameter_bytes=4 * count,
                buffer_bytes=0,
            )
            for path, kind, count in rows
        ),
    )


class _Script:
    """Writes a tape down, event by event."""

    def __init__(self) -> None:
        self._order, self._constant, self._per_item = array("q"), array("q"), array("q")
        self._categories, self._places, self._marks = bytearray(), [], []

    def allocate(self, category: str, constant: int, per_item: int, op: str, module: str) -> int:
        block = len(self._constant)
        self._order.append(block)
        self._constant.append(constant)
        self._per_item.append(per_item)
        self._categories.append(CATEGORIES.index(category))
        self._places.append((op, module))
        return block

    def release(self, block: int) -> None:
        self._order.append(~block)

    def mark(self, phase: str | None) -> None:
        if phase is not None:
            self._marks.append((len(self._order), phase))

    def tape(self) -> AffineTape:
        ops, modules = (tuple(dict.fromkeys(names)) for names in zip(*self._places, strict=True))
        tape = Tape(
            batch=2,
            order=self._order,
            sizes=array("q", [a + 2 * b for a, b in zip(self._constant, self._per_item, strict=True)]),
            categories=bytes(self._categories),
            ops=array("l", [ops.index(op) for op, _ in self._places]),
            modules=array("l", [modules.index(module) for _, module in self._places]),
            op_names=ops,
            module_names=modules,
            marks=tuple(self._marks),
        )
        return AffineTape(fitted_at=(2, 3), tape=tape, constant=self._constant, per_item=self._per_item)
