"""Detection boxes of unknown values: a detector's proposals, the remaining boxes, and boxes that match an object.

At most as many boxes pass a score threshold as the model uses afterwards (`topk_candidates`, `detections_per_img`). Non-maximum
suppression keeps all its boxes; the model cuts them to its own limits (`post_nms_top_n`, `detections_per_img`). Matching
assigns every fourth box to an object, enough to fill the share of positives that the models draw (`box_positive_fraction`, a
quarter of 512 boxes for mask and keypoint heads). All levels of the feature pyramid get the same number of boxes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from sizer.tracing.values.handler import Handler, HandlerContext, involves_meta, note_assumption, on_meta
from sizer.tracing.values.known import Assume

KEPT = "non-maximum suppression of unknown boxes was taken to keep every box"
MATCHED = "every fourth box was taken to match an object, since the values of boxes are unknown"
LEVELS = "every level of the feature pyramid was taken to get as many boxes as the next, since the values of boxes are unknown"
SHARE = 4  # one box of this number matches an object
BOXES_PER_BLOCK = 64  # threadsPerBlock of nms_kernel.cu: a word of 64 bits says which boxes of a block overlap

_aten = torch.ops.aten


def non_maximum_suppression(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the indices [K] that torchvision's nms keeps from boxes [N, 4] and scores [N]; all N for unknown boxes."""
    if not involves_meta(args, kwargs):
        return func(*args, **kwargs)
    boxes, scores = args[0], args[1]
    if boxes.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device="meta")
    with recorder:
        work = (_on_cpu if recorder.device.kind == "cpu" else _on_gpu)(boxes, scores)
        chosen = torch.empty(len(boxes), dtype=torch.bool, device="meta") if recorder.device.kind == "cuda" else None
    if recorder.values.all_known([boxes, scores]):
        note_assumption(recorder, [boxes, scores])
        kept = recorder.values.run(_in_float32, args, kwargs)
        text = recorder.values.assumption([boxes, scores])
    else:
        recorder.stand_in(KEPT)
        recorder.values.forget(work[0])  # the order follows from the same unknown scores, and needs no note of its own
        kept, text = torch.arange(boxes.shape[0], device="cpu"), KEPT
    if recorder.device.kind == "cpu":
        result = work[-1].narrow(0, 0, len(kept))
        recorder.values.remember(work[-1], torch.nn.functional.pad(kept, (0, len(boxes) - len(kept))))
        return result
    if chosen is None:
        return on_meta(kept, recorder, text)
    recorder.values.remember(chosen, torch.arange(len(boxes), device="cpu") < len(kept))
    with recorder:
        result = work[0].masked_select(chosen)
    if text is None:
        recorder.values.remember(result, kept.contiguous())
    else:
        recorder.values.assume(result, kept.contiguous(), text)
    return result


def _in_float32(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Run nms over known boxes on the CPU, which has no kernel for halves."""
    return torch.ops.torchvision.nms(boxes.float(), scores.float(), threshold)


def _on_gpu(boxes: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors at the end of torchvision/csrc/ops/cuda/nms_kernel.cu (0.26): order, sorted boxes and overlaps.

    overlaps: N rows of ceil(N / 64) words of 8 bytes. A mask selects the kept boxes from the order. The kernel for Metal
    (ops/mps) makes the same tensors.
    """
    count = boxes.shape[0]
    order = scores.sort(0, descending=True)[1]
    ordered = boxes.index_select(0, order)
    overlaps = torch.empty(count * -(-count // BOXES_PER_BLOCK), dtype=torch.int64, device="meta")
    return order, ordered, overlaps


def _on_cpu(boxes: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors at the end of torchvision/csrc/ops/cpu/nms_kernel.cpp (0.26), each [N].

    They are corners, areas, order, suppressed and kept.
    """
    corners = [boxes.select(1, side).contiguous() for side in range(4)]
    areas = (corners[2] - corners[0]) * (corners[3] - corners[1])
    order = scores.sort(0, descending=True)[1]
    suppressed = torch.zeros(boxes.shape[0], dtype=torch.uint8, device="meta")
    kept = torch.zeros(boxes.shape[0], dtype=torch.int64, device="meta")
    return *corners, areas, order, suppressed, kept


DETECTION = "torchvision.models.detection"


class Limited(Protocol):
    """Count the elements that masks select."""

    mask_limit: int | None  # elements that an unknown mask is assumed to select; None for all


@contextmanager
def boxes_assumed(counting: Limited, assume: Assume) -> Iterator[None]:
    """Make torchvision's detectors continue with as many boxes of unknown values as their own limits allow, within the context.

    The functions themselves run. Results of `Matcher` (the number of an object [N], or -1 for background) and `LevelMapper`
    (the level [N] of the feature pyramid from which a box is pooled) get values. In `postprocess_detections`, at most as many
    boxes pass the score threshold as the model uses afterwards. DETECTION has been imported.
    """
    detection, poolers = sys.modules[DETECTION], sys.modules["torchvision.ops.poolers"]
    matcher = detection._utils.Matcher
    with ExitStack() as stack:

        def patch(cls: type, name: str, function: Any) -> None:
            stack.enter_context(mock.patch.object(cls, name, function))

        patch(matcher, "__call__", _matching(assume, matcher.__call__))
        patch(poolers.LevelMapper, "__call__", _spreading(assume, poolers.LevelMapper.__call__))
        for module, name in (("fcos", "FCOS"), ("retinanet", "RetinaNet"), ("roi_heads", "RoIHeads"), ("ssd", "SSD")):
            detector = getattr(sys.modules[f"{DETECTION}.{module}"], name)
            patch(detector, "postprocess_detections", _limiting(counting, detector.postprocess_detections))
        yield


def _matching(assume: Assume, match: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def matches(self: Any, quality: Tensor) -> Tensor:  # quality [objects, N]
        out = match(self, quality)
        place = torch.arange(out.numel(), device="cpu")
        real = torch.where(place % SHARE == 0, place // SHARE % quality.shape[0], self.BELOW_LOW_THRESHOLD)
        assume(out, real, MATCHED)
        return out

    return matches


def _spreading(assume: Assume, map_levels: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def levels(self: Any, boxes: list[Tensor]) -> Tensor:  # boxes [N of each image, 4]
        out = map_levels(self, boxes)
        places = [torch.arange(len(each), device="cpu") for each in boxes]
        assume(out, torch.cat(places) % (self.k_max - self.k_min + 1), LEVELS)
        return out

    return levels


def _limiting(counting: Limited, postprocess: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that limits candidates: to those compared per class (SSD) or level (FCOS, RetinaNet).

    R-CNNs are limited to the number of returned boxes.
    """

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, counting.mask_limit = counting.mask_limit, getattr(self, "topk_candidates", self.detections_per_img)
        try:
            return postprocess(self, *args, **kwargs)
        finally:
            counting.mask_limit = before

    return limited


# Operators of other libraries, by name: they exist only where the library has been imported.
HANDLERS: dict[Any, Handler] = {"torchvision.nms.default": non_maximum_suppression}
