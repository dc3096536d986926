"""What to do with the answer, as plain lines: what would make the work fit, or what room is left."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.catalogue.gpus import GPUS, Gpu
from sizer.catalogue.modes import MODES
from sizer.memory.estimate import Estimate
from sizer.memory.fit import MaxBatch
from sizer.memory.report import Report
from sizer.units import MIB, counted, format_bytes
from sizer.versions import NEWEST, allocator_variable, parse_version

LARGE_SHARE = 0.2  # of the peak: from here on a category is worth an advice
FRAGMENTED_SHARE, FRAGMENTED_BYTES = 0.1, 256 * MIB  # of reserved; both must be passed
STATELESS = ("none", "sgd")
EIGHT_BIT = ("adam", "adamw", "sgd-momentum", "rmsprop", "adagrad", "lion")


def advise(report: Report, estimate: Estimate) -> tuple[str, ...]:
    """Lines of advice for one estimate of a report, most useful first, with numbers (bytes as text) from the report.

    Where the work may not fit: smaller batches, other dtypes, checkpointing, optimizers, the allocator, other
    devices. Where it fits: the room left, the largest batch, the smallest device that would do. Gains are read off
    this estimate, not traced: change the setting and estimate again for the exact figure.
    """
    if estimate.fits is True:
        return tuple(_room(report, estimate))
    return (_verdict(report, estimate), *_remedies(report, estimate))


def smallest_gpu(estimate: Estimate, gpu: Gpu) -> Gpu | None:
    """The smallest device of the catalogue, alike in backend, maker and whether its memory is the host's, that holds the estimate's
    high end; or None.

    Other devices may choose other kernels, so this compares memory only.
    """
    kind = (gpu.backend, gpu.maker, gpu.unified)
    able = [other for other in GPUS.values() if (other.backend, other.maker, other.unified) == kind]
    able = [other for other in able if other.total_bytes >= estimate.process_high_bytes]
    return min(able, key=lambda other: other.total_bytes, default=None)


def _verdict(report: Report, estimate: Estimate) -> str:
    low, high = format_bytes(estimate.process_low_bytes), format_bytes(estimate.process_high_bytes)
    total = format_bytes(report.gpu.total_bytes)
    if estimate.fits == "uncertain":
        return f"It may or may not fit: the process needs {low} to {high}, the {report.gpu.name} has {total}."
    failed = estimate.out_of_memory
    where = f"; it stops in {failed.phase} at {failed.op} ({failed.module or 'root'})" if failed else ""
    return f"It does not fit: the process needs {low} to {high}, the {report.gpu.name} has {total}{where}."


def _remedies(report: Report, estimate: Estimate) -> Iterator[str]:
    yield from _smaller_batch(report, estimate)
    yield from _other_dtypes(report, estimate)
    yield from _fewer_activations(report, estimate)
    yield from _leaner_optimizer(report, estimate)
    yield from _less_fragmentation(report, estimate)
    yield from _larger_gpu(report, estimate)


def _smaller_batch(report: Report, estimate: Estimate) -> Iterator[str]:
    largest = _largest(report, estimate.dtype)
    if largest is None or estimate.batch == 1:
        return
    if largest.batch is None:
        if largest.possible_batch is None:
            yield f"A smaller batch is not enough: {largest.reason}."
        return
    if largest.batch >= estimate.batch:
        return
    line = f"Use a batch of at most {largest.batch}."
    if MODES[report.request["mode"]].trains:
        steps = -(-estimate.batch // largest.batch)
        line += f" To train as with {estimate.batch}, accumulate gradients over {steps} such steps"
        normed = any("BatchNorm" in module.class_name for module in report.model.modules)
        line += " (batch norm still sees the small batches)." if normed else "."
    yield line


def _other_dtypes(report: Report, estimate: Estimate) -> Iterator[str]:
    others = [row for row in report.estimates if row.batch == estimate.batch and row.dtype != estimate.dtype]
    better = [row for row in others if row.process_high_bytes < estimate.process_bytes and row.fits is not False]
    for row in sorted(
        better, key=lambda row: (row.fits is not True, not row.dtype.startswith("amp"), row.process_bytes)
    ):
        verb = "fits" if row.fits is True else "may fit"
        yield f"Use {row.dtype}: the process then needs {format_bytes(row.process_bytes)} and {verb}."
        return


def _fewer_activations(report: Report, estimate: Estimate) -> Iterator[str]:
    if not MODES[report.request["mode"]].trains or not _is_large(estimate.activations_bytes, estimate):
        return
    size = format_bytes(estimate.activations_bytes)
    if report.request.get("attention") == "eager":
        yield "Use attention=sdpa: eager attention keeps its score matrices for the backward pass."
    if report.request.get("checkpointing") is False:
        yield f"Use gradient checkpointing: most of the {size} kept for the backward pass is then computed again."
    if tokens := report.request.get("sequence_length"):
        yield f"Use sequences shorter than {tokens} tokens: half of them keep about half of the {size}."
    elif image := report.request.get("image_size"):
        yield f"Use images smaller than {image[0]}x{image[1]}: half the sides keep about a quarter of the {size}."


def _leaner_optimizer(report: Report, estimate: Estimate) -> Iterator[str]:
    name, impl = report.request.get("optimizer"), report.request.get("optimizer_impl")
    scratch = estimate.at_peak.get("temporary", 0)
    if estimate.peak_op.startswith("aten._foreach") and impl != "fused" and _is_large(scratch, estimate):
        yield f"Use the optimizer with fused=True: its step needs none of the {format_bytes(scratch)} of temporaries."
    state = estimate.optimizer_bytes
    if name in STATELESS or not _is_large(state, estimate):
        return
    if name in EIGHT_BIT:
        saved = format_bytes(state - state // 4)
        yield f"Use an 8-bit version of {name}: its state of {format_bytes(state)} shrinks by about {saved}."
    yield f"Use an optimizer without state (sgd): it saves {format_bytes(state)}, and usually trains worse."


def _less_fragmentation(report: Report, estimate: Estimate) -> Iterator[str]:
    idle = estimate.peak_reserved_bytes - estimate.peak_allocated_bytes
    if report.gpu.backend != "cuda" or report.request.get("expandable_segments") is True:
        return
    if idle > FRAGMENTED_BYTES and idle > FRAGMENTED_SHARE * estimate.peak_reserved_bytes:
        variable = allocator_variable(parse_version(report.target["torch"]) if report.target else NEWEST)
        yield (
            f"Set {variable}=expandable_segments:True (expandable=1 here): up to {format_bytes(idle)} is reserved "
            "beyond the peak of what is allocated, most of it lost to fragmentation."
        )


def _larger_gpu(report: Report, estimate: Estimate) -> Iterator[str]:
    larger = smallest_gpu(estimate, report.gpu)
    if larger is None:
        need = format_bytes(estimate.process_high_bytes)
        yield f"No single device of its kind in the catalogue holds {need}: split the model over several (FSDP, tensor parallel)."
    elif larger.total_bytes > report.gpu.total_bytes:
        yield f"Use a larger device: the {larger.name} has {format_bytes(larger.total_bytes)}."


def _room(report: Report, estimate: Estimate) -> Iterator[str]:
    left = report.gpu.total_bytes - estimate.process_bytes
    yield f"It fits: {format_bytes(left)} of {format_bytes(report.gpu.total_bytes)} stay free on the {report.gpu.name}."
    if estimate.retries:
        yield (
            f"It fits only because the allocator gives cached memory back and tries again ({counted(estimate.retries, 'time')}), "
            "which is slow: a smaller batch runs faster."
        )
    largest = _largest(report, estimate.dtype)
    if largest is not None and largest.batch is not None and largest.batch > estimate.batch:
        yield f"The largest batch that fits is {largest.batch}."
    yield from _less_fragmentation(report, estimate)
    smaller = smallest_gpu(estimate, report.gpu)
    if smaller is not None and smaller.total_bytes < report.gpu.total_bytes:
        yield f"A smaller device would do: the {smaller.name} has {format_bytes(smaller.total_bytes)}."


def _largest(report: Report, dtype: str) -> MaxBatch | None:
    return next((row for row in report.max_batch if row.dtype == dtype), None)


def _is_large(size: int, estimate: Estimate) -> bool:
    return size >= LARGE_SHARE * estimate.peak_allocated_bytes
