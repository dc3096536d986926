"""Stand-ins that go on with values of their own: routing, boxes, finite numbers; and values that only seemed to be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

from sizer.architecture.blueprint import Blueprint, Example
from sizer.tape.affine import fit_affine
from sizer.tape.tape import CATEGORIES
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from sizer.tracing.values.boxes import KEPT, MATCHED
from sizer.tracing.values.masks import EVERY, LISTED
from sizer.tracing.values.stand_ins import DRAWN, EVENLY, FINITE, NONZERO, spread, spread_tokens
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes
from tests.tracing.known import known, under
from tests.tracing.models import text


def unknown(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape).mul(5).to(dtype)


# --- routing


def test_places_are_spread_evenly_within_each_sample() -> None:
    # 4 rows of 2 places of 6, two samples: rows 0 and 1 take 0 1 | 2 3, then the next sample starts anew
    assert spread(torch.Size([4, 2]), 1, 6, 2).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    # 5 rows do not divide into two samples: one after the other, 5 * 2 places of 4, round and round
    assert spread(torch.Size([5, 2]), 1, 4, 2).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    # along the first dimension: each column is a row of the rule
    assert spread(torch.Size([2, 3]), 0, 3, 1).tolist() == [[0, 2, 1], [1, 0, 2]]


CHOICES: list[tuple[str, Callable[[], Tensor], list]] = [
    ("topk", lambda: unknown(3, 4).topk(2)[1], [[0, 1], [2, 3], [0, 1]]),
    ("topk of another dimension", lambda: unknown(4, 3).topk(2, dim=0)[1], [[0, 2, 0], [1, 3, 1]]),
    ("argmax", lambda: unknown(5, 3).argmax(dim=-1), [0, 1, 2, 0, 1]),
    ("argmax that keeps its dimension", lambda: unknown(2, 3).argmax(dim=1, keepdim=True), [[0], [1]]),
    ("max", lambda: unknown(4, 3).max(dim=1)[1], [0, 1, 2, 0]),
    ("argmin", lambda: unknown(4, 3).argmin(dim=-1), [0, 1, 2, 0]),
    ("min", lambda: unknown(4, 3).min(dim=1)[1], [0, 1, 2, 0]),
    ("one_hot of it", lambda: nn.functional.one_hot(unknown(2, 3).argmax(-1), 3), [[1, 0, 0], [0, 1, 0]]),
]


@pytest.mark.parametrize(("name", "code", "expected"), CHOICES, ids=[case[0] for case in CHOICES])
def test_the_largest_of_unknown_values(
    recorder: Recorder, name: str, code: Callable[[], Tensor], expected: list
) -> None:
    chosen = under(recorder, code)
    assert known(recorder, chosen) == expected
    assert not recorder.notes  # nothing depends on it yet
    under(recorder, chosen.tolist)
    assert list(recorder.notes) == [EVENLY]


# in the middle of two shares of 6,000 tokens
TOKENS: list[tuple[str, Callable[[], Tensor], list]] = [
    ("multinomial", lambda: torch.multinomial(unknown(2, 6000), 1), [[1500], [4500]]),
    ("multinomial of few", lambda: torch.multinomial(unknown(4), 2), [1, 3]),
    ("argmax", lambda: unknown(2, 6000).argmax(dim=-1), [1500, 4500]),
    ("topk", lambda: unknown(1, 6000).topk(2)[1], [[1500, 4500]]),
]


@pytest.mark.parametrize(("name", "code", "expected"), TOKENS, ids=[case[0] for case in TOKENS])
def test_tokens_are_spread_over_a_vocabulary(recorder: Recorder, name: str, code: Callable[[], Tensor], expected: list) -> None:
    chosen = under(recorder, code)
    assert known(recorder, chosen) == expected and not recorder.notes
    assert not under(recorder, lambda: (chosen == 0).any().item())  # no end of a sequence
    assert list(recorder.notes) == [DRAWN]


def test_more_tokens_than_a_vocabulary_has_begin_anew() -> None:
    assert spread_tokens(5, 2).tolist() == [0, 1, 0, 1, 0]


def test_a_list_of_numbers_as_an_index_counts_up(recorder: Recorder) -> None:
    def code() -> Tensor:
        return torch.tensor([[1, 4, 8], [1, 2, 6]])[:, [0, 2]]

    # the list itself gets lost below any dispatch: the first two columns
    assert known(recorder, under(recorder, code)) == [[1, 4], [1, 2]]
    assert list(recorder.notes) == [LISTED]


def test_a_list_longer_than_the_dimension_begins_anew(recorder: Recorder) -> None:
    assert known(recorder, under(recorder, lambda: torch.tensor([5, 6])[[0, 1, 1]])) == [5, 6, 5]


def test_a_list_that_selects_from_unknown_values_is_not_noted(recorder: Recorder) -> None:
    assert known(recorder, under(recorder, lambda: unknown(4)[[0, 2]])) is None
    assert not recorder.notes


def test_the_largest_of_known_values_is_the_largest(recorder: Recorder) -> None:
    def code() -> Tensor:
        return torch.tensor([[1, 9, 3]]).argmax(dim=1)

    assert known(recorder, under(recorder, code)) == [1]
    assert not recorder.notes


def test_the_place_of_the_largest_of_all_stays_unknown(recorder: Recorder) -> None:
    assert known(recorder, under(recorder, lambda: unknown(2, 3).argmax())) is None


class Experts(nn.Module):
    """Four experts of 8 -> 16 -> 8, each token goes through two of them, in the loop of transformers' older mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        x, scores = x.flatten(0, 1), scores.flatten(0, 1) + self.bias * 0
        weights, chosen = scores.topk(2, dim=-1)
        mask = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)  # [experts, choices, tokens]
        out = torch.zeros_like(x)
        for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            slot, token = torch.where(mask[expert].squeeze(0))
            y = self.experts[int(expert)](x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y)
        return out


