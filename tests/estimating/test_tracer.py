"""Nothing is traced twice, and what is answered from kept tapes is what is answered without them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError, TraceError
from sizer.estimating.estimator import Estimator, estimate
from sizer.estimating.store import digest_name
from sizer.estimating.tracer import BY_ITSELF
from sizer.query.text import parse_query
from sizer.report.report import Focus, Report
from sizer.tracing import trace
from tests.architecture.oldest import needs_sam2_video
from tests.architecture.rare_configs import RARE
from tests.decision.questions import TWO_LAYERS

RESNET = "arch=torchvision:resnet18&image=64"
GPT2 = f"{TWO_LAYERS}&seq=32"
SMALL_LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


class Shelf(dict):
    """What a job server keeps of one architecture."""

    def put(self, name: str, data: bytes) -> None:
        self[name] = data


@pytest.fixture
def traces(monkeypatch) -> list[tuple[str, int]]:
    """The (dtype, batch) of every trace that is done."""
    done = []
    real = trace.trace

    def noted(blueprint, module, work, *, batch, **arguments):
        done.append((work.dtype, batch))
        return real(blueprint, module, work, batch=batch, **arguments)

    monkeypatch.setattr(trace, "trace", noted)
    return done


def plain(report: Report) -> dict:
    return report.to_dict()


def with_keys(query: str, changed: str) -> str:
    """The query with other values of some keys."""
    pairs = dict(item.split("=", 1) for part in (query, changed) if part for item in part.split("&"))
    return "&".join(f"{key}={value}" for key, value in pairs.items())


CELLS = "&dtype=float32,bfloat16&batch=1,2,8"


@pytest.mark.parametrize(
    ("query", "others"),
    [
        (
            f"arch=torchvision:alexnet&image=64{CELLS}",
            ["batch=3,7&dtype=float32,float16", "gpu=a100-40gb", "expandable=1&focus=bfloat16:2", ""],
        ),
        (f"{GPT2}{CELLS}", ["batch=3&dtype=float16", "gpu=a100-40gb", "gpu=rtx-4090", "dtype=float32&gpu=t4"]),
    ],
)
def test_what_is_only_a_replay_traces_nothing(traces, query, others):
    shelf = Shelf()
    estimate(parse_query(query), store=shelf)
    for change in others:
        traces.clear()
        found = estimate(parse_query(with_keys(query, change)), store=shelf)
        assert traces == [], change
        assert plain(found) == plain(estimate(parse_query(with_keys(query, change)))), change


def test_passes_beyond_those_that_are_traced_trace_nothing(traces):
    shelf, query = Shelf(), f"{RESNET}&dtype=float32&batch=2&train=head"
    few = estimate(parse_query(f"{query}&accumulate=2"), store=shelf)
    traces.clear()
    assert estimate(parse_query(f"{query}&accumulate=64"), store=shelf).estimates == few.estimates
    assert traces == []


@pytest.mark.parametrize(
    "change",
    [
        "seq=16",
        "optimizer=sgd",
        "gpu=cpu",
        "dtype=bfloat16&gpu=t4",
        "torch=2.6",
        "mode=inference",
        "train=head",
        "accumulate=2",
    ],
)
def test_another_work_is_traced_anew(traces, change):
    shelf, query = Shelf(), f"{GPT2}&dtype=float32&batch=2"
    estimate(parse_query(query), store=shelf)
    traces.clear()
    found = estimate(parse_query(with_keys(query, change)), store=shelf)
    assert traces
    traces.clear()
    again = estimate(parse_query(with_keys(query, change)), store=shelf)
    assert traces == []
    assert plain(found) == plain(again)


@pytest.mark.exhaustive
def test_batches_that_are_on_no_line_are_added_to_those_that_were_traced(traces):
    shelf = Shelf()
    first = estimate(parse_query(f"{STAGE}&batch=2"), store=shelf)
    if not any(BY_ITSELF in note for note in first.notes):
        pytest.fail("this model is affine in the batch now: take another one")
    traces.clear()
    both = estimate(parse_query(f"{STAGE}&batch=2,4"), store=shelf)
    assert ("float32", 2) not in traces
    assert both.estimates[0] == first.estimates[0]


def test_a_failure_is_kept_too(monkeypatch):
    query, shelf, tried = parse_query(f"{RESNET}&dtype=float32&batch=2"), Shelf(), []

    def fail(*arguments, batch, **named):
        tried.append(batch)
        raise TraceError("no kernel for that")

    monkeypatch.setattr(trace, "trace", fail)
    first = estimate(query, store=shelf)
    assert first.failures == {"float32": "no kernel for that"}
    assert plain(estimate(query, store=shelf)) == plain(first)
    assert tried == [2]


@pytest.mark.parametrize("bound", [True, False])
def test_bytes_that_cannot_be_read_are_traced_again(traces, bound):
    query, shelf = f"{RESNET}&dtype=float32&batch=2", Shelf()
    first = estimate(parse_query(query), store=shelf)
    for name in shelf:
        shelf[name] = (digest_name(name) if bound else b"") + b"something else"
    assert plain(estimate(parse_query(query), store=shelf)) == plain(first)


def test_bytes_of_another_question_are_traced_again(traces):
    query, small, large = f"{RESNET}&dtype=float32&batch=2", Shelf(), Shelf()
    first = estimate(parse_query(query), store=small)
    estimate(parse_query(with_keys(query, "image=96")), store=large)
    moved = Shelf({name: large[name.replace("image=64", "image=96").replace("(64, 64)", "(96, 96)")] for name in small})
    traces.clear()
    assert plain(estimate(parse_query(query), store=moved)) == plain(first)
    assert traces


def test_a_cell_that_does_not_fit_is_traced_once(traces):
    wide = SMALL_LLAMA | {"hidden_size": 2048, "intermediate_size": 8192}
    query = f"arch=config:{encode_config(json.dumps(wide))}&seq=16&dtype=float32&batch=1&gpu=custom:2GiB@8.0"
    shelf = Shelf()
    report = estimate(parse_query(query), store=shelf)
    assert not report.estimates[0].fits and len(report.loop) > 2
    assert traces == [("float32", 1)]
    again = estimate(parse_query(query), store=shelf)
    kept_loop = estimate(parse_query(f"{query}&outputs=kept"), store=shelf)
    assert plain(again) == plain(report) and traces == [("float32", 1)]
    (freed,) = (row for row in kept_loop.loop if row.decision.startswith("outputs are freed"))
    (kept,) = (row for row in report.loop if row.decision == "outputs are kept during the backward pass")
    assert freed.bytes == -kept.bytes


def test_a_report_grows_from_the_counts_on():
    reports = list(Estimator(parse_query(f"{GPT2}&dtype=float32,bfloat16&batch=1,4&focus=bfloat16:4")).reports())
    assert [len(report.estimates) for report in reports] == [0, 1, 2, 2, 4, 4]
    assert reports[0].model.parameters == 53_561_088
    assert reports[1].find("bfloat16", 4) == reports[-1].find("bfloat16", 4)
    assert [report.pending for report in reports][-3:] == [("float32",), ("float32",), ()]
    assert reports[-1].focus == Focus(dtype="bfloat16", batch=4)
    joined = reports[0]
    known = set()
    for report in reports[1:]:
        joined = report.without(known).after(joined)
        known |= {(row.dtype, row.batch) for row in report.estimates}
    assert joined == reports[-1]


def test_the_cells_of_all_dtypes_stand_before_the_largest_batch_of_those_not_in_focus():
    query = f"{GPT2}&dtype=float32,bfloat16,float16&batch=1,4&focus=bfloat16:4"
    reports = list(Estimator(parse_query(query)).reports())
    assert [(len(report.estimates), [row.dtype for row in report.max_batch]) for report in reports] == [
        (0, []),
        (1, []),
        (2, []),
        (2, ["bfloat16"]),
        (4, ["bfloat16"]),
        (6, ["bfloat16"]),
        (6, ["float32", "bfloat16"]),
        (6, ["float32", "bfloat16", "float16"]),
    ]


# Each batch size is traced by itself: a schedule has other steps with more microbatches.
STAGE = f"arch=config:{encode_config(json.dumps(SMALL_LLAMA))}&seq=16&dtype=float32&pp=2&rank=0"


def test_cells_that_are_traced_by_themselves_come_one_by_one_the_one_in_focus_first():
    shelf = Shelf()
    reports = list(Estimator(parse_query(f"{STAGE}&batch=2,4,8&focus=float32:4"), store=shelf).reports())
    grown = [[row.batch for row in report.estimates] for report in reports]
    assert grown == [[], [4], [2, 4], [2, 4, 8], [2, 4, 8]]
    assert any(BY_ITSELF in note for note in reports[-1].notes)
    again = list(Estimator(parse_query(f"{STAGE}&batch=2,4,8&focus=float32:4"), store=shelf).reports())
    assert plain(again[-1]) == plain(reports[-1])
    assert [len(report.estimates) for report in again] == [0, 1, 3, 3]


@pytest.mark.parametrize("question", [STAGE, STAGE.removesuffix("&pp=2&rank=0")])
def test_a_dtype_ends_after_two_batch_sizes_that_do_not_fit_if_it_may(traces, question):
    # a layer's attention of 4 heads in float32, its probabilities alone: 4 * 8192^2 * 4 bytes = 1 GiB for each sample
    query = parse_query(question.replace("seq=16", "seq=8192&attention=eager&gpu=custom:2GiB@8.9&batch=2,4,6,8"))
    *_, report = Estimator(query, stops=True).reports()
    assert [(row.batch, row.fits) for row in report.estimates] == [(2, False), (4, False)]
    assert report.left_out("float32") == (6, 8)
    assert "float32: batch 6, 8 not computed: two smaller batch sizes do not fit" in report.notes
    assert all(batch < 6 for _, batch in traces)
    whole = estimate(query)
    assert [row.batch for row in whole.estimates] == [2, 4, 6, 8]
    assert whole.left_out("float32") == ()
    assert [row for row in whole.estimates if row.batch < 6] == [*report.estimates]


def test_no_line_is_traced_where_two_batch_sizes_do_not_fit(traces):
    """As the question without an end answers, with the tapes of the two batch sizes alone; a larger device takes up from there."""
    # a layer's attention of 4 heads in float32, its probabilities alone: 4 * 12288^2 * 4 bytes = 2.25 GiB for each sample
    question = STAGE.replace("seq=16&dtype=float32&pp=2&rank=0", "seq=12288&attention=eager&dtype=float32&batch=1,2,4")
    small, shelf = parse_query(f"{question}&gpu=custom:2GiB@8.0"), Shelf()
    *_, report = Estimator(small, store=shelf, stops=True).reports()
    assert [(row.batch, row.fits) for row in report.estimates] == [(1, False), (2, False)]
    assert report.left_out("float32") == (4,)
    assert {batch for _, batch in traces} == {1, 2}
    whole = estimate(small)
    assert [*report.estimates] == [row for row in whole.estimates if row.batch < 4]
    assert report.max_batch == whole.max_batch
    traces.clear()
    *_, again = Estimator(small, store=shelf, stops=True).reports()
    assert plain(again) == plain(report) and not traces
    large = parse_query(f"{question}&gpu=custom:100GiB@8.0")
    *_, fits = Estimator(large, store=shelf, stops=True).reports()
    assert plain(fits) == plain(estimate(large))


def test_what_was_traced_before_a_job_was_stopped_is_not_traced_again(traces):
    query, shelf = parse_query(f"{STAGE}&batch=2,4,8"), Shelf()
    for report in Estimator(query, store=shelf).reports():
        if len(report.estimates) == 2:
            break
    traces.clear()
    gone_on = estimate(query, store=shelf)
    assert traces == [("float32", 8)]
    assert plain(gone_on) == plain(estimate(query))


def test_what_is_proposed_to_look_at_changes_once_while_cells_come():
    reports = list(Estimator(parse_query(f"{STAGE}&batch=2,4,8")).reports())
    proposed = [report.focus and report.focus.batch for report in reports]
    assert proposed == [None, 2, 2, 8, 8]


def test_a_batch_size_that_cannot_be_traced_leaves_those_before_it(monkeypatch):
    real, query, shelf, tried = trace.trace, parse_query(f"{STAGE}&batch=2,4,8,16"), Shelf(), []

    def fail_at_eight(blueprint, module, work, *, batch, **arguments):
        tried.append(batch)
        if batch == 8:
            raise TraceError("no kernel for that")
        return real(blueprint, module, work, batch=batch, **arguments)

    monkeypatch.setattr(trace, "trace", fail_at_eight)
    report = estimate(query, store=shelf)
    assert [row.batch for row in report.estimates] == [2, 4]
    assert "float32: no kernel for that" in report.notes
    assert report.failures == {}
    tried.clear()
    assert plain(estimate(query, store=shelf)) == plain(report)
    assert tried == []


# 2.0 B parameters, whose weights in half precision are 4 GB
HUGE = f"arch=config:{encode_config(json.dumps({'model_type': 'gpt2', 'n_layer': 2, 'n_embd': 8192, 'n_head': 64}))}"


@pytest.mark.parametrize(
    "query",
    [
        f"{GPT2}&batch=1,4&focus=bfloat16:1",
        f"{GPT2}&batch=1",
        f"{GPT2}&batch=1,2,4",
        f"{HUGE}&seq=8&batch=1,4&gpu=custom:2GiB@8.0",
    ],
)
def test_a_batch_of_one_stands_before_the_others_are_traced(traces, query):
    reports = Estimator(parse_query(f"{query}&dtype=bfloat16")).reports()
    next(reports)
    first = next(reports)
    assert traces == [("bfloat16", 1)]
    assert first.pending == ("bfloat16",)
    *_, last = reports
    assert first.estimates == last.estimates[:1]
    assert first.focus == Focus(dtype="bfloat16", batch=1)


@pytest.mark.parametrize("gpu", ["a100-80gb", "custom:2GiB@8.0", "custom:4GiB@8.0"])
def test_what_is_looked_at_stands_before_the_other_batch_sizes_are_replayed(gpu):
    query = f"{GPT2}&dtype=bfloat16&batch=1,2,4,8,64,512&gpu={gpu}"
    _, one, first, *_, last = Estimator(parse_query(query)).reports()
    assert [row.batch for row in one.estimates] == [1]
    assert first.focus == last.focus
    assert one.estimates[0] == first.estimates[0]
    assert len(first.estimates) < len(last.estimates)


@needs_sam2_video
@pytest.mark.exhaustive
def test_what_a_module_keeps_from_its_first_step_is_in_no_tape():
    # Its memory of the video is made in the first step that it ever does.
    config = encode_config(json.dumps({"model_type": "sam2_video", **RARE["sam2_video"]}))
    query = f"arch=config:{config}&mode=inference&dtype=bfloat16&batch="
    begun, anew = (estimate(parse_query(f"{query}{batches}")) for batches in ("1,2", "1,2&focus=bfloat16:2"))
    for one, other in zip(begun.estimates, anew.estimates, strict=True):
        assert replace(one, curve=other.curve) == other  # lines may write events of one moment in another order


@pytest.mark.parametrize(
    ("query", "focus"),
    [
        (f"{RESNET}&batch=1,4", Focus(dtype="float32", batch=4)),
        (f"{GPT2}&batch=1,4", Focus(dtype="bfloat16", batch=4)),
        (f"{GPT2}&dtype=float16,float32&batch=2", Focus(dtype="float16", batch=2)),
        # 1.5 B parameters with AdamW: 25 GB in float32, 12.5 GB in bfloat16, of 14.6 GiB on a T4
        pytest.param(
            "arch=hf:gpt2-xl&seq=8&gpu=t4&dtype=float32,bfloat16&batch=1,512",
            Focus(dtype="bfloat16", batch=1),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_is_looked_at_first(query, focus):
    assert estimate(parse_query(query)).focus == focus


def test_a_batch_that_the_model_refuses_is_refused_from_kept_counts_too():
    query, shelf = "arch=torchvision:deeplabv3_resnet50&image=64&dtype=float32&batch=", Shelf()
    report = estimate(parse_query(f"{query}1,2"), store=shelf)
    assert any(note.startswith("batch 1 is left out: batch for training") for note in report.notes)
    with pytest.raises(RequestError, match=r"^batch for training .*: given 1, allowed at least 2"):
        estimate(parse_query(f"{query}1"), store=shelf)
