"""Levers: what would make the work smaller, each answered by the estimate of the question that it makes.

Nothing here is a rule of thumb: what a lever saves is the difference of two estimates, and the smallest set of levers that makes
the work fit is one whose own trace fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.decision.cells import CANNOT, Cells, checked, one_cell, why
from sizer.errors import RequestError
from sizer.memory.decision import LeverReport, LeverRow, LeverSet
from sizer.memory.estimate import Estimate
from sizer.request import Request, format_query
from sizer.tracer import Counted, Kept, Progress
from sizer.units import counted, format_bytes
from sizer.versions import allocator_variable, installed_version, parse_version

TRIED_WHOLE = 2  # up to so many levers at once every set is tried; beyond, levers are taken away from all of them

Change = Callable[[Request, Counted], Request | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One thing to change. `change` makes the question with it, None where it does not apply or has been done already.

    `group`: of several with the same one only one can be pulled. `price` orders them: 1 costs nothing, 2 time, 3 precision, 4 what
    an optimizer does, 5 another task. `cost` says it in words; `code` are the lines of PyTorch that do it.
    """

    key: str
    group: str
    price: int
    title: Callable[[Request], str]
    cost: Callable[[Counted], str]
    code: Callable[[Request], str]
    change: Change


def levers(
    request: Request,
    *,
    config: dict | None = None,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Iterator[LeverReport]:
    """What each lever saves for the one dtype and batch size of a request, and the smallest set that makes it fit; it grows.

    Raises RequestError for a request of several, and what an estimate raises where the work itself has none.
    """
    request = one_cell(request)
    cells = Cells(request, config=config, kept=kept, progress=progress)
    report_progress = progress or (lambda text: None)
    base = cells.estimate(request)
    known = cells.counted(request)
    offered = [(lever, changed) for lever in LEVERS if (changed := _changed(lever, request, known))]
    report = LeverReport(
        query=format_query(request, complete=True),
        base=cells.cell(request),
        useless=tuple(_useless(request, base)),
        pending=tuple(lever.key for lever, _ in offered),
    )
    yield report
    for number, (lever, changed) in enumerate(offered, 1):
        report_progress(f"{lever.title(changed)}, {number} of {len(offered)}")
        row = _row(lever, changed, cells, request)
        report = replace(report, rows=(*report.rows, row), pending=report.pending[1:])
        yield report
    if base.fits is True:
        yield replace(report, search="It fits as it is.")
        return
    yield from _search(report, [lever for lever, _ in offered], request, cells, report_progress)


def _row(lever: Lever, changed: Request, cells: Cells, request: Request) -> LeverRow:
    try:
        if lever.key == "batch":
            changed = _largest_fitting(changed, cells, below=request.batches[0])
        cell, reason = cells.cell(changed), ""
    except CANNOT as error:
        cell, reason = None, why(error)
    return LeverRow(
        key=lever.key,
        title=lever.title(changed),
        cost=lever.cost(cells.counted(request)),
        code=lever.code(changed),
        query=format_query(changed),
        cell=cell,
        reason=reason,
    )


def _changed(lever: Lever, request: Request, known: Counted) -> Request | None:
    """The question with a lever pulled; None where it does not apply."""
    changed = lever.change(request, known)
    if changed is None or changed == request:
        return None
    try:
        return checked(changed)
    except RequestError:  # a key that this source, device or optimizer does not take
        return None


def _largest_fitting(request: Request, cells: Cells, *, below: int) -> Request:
    """The question at the largest batch size that fits and is smaller than `below`; at the model's smallest where none is known."""
    try:
        found = cells.largest_batch(request).batch or 0
    except CANNOT:  # work that is not affine in the batch
        found = 0
    return replace(request, batches=(max(min(found, below - 1), cells.counted(request).smallest),))


# ------------------------------------------------------------------------------------------------------ the smallest set


def _search(
    report: LeverReport, offered: list[Lever], request: Request, cells: Cells, progress: Progress
) -> Iterator[LeverReport]:
    """Looks for the fewest levers that make the work fit for sure; of equal numbers those of the lowest price.

    Sets of one and two are all tried. For more, levers are taken away, the dearest first, from all of them as long as it fits.
    """
    able = {row.key for row in report.rows if row.cell is not None}
    useful = [lever for lever in offered if lever.key in able and lever.key != "inference"]

    def fitting(chosen: Iterable[Lever]) -> LeverSet | None:
        question = _together(chosen, request, cells)
        if question is None:
            return None
        try:
            if cells.fits(question) is not True:
                return None
            if any(lever.key == "batch" for lever in chosen):
                question = _largest_fitting(question, cells, below=request.batches[0])
            return LeverSet(
                keys=tuple(lever.key for lever in chosen), query=format_query(question), cell=cells.cell(question)
            )
        except CANNOT:
            return None

    progress("looking for what makes it fit")
    fits_alone = {row.key for row in report.rows if row.cell is not None and row.cell.fits is True}
    alone = fits_alone.intersection(lever.key for lever in useful)
    whole = _everything(useful)
    everything = None if alone else fitting(whole)
    if not alone and everything is None:
        yield replace(report, search=_nothing_fits(whole, request, cells))
        return
    tried = 0
    for size in range(1, TRIED_WHOLE + 1):
        for chosen in sorted(_sets(useful, size), key=lambda levers: sum(lever.price for lever in levers)):
            tried += 1
            progress(f"trying {' and '.join(lever.key for lever in chosen)}")
            if (size > 1 or chosen[0].key in alone) and (found := fitting(chosen)) is not None:
                yield replace(
                    report,
                    smallest=found,
                    search=f"The fewest changes that do, the first of {counted(tried, 'set')} tried that fits.",
                )
                return
    best, kept = everything, list(whole)
    for lever in sorted(whole, key=lambda lever: -lever.price):
        fewer = [one for one in kept if one is not lever]
        progress(f"trying without {lever.key}")
        if (found := fitting(fewer)) is not None:
            best, kept = found, fewer
    yield replace(
        report,
        smallest=best,
        search=f"No two changes are enough; without any one of these {len(kept)} it does not fit.",
    )


def _sets(offered: list[Lever], size: int) -> Iterator[tuple[Lever, ...]]:
    """All sets of levers that can be pulled together."""
    for chosen in combinations(offered, size):
        if len({lever.group for lever in chosen}) == size:
            yield chosen


def _everything(offered: list[Lever]) -> list[Lever]:
    """One lever of each group, the one that goes furthest."""
    return list({lever.group: lever for lever in sorted(offered, key=lambda lever: lever.price)}.values())


def _together(chosen: Iterable[Lever], request: Request, cells: Cells) -> Request | None:
    """The question with all of these levers, at the smallest batch size that the model then takes where that is one of them."""
    try:
        for lever in sorted(chosen, key=lambda lever: lever.key == "batch"):
            changed = lever.change(request, cells.counted(request))
            if changed is None:
                return None
            request = checked(changed)
    except CANNOT:
        return None
    return request


def _nothing_fits(whole: list[Lever], request: Request, cells: Cells) -> str:
    question = _together(whole, request, cells)
    try:
        least = format_bytes(cells.estimate(question).process_low_bytes) if question is not None else None
    except CANNOT:
        least = None
    total = format_bytes(find_gpu(request.gpu).total_bytes)
    said = (
        f"even with all of them the process needs at least {least}, the device has {total}"
        if least
        else "none can be traced"
    )
    return f"No set of these changes makes it fit: {said}. Split the model over several devices, or take a larger one."


# ------------------------------------------------------------------------------------------------- what does not help


def _useless(request: Request, base: Estimate) -> Iterator[str]:
    if find_gpu(request.gpu).backend == "cuda":
        idle = base.reserved_at_peak_bytes - base.peak_allocated_bytes
        yield (
            "torch.cuda.empty_cache() in the loop does not lower the peak: it gives back cached memory, of which the peak itself "
            f"has {format_bytes(max(idle, 0))}, and the allocator does that by itself before it fails; the loop only gets slower."
        )
    if MODES[request.mode].trains:
        yield (
            "del loss or del output at the end of the step does not lower the peak: it is in the middle of the step, where both "
            "are still needed."
        )


# ------------------------------------------------------------------------------------------------------------ the table


def _with_batch(request: Request, known: Counted) -> Request | None:
    (batch,) = request.batches
    return replace(request, batches=(known.smallest,)) if batch > known.smallest else None


def _with_dtype(dtype: str) -> Change:
    order = ("float32", "amp-float16", "amp-bfloat16", "float16", "bfloat16")

    def change(request: Request, known: Counted) -> Request | None:
        (now,), gpu = request.dtypes, find_gpu(request.gpu)
        if "bfloat16" in dtype and gpu.capability is not None and gpu.capability < (8, 0):
            return None  # no tensor cores for it: a T4 emulates them
        if "amp" in dtype and (not MODES[request.mode].trains or gpu.backend == "cpu"):
            return None
        return replace(request, dtypes=(dtype,)) if order.index(dtype) > order.index(now) else None

    return change


def _training(change: Change) -> Change:
    return lambda request, known: change(request, known) if MODES[request.mode].trains else None


def _with_optimizer(optimizer: str) -> Change:
    def change(request: Request, known: Counted) -> Request | None:
        if request.optimizer in ("none", "sgd", optimizer):
            return None
        known = OPTIMIZERS[optimizer].implementations_on(find_gpu(request.gpu).backend)
        implementation = request.optimizer_impl if request.optimizer_impl in known else None
        return replace(request, optimizer=optimizer, optimizer_impl=implementation)

    return change


def _fused(request: Request, known: Counted) -> Request | None:
    known = OPTIMIZERS[request.optimizer].implementations_on(find_gpu(request.gpu).backend)
    return replace(request, optimizer_impl="fused") if "fused" in known else None


def _half_sequence(request: Request, known: Counted) -> Request | None:
    length = known.sequence_length
    if length is None or length < 2 or known.image_size is not None:
        return None
    return replace(request, sequence_length=length // 2)


def _half_image(request: Request, known: Counted) -> Request | None:
    if known.image_size is None or known.sequence_length is not None:
        return None
    height, width = known.image_size
    return replace(request, image_size=(height // 2, width // 2))


def _class_of(request: Request) -> str:
    return OPTIMIZERS[request.optimizer].class_name or "SGD"


def _of_small_batches(known: Counted) -> str:
    normed = any("BatchNorm" in module.class_name for module in known.census.modules)
    return f"more, smaller kernels{'; batch norm sees the small batches' if normed else ''}"


def _accumulate(request: Request) -> str:
    (batch,) = request.batches
    if not MODES[request.mode].trains:
        return f"for part in inputs.split({batch}):\n    outputs.append(model(part).cpu())"
    return (
        f"for part, target in zip(inputs.split({batch}), targets.split({batch})):\n"
        "    (loss_fn(model(part), target) * len(part) / len(inputs)).backward()\n"
        "optimizer.step(); optimizer.zero_grad()"
    )


def _checkpoint(request: Request) -> str:
    if request.source in ("hf", "hub", "config"):
        return 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
    return (
        "from torch.utils.checkpoint import checkpoint\n"
        "for block in blocks: x = checkpoint(block, x, use_reentrant=False)  # in the model's forward"
    )


def _cast(dtype: str) -> Callable[[Request], str]:
    return lambda request: (
        f"model = model.to(torch.{dtype})\ninputs = inputs.to(torch.{dtype})  # where they are floating point"
    )


def _autocast(dtype: str) -> Callable[[Request], str]:
    def code(request: Request) -> str:
        kind = find_gpu(request.gpu).backend
        lines = f'with torch.autocast("{kind}", dtype=torch.{dtype}):\n    loss = loss_fn(model(inputs), targets)'
        if dtype == "float16":
            lines += f'\nscaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()  # torch.amp.GradScaler("{kind}")'
        return lines

    return code


def _variable(request: Request) -> str:
    return allocator_variable(parse_version(request.torch) if request.torch else installed_version())


def _sequence(request: Request) -> str:
    length = request.sequence_length
    return f"inputs = inputs[:, :{length}]  # or truncation=True, max_length={length} in the tokenizer"


def _image(request: Request) -> str:
    height, width = request.image_size or (0, 0)
    return f"inputs = torch.nn.functional.interpolate(inputs, size=({height}, {width}))  # or Resize in the data loader"


def _row_of(
    key: str, group: str, price: int, title: str | Callable, cost: str | Callable, code: str | Callable, change: Change
) -> Lever:
    return Lever(
        key=key,
        group=group,
        price=price,
        title=title if callable(title) else lambda request: title,
        cost=cost if callable(cost) else lambda known: cost,
        code=code if callable(code) else lambda request: code,
        change=change,
    )


LEVERS = (
    _row_of(
        "fused", "implementation", 1, "Fused optimizer step", "nothing; it is faster",
        lambda request: f"optimizer = torch.optim.{_class_of(request)}(model.parameters(), fused=True)", _training(_fused),
    ),
    _row_of(
        "sdpa", "attention", 1, "SDPA instead of eager attention", "nothing; it is faster",
        'model.set_attn_implementation("sdpa")',
        lambda request, known: replace(request, attention="sdpa") if request.attention == "eager" else None,
    ),
    _row_of(
        "expandable", "segments", 1, "Expandable segments", "nothing on most systems",
        lambda request: f'import os  # before the first CUDA call\nos.environ["{_variable(request)}"] = "expandable_segments:True"',
        lambda request, known: replace(request, expandable_segments=True),
    ),
    _row_of(
        "batch", "batch", 2, lambda request: f"Batches of {request.batches[0]}, accumulated",
        _of_small_batches, _accumulate, _with_batch,
    ),
    _row_of(
        "checkpointing", "checkpointing", 2, "Activation checkpointing", "a second forward pass",
        _checkpoint, _training(lambda request, known: replace(request, checkpointing=True)),
    ),
    _row_of(
        "amp-bfloat16", "dtype", 3, "Autocast to bfloat16", "precision of activations; weights stay float32",
        _autocast("bfloat16"), _with_dtype("amp-bfloat16"),
    ),
    _row_of(
        "amp-float16", "dtype", 3, "Autocast to float16", "precision and range of activations; needs a gradient scaler",
        _autocast("float16"), _with_dtype("amp-float16"),
    ),
    _row_of(
        "float16", "dtype", 4, "Weights in float16", "precision and range of weights; may overflow in training",
        _cast("float16"), _with_dtype("float16"),
    ),
    _row_of(
        "bfloat16", "dtype", 4, "Weights in bfloat16", "precision of weights, gradients and optimizer state",
        _cast("bfloat16"), _with_dtype("bfloat16"),
    ),
    _row_of(
        "adafactor", "optimizer", 4, "Adafactor", "trains otherwise: tune the learning rate anew",
        "optimizer = torch.optim.Adafactor(model.parameters())", _training(_with_optimizer("adafactor")),
    ),
    _row_of(
        "sgd", "optimizer", 4, "SGD without momentum", "trains otherwise: tune the learning rate anew",
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)", _training(_with_optimizer("sgd")),
    ),
    _row_of(
        "seq", "size", 5, lambda request: f"Sequences of {request.sequence_length:,} tokens", "half the context",
        _sequence, _half_sequence,
    ),
    _row_of(
        "image", "size", 5, lambda request: "Images of {} × {}".format(*(request.image_size or (0, 0))), "half the resolution",
        _image, _half_image,
    ),
    _row_of(
        "inference", "mode", 5, "Inference only", "nothing is trained",
        "model.eval()\nwith torch.inference_mode(): output = model(inputs)",
        _training(lambda request, known: replace(
            request, mode="inference", optimizer="adamw", optimizer_impl=None, checkpointing=False
        )),
    ),
)  # fmt: skip
"""In the order in which they are shown."""