def routed() -> Blueprint:
    """Texts of 8 tokens whose scores choose two experts each, all as often: 0 1, 2 3, 0 1, ..."""
    scores = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4]]).repeat(4, 1)
    return Blueprint(
        name="experts",
        class_name="Experts",
        build=Experts,
        example=lambda batch, training: Example(args=(torch.ones(batch, 8, 8), scores.repeat(batch, 1, 1))),
        loss=lambda module, example: module(*example.args).sum(),
        predict=lambda module, example: module(*example.args),
    )


TRAINING = Work(mode="training", dtype="float32", optimizer="none")


def test_every_expert_gets_as_many_tokens() -> None:
    tape = trace(routed(), build(routed()), TRAINING, batch=3, device=Device("cuda", (8, 0)))
    # 3 * 8 tokens * 2 choices / 4 experts = 12 rows of 16 floats: 12 * 16 * 4 = 768 bytes
    first_layers = [
        tape.sizes[block]
        for block in range(len(tape.sizes))
        if tape.op_names[tape.ops[block]] == "aten.addmm.default"
        and tape.module_names[tape.modules[block]].endswith(".0")
        and CATEGORIES[tape.categories[block]] != "workspace"
    ]
    assert first_layers == [768] * 4 * 2  # two steps
    assert EVENLY in tape.stand_ins


def test_balanced_experts_are_affine_in_the_batch() -> None:
    module = build(routed())
    first, second = (trace(routed(), module, TRAINING, batch=b, device=Device("cuda", (8, 0))) for b in (2, 3))
    third = trace(routed(), module, TRAINING, batch=7, device=Device("cuda", (8, 0)))
    fit_affine(first, second).check(third)


def test_balanced_experts_on_the_cpu_take_what_the_profiler_sees() -> None:
    truth = measure_on_cpu(routed(), TRAINING, batch=2)
    tape = trace(routed(), build(routed()), TRAINING, batch=2, device=Device("cpu"))
    expected = {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers}
    assert tape_bytes(tape)[0] == expected


SWITCH = {"model_type": "switch_transformers", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2,
          "num_decoder_layers": 2, "num_experts": 4, "vocab_size": 100, "num_sparse_encoder_layers": 1,
          "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
NLLB = {"model_type": "nllb-moe", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_experts": 4,
        "encoder_sparse_step": 2, "decoder_sparse_step": 2, "vocab_size": 100, "expert_capacity": 16}  # fmt: skip
JETMOE = {"model_type": "jetmoe", "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
          "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100}  # fmt: skip


@pytest.mark.parametrize("config", [SWITCH, NLLB, JETMOE], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_mixtures_that_loop_over_their_experts(config: dict, mode: str) -> None:
    blueprint = text(mode, length=16, **config)
    tape = trace(blueprint, build(blueprint), Work(mode=mode, dtype="float32"), batch=2, device=Device("cuda", (8, 0)))
    assert any(EVENLY in note for note in tape.stand_ins)


# --- masks that nobody can know


def test_what_nonzero_is_taken_to_find_is_known(recorder: Recorder) -> None:
    places = under(recorder, lambda: unknown(2, 2).nonzero())
    assert known(recorder, places) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert list(recorder.notes) == [NONZERO]


def test_a_known_tensor_read_through_an_unknown_mask_stays_known(recorder: Recorder) -> None:
    read = under(recorder, lambda: torch.arange(3)[unknown(3) > 1])
    assert known(recorder, read) == [0, 1, 2]
    assert list(recorder.notes) == [EVERY]


def test_a_known_tensor_written_through_an_unknown_mask_does_not(recorder: Recorder) -> None:
    def code() -> Tensor:
        x = torch.arange(3)
        x[unknown(3) > 1] = 7
        return x

    assert known(recorder, under(recorder, code)) is None


ROWS = [
    torch.empty(4, 3),
    torch.empty(4),
    torch.empty(3, 4).t(),
    torch.empty(4, 2, 3).transpose(1, 2),
    torch.empty(4, 0),
]


@pytest.mark.parametrize("shape", range(len(ROWS)))
def test_rows_by_number_are_what_the_meta_kernel_returns(recorder: Recorder, shape: int) -> None:
    table, rows = ROWS[shape].to("meta"), torch.empty(5, dtype=torch.int64, device="meta")
    read = under(recorder, lambda: table[rows])
    expected = table[rows]
    assert (read.shape, read.stride(), read.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_layers_of_a_stack_are_one_note(recorder: Recorder) -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.sum().item()

    def code() -> Tensor:
        model = nn.Sequential(Layer(), Layer(), nn.Sequential(Layer()))
        root = nn.ModuleDict({"layers": model})
        recorder.paths.name(root)
        return model(unknown(3))

    under(recorder, code)
    assert list(recorder.notes) == [
        f"the value of a tensor was taken as 1.0 (in layers.{path})" for path in ("*", "*.*")
    ]


# --- finite numbers, any and all

FINITES: list[tuple[str, Callable[[], Tensor], Any]] = [
    ("isnan", lambda: unknown(2).isnan(), [False, False]),
    ("isinf", lambda: unknown(2).isinf(), [False, False]),
    ("isfinite", lambda: unknown(2).isfinite(), [True, True]),
    ("none of them", lambda: unknown(2).isnan().sum() == 0, True),
    ("all of them", lambda: unknown(2).isfinite().all(), True),
    ("not equal to itself", lambda: (x := unknown(2)) != x, [False, False]),
    ("above what no score reaches", lambda: unknown(2) > torch.full((2,), -1e9), [True, True]),
    ("below it", lambda: torch.full((2, 1), -1e9) >= unknown(2), [[False, False], [False, False]]),
    ("below an end", lambda: unknown(2) <= torch.tensor([1e10]), [True, True]),
    ("above an end", lambda: torch.tensor([1e10]) < unknown(2), [False, False]),
    ("above what a mask leaves", lambda: unknown(2) > torch.where(torch.zeros(2) > 1, unknown(2), -1e9), [True, True]),
]


@pytest.mark.parametrize(("name", "code", "expected"), FINITES, ids=[case[0] for case in FINITES])
def test_unknown_values_are_finite(recorder: Recorder, name: str, code: Callable[[], Tensor], expected: Any) -> None:
    out = under(recorder, code)
    assert known(recorder, out) == expected
    under(recorder, out.tolist)
    assert list(recorder.notes) == [FINITE]


def test_known_values_are_what_they_are(recorder: Recorder) -> None:
    assert known(recorder, under(recorder, lambda: torch.tensor([1.0, float("nan")]).isnan())) == [False, True]
    assert known(recorder, under(recorder, lambda: unknown(2) != unknown(2))) is None
    assert known(recorder, under(recorder, lambda: unknown(2) > torch.tensor([-1e9, 1.0]))) is None
    assert known(recorder, under(recorder, lambda: torch.where(torch.tensor([True, False]), unknown(2), 3.0))) is None
    assert known(recorder, under(recorder, lambda: torch.where(torch.ones(2) > 0, torch.ones(2), unknown(2)))) == [1.0, 1.0]


def test_all_follows_an_any_that_found_nothing(recorder: Recorder) -> None:
    def code() -> tuple[bool, bool, bool]:
        stops, checks = unknown(3) > 1, unknown(3) > 1
        return bool(stops.any()), bool(stops.all()), bool(checks.all())

    assert under(recorder, code) == (False, False, True)


# --- values that only seemed to be lost

FOUND_AGAIN: list[tuple[str, Callable[[], Tensor], Any]] = [
    ("full_like of an unknown", lambda: torch.full_like(unknown(2), 3, dtype=torch.int64), [3, 3]),
    ("zeros_like of an unknown", lambda: torch.zeros_like(unknown(2)), [0.0, 0.0]),
    ("new_ones of an unknown", lambda: unknown(3).new_ones(2, dtype=torch.bool), [True, True]),
    ("masked_fill with a tensor on the CPU",
     lambda: torch.arange(3).masked_fill(torch.arange(3) > 1, torch.tensor(9, device="cpu")), [0, 1, 9]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "expected"), FOUND_AGAIN, ids=[case[0] for case in FOUND_AGAIN])
def test_found_again(recorder: Recorder, name: str, code: Callable[[], Tensor], expected: Any) -> None:
    assert known(recorder, under(recorder, code)) == expected
    assert not recorder.notes


def test_a_random_permutation_is_some_permutation(recorder: Recorder) -> None:
    assert sorted(known(recorder, under(recorder, lambda: torch.randperm(5)))) == [0, 1, 2, 3, 4]


class Strided(nn.Module):
    """Pads its input to a multiple of a stride that is a buffer, as neural codecs do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("stride", torch.tensor(4))
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[-1] % int(self.stride)
        return nn.functional.pad(x * self.weight * float(self.scale), (0, missing)).view(len(x), -1, int(self.stride))


def strided() -> Blueprint:
    return Blueprint(
        name="strided",
        class_name="Strided",
        build=Strided,
        example=lambda batch, training: Example(args=(torch.ones(batch, 10),)),
        loss=lambda module, example: module(*example.args).sum(),
        predict=lambda module, example: module(*example.args),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_keep_the_values_that_the_constructor_gave_them(dtype: str) -> None:
    module = build(strided())
    for batch in (2, 3):
        tape = trace(strided(), module, Work(mode="training", dtype=dtype), batch=batch, device=Device("cuda", (8, 0)))
        assert tape.stand_ins == ()
        padded = next(i for i in range(len(tape.sizes)) if "pad" in tape.op_names[tape.ops[i]])
        # 10 numbers and 2 to fill the third group of four
        assert tape.sizes[padded] == batch * 12 * (4 if dtype == "float32" else 2)


# --- boxes


class Backbone(nn.Sequential):
    out_channels = 8

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 16, stride=16))


ANCHORS = {"sizes": ((16,),), "aspect_ratios": ((1.0,),)}
SIZE = {"min_size": 64, "max_size": 64}
OBJECTS = {"boxes": [[0.0, 0, 30, 30], [30, 30, 64, 64]], "labels": [1, 2]}


def mask_rcnn(drawn: int = 16) -> nn.Module:
    """4 x 4 anchors; 16 boxes drawn for training, a quarter of them positive; at most 5 detections."""
    module = MaskRCNN(
        Backbone(), num_classes=3, **SIZE, rpn_anchor_generator=AnchorGenerator(**ANCHORS),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 1), mask_roi_pool=MultiScaleRoIAlign(["0"], 6, 1),
        box_batch_size_per_image=drawn, box_detections_per_img=5,
    )  # fmt: skip
    module.transform.torch_choice = max  # training draws one of its sizes by a random number
    return module


def retina_net() -> nn.Module:
    """4 x 4 anchors, 10 candidates, at most 4 detections."""
    return RetinaNet(
        Backbone(), num_classes=3, **SIZE, anchor_generator=AnchorGenerator(**ANCHORS), topk_candidates=10,
        detections_per_img=4,
    )  # fmt: skip


def targets(images: int) -> list[dict[str, Tensor]]:
    objects = {name: torch.tensor(value) for name, value in OBJECTS.items()}
    return [{**objects, "masks": torch.ones(2, 64, 64, dtype=torch.uint8)} for _ in range(images)]


def counted(
    recorder: Recorder, factory: Callable[[], nn.Module], parts: tuple[str, ...], training: bool
) -> tuple[Any, dict]:
    """The output for two images, and how many rows the first argument of each of the parts had."""

    def code() -> tuple[Any, dict]:
        module, rows = factory().train(training), {}
        for part in parts:
            module.get_submodule(part).register_forward_pre_hook(
                lambda _, args, part=part: rows.__setitem__(part, len(args[0]))
            )
        images = [recorder.place(torch.rand(3, 64, 64, device="cpu")) for _ in range(2)]
        with torch.set_grad_enabled(training):
            return module(images, targets(2)) if training else module(images), rows

    return under(recorder, code)


def test_as_many_boxes_are_trained_on_as_the_model_draws(recorder: Recorder) -> None:
    _, rows = counted(recorder, mask_rcnn, ("roi_heads.box_head", "roi_heads.mask_head"), training=True)
    # 16 proposals and 2 objects an image, every fourth matched: 5, of which int(16 * 0.25) = 4 are drawn, and 12 of the rest
    assert rows == {"roi_heads.box_head": 2 * 16, "roi_heads.mask_head": 2 * 4}
    assert any(MATCHED in note for note in recorder.notes)


def test_a_detector_on_the_cpu_takes_what_the_profiler_sees() -> None:
    # 8 boxes drawn, 2 of them positive: the objects themselves are among the proposals, so a real run draws as many
    images = [torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    blueprint = Blueprint(
        name="mask_rcnn",
        class_name="MaskRCNN",
        build=lambda: mask_rcnn(drawn=8),
        example=lambda batch, training: Example(args=(images,), targets=targets(2)),
        loss=lambda module, example: sum(module(*example.args, example.targets).values()),
        predict=lambda module, example: module(*example.args),
    )
    truth = measure_on_cpu(blueprint, TRAINING, batch=2)
    tape = trace(blueprint, build(blueprint), TRAINING, batch=2, device=Device("cpu"))
    # one anchor of 4 floats, which the model keeps on the CPU: it moves to a device, and here it is there already
    anchors = {"load": 0, "forward": 16 - truth.saved_numbers, "backward": 16, "optimizer": 16, "step2": 16}
    assert tape_bytes(tape)[0] == {phase: size + anchors[phase] for phase, size in truth.alive.items()}


def test_as_many_boxes_are_found_as_the_model_returns(recorder: Recorder) -> None:
    found, rows = counted(recorder, mask_rcnn, ("roi_heads.box_head", "roi_heads.mask_head"), training=False)
    assert rows == {"roi_heads.box_head": 2 * 16, "roi_heads.mask_head": 2 * 5}
    assert [tuple(each["masks"].shape) for each in found] == [(5, 1, 64, 64)] * 2
    assert any("5 were taken to pass the threshold" in note for note in recorder.notes)


def test_as_many_candidates_pass_as_the_model_compares(recorder: Recorder) -> None:
    found, _ = counted(recorder, retina_net, (), training=False)
    assert [tuple(each["boxes"].shape) for each in found] == [(4, 4)] * 2
    assert any("10 were taken to pass the threshold" in note for note in recorder.notes)


def test_the_limit_ends_with_the_models_own_code(recorder: Recorder) -> None:
    counted(recorder, retina_net, (), training=False)
    assert recorder.mask_limit is None
    assert torchvision.models.detection.RetinaNet.postprocess_detections.__name__ == "postprocess_detections"


class Suppression(nn.Module):
    """Boxes a hundred pixels apart, which nobody can know before a weight is known."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, boxes: Tensor) -> Tensor:
        boxes = boxes + self.weight
        return boxes[torchvision.ops.nms(boxes, boxes[:, 0].contiguous(), 0.5)]


def suppression() -> Blueprint:
    corners = torch.arange(70.0)[:, None] * 100
    boxes = torch.cat([corners, corners, corners + 10, corners + 10], dim=1)
    return Blueprint(
        name="suppression",
        class_name="Suppression",
        build=Suppression,
        example=lambda batch, training: Example(args=(boxes,)),
        loss=lambda module, example: module(*example.args).sum(),
        predict=lambda module, example: module(*example.args),
    )


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_suppression_on_the_cpu_takes_what_the_profiler_sees(mode: str) -> None:
    work = Work(mode=mode, dtype="float32", optimizer="none")
    truth = measure_on_cpu(suppression(), work, batch=1)
    tape = trace(suppression(), build(suppression()), work, batch=1, device=Device("cpu"))
    alive, peaks = tape_bytes(tape)
    assert alive == truth.alive
    # exact from PyTorch 2.15 on; before, its sort holds up to two more orders of 70 places of 8 bytes inside
    assert all(0 <= truth.peaks[phase] - peaks[phase] <= 2 * 70 * 8 for phase in truth.peaks)
    assert tape.stand_ins == (KEPT,)


def test_suppression_on_cuda_compares_every_box_with_every_other() -> None:
    work = Work(mode="inference", dtype="float32")
    tape = trace(suppression(), build(suppression()), work, batch=1, device=Device("cuda", (8, 0)))
    # 70 boxes: ceil(70 / 64) = 2 words of 64 bits for each, 70 * 2 * 8 = 1120 bytes
    assert 1120 in list(tape.sizes)
