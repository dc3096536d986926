"""The report: its numbers, its JSON, its CSV, and that it comes back only as it went."""

from __future__ import annotations

import copy
import csv
import io
import json
from dataclasses import replace

import pytest

from sizer.base.codec import DecodeError, encode
from sizer.report.report import Report
from sizer.tape.affine import fit_affine
from sizer.tape.family import TapeFamily
from tests.report.reports import MIB, family, make_report, step
from tests.tape.tapes import make_tape

# The public contract of DESIGN.md, word for word.
KEYS = {"schema", "query", "versions", "model", "estimates", "max_batch", "notes", "uncounted"}
MODEL_KEYS = {
    "name", "class", "parameters", "trainable_parameters", "buffers", "tied_parameters", "unregistered_tensors",
    "real_tensors",
}  # fmt: skip
ESTIMATE_KEYS = {
    "dtype", "batch", "weights_bytes", "buffers_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes", "process_bytes", "process_low_bytes", "process_high_bytes",
    "peak_phase", "peak_op", "peak_module", "at_peak", "phases", "fits",
}  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return make_report()


def test_tensor_bytes_are_exact(report):
    row = report.find("float32", 16)
    assert (row.weights_bytes, row.buffers_bytes, row.gradients_bytes, row.optimizer_bytes) == (1000, 24, 1000, 2000)
    assert row.activations_bytes == 300 * 16 + 4
    assert report.find("float32", 5) is None


def test_peaks_are_the_allocators(report):
    row = report.find("float32", 4)
    # after the workspace of 8 MiB, in rounded bytes: weight 1024, buffer 512, input 512, relu 1536 (1200), loss 512;
    # then grad 1024 is the peak of forward and backward, and optimizer adds state 2048 and scratch 512 but freed relu, loss:
    # backward 512 + 4608 = 5120; optimizer 1024 + 512 + 512 + 1024 + 2048 + 512 = 5632
    assert row.peak_allocated_bytes == 8 * MIB + 5632
    assert (row.peak_phase, row.peak_op) == ("optimizer", "aten.scratch")
    # 2 MiB of small blocks, and 8 MiB out of a segment of 20
    assert row.peak_reserved_bytes == 22 * MIB
    # outside the allocator a T4 holds 2 KiB for each of 40 * 1,024 threads, 80 MiB, and libraries of 55; at the least nothing,
    # for 153 less would be below, at the most 589 more
    assert row.process_bytes == (22 + 135) * MIB
    assert row.process_low_bytes == 22 * MIB  # the workspace is one that PyTorch sizes itself
    assert row.process_high_bytes == (22 + 724) * MIB
    assert row.fits is True


def test_inference_has_no_gradients_and_counts_what_forward_leaves():
    row = make_report(mode="inference").find("float32", 4)
    assert (row.gradients_bytes, row.optimizer_bytes) == (0, 0)
    assert row.activations_bytes == 300 * 4 + 4


def test_rows_come_dtype_by_dtype_with_their_largest_batch(report):
    assert [(row.dtype, row.batch) for row in report.estimates] == [
        ("float32", 4), ("float32", 16), ("bfloat16", 4), ("bfloat16", 16),
    ]  # fmt: skip
    assert [row.dtype for row in report.max_batch] == ["float32", "bfloat16"]
    # a T4 has 14,910 MiB: less 437 of context, 8 of workspace once more, 20 of its segment and 2 of small blocks, for
    # input and activations of 100 and 300 bytes a sample: more than 2**20 samples
    assert all(row.batch == 2**20 for row in report.max_batch)


def test_what_was_assumed_and_what_failed_is_listed(report):
    assert report.uncounted == ("NCCL", "balanced routing")
    assert report.failures == {"float16": "aten.foo has no meta kernel"}
    assert report.request == {
        "mode": "training",
        "optimizer": "adamw",
        "image_size": (224, 224),
        "checkpointing": False,
    }


def test_tapes_of_single_batches():
    report = make_report(tapes={"float32": TapeFamily(exact=(step(4),))}, batches=[4, 16])
    assert [row.batch for row in report.estimates] == [4]
    assert report.max_batch[0].batch == 4
    assert "float32, batch 16: not traced" in report.notes


def test_a_batch_too_large_is_a_note_not_a_crash():
    report = make_report(batches=[4, 2**60])
    assert any("give a smaller batch" in note for note in report.notes)
    assert [row.batch for row in report.estimates] == [4, 4]


def test_a_report_without_any_trace_still_counts():
    report = make_report(tapes={}, failures={"float32": "no kernel"})
    assert (report.model.parameters, report.estimates, report.max_batch) == (250, (), ())
    assert Report.from_dict(json.loads(report.to_json())) == report


def test_the_json_has_the_keys_of_the_contract(report):
    data = report.to_dict()
    assert data.keys() >= KEYS
    assert data["schema"] == 1
    assert data["model"].keys() >= MODEL_KEYS
    assert data["model"]["class"] == "Tiny"
    for row in data["estimates"]:
        assert row.keys() >= ESTIMATE_KEYS
        assert all(type(row[key]) is int for key in row if key.endswith("_bytes"))
        assert sum(row["at_peak"].values()) == row["peak_allocated_bytes"]
        assert [phase["phase"] for phase in row["phases"]] == ["load", "forward", "backward", "optimizer", "step2"]
        assert row["fits"] in (True, False, "uncertain")
    assert data["max_batch"][0].keys() >= {"dtype", "batch"}


def test_the_round_trip_is_exact(report):
    assert Report.from_dict(report.to_dict()) == report
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert Report.from_dict(encode(report)) == report


def test_the_public_json_has_the_points_of_a_curve(report):
    curve = report.to_dict()["estimates"][0]["curve"]
    assert curve[0].keys() == {"position", "phase", "by_category"}
    assert max(sum(point["by_category"]) for point in curve) == report.estimates[0].peak_allocated_bytes


def change(path: str, value: object):
    """Set one value of a report's plain form, by keys and positions with dots between."""

    def apply(data: dict) -> None:
        *parents, last = path.split(".")
        for key in parents:
            data = data[int(key) if key.isdecimal() else key]
        data[last] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (change("schema", 2), r"report\.schema was 2; allowed is 1"),
        (change("query", 7), r"report\.query was '7'; allowed is str"),
        (change("query", "x" * 100_001), "at most 100000 characters"),
        (change("query", "\ud800"), "without lone surrogates"),
        (change("estimates.0.batch", True), r"estimates\[0\]\.batch was 'True'; allowed is int"),
        (change("estimates.0.batch", 4.0), "allowed is int"),
        (change("estimates.0.batch", -1), r"0 to 2\*\*63 - 1"),
        (change("estimates.0.batch", 10**5000), "an integer of 16610 bits"),
        (change("estimates.0.fits", "maybe"), r"estimates\[0\]\.fits was 'maybe'"),
        (change("estimates.0.at_peak", {"parameter": "1"}), r"at_peak\.parameter was '1'"),
        (change("estimates.0.surprise", 1), r"only the keys of Estimate"),
        (change("estimates", {}), r"report\.estimates was dict of 0; allowed is a list"),
        (
            change("estimates.0.curve", [{"position": 1, "phase": "load", "by_category": [1, None]}]),
            r"estimates\[0\]\.curve\[0\]\.by_category contains",
        ),
        (
            change("estimates.0.curve", [{"position": 1, "phase": "load", "by_category": [1] * n} for n in (1, 2)]),
            "different numbers of categories",
        ),
        (
            change("estimates.0.curve", {"positions": [1, 2], "phases": [["load", 2]], "by_category": [[1, 2], [1]]}),
            "columns of different lengths",
        ),
        (change("model.class", None), r"report\.model\.class"),
        (change("gpu.capability", [8, 0, 0]), r"gpu\.capability"),
        (change("request", {"a": [{"b": 1}]}), r"request\.a"),
        (change("request", {"a": float("inf")}), r"request\.a"),
        (lambda data: data.pop("query"), "the keys query"),
        (lambda data: data["estimates"].append(None), r"estimates\[4\] was 'None'; allowed is an object"),
    ],
)
def test_anything_else_is_refused(report, apply, message):
    data = copy.deepcopy(report.to_dict())
    apply(data)
    with pytest.raises(DecodeError, match=message):
        Report.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "report", 1])
def test_what_is_not_an_object_is_refused(data):
    with pytest.raises(DecodeError, match="allowed is an object"):
        Report.from_dict(data)


def test_the_estimates_as_csv(report):
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert len(rows) == 4
    first, estimate = rows[0], report.estimates[0]
    assert (first["dtype"], first["batch"], first["fits"]) == ("float32", "4", "true")
    assert int(first["peak_allocated_bytes"]) == estimate.peak_allocated_bytes
    assert int(first["at_peak.optimizer_state"]) == 2048
    assert not any(" " in name for name in first)
    assert int(first["phases.forward.peak_allocated_bytes"]) == estimate.phases[1].peak_allocated_bytes
    assert "curve" not in first


def test_the_csv_has_the_device_the_largest_batch_and_the_link(report):
    rows = list(csv.DictReader(io.StringIO(report.to_csv(address="https://host"))))
    for row, estimate in zip(rows, report.estimates, strict=True):
        assert int(row["device_bytes"]) == report.gpu.total_bytes
        assert row["verdict"] == estimate.verdict
        assert row["largest_batch"] == str(report.largest_batch(estimate.dtype))
        assert row["link"] == f"https://host/?{report.query}&focus={estimate.dtype}:{estimate.batch}"
    short = list(csv.DictReader(io.StringIO(report.to_csv(longest_link=10))))
    assert {row["link"] for row in short} == {""}


def test_the_csv_has_no_columns_of_other_questions(report):
    plain = csv.DictReader(io.StringIO(report.to_csv())).fieldnames
    assert not {"kv_cache_bytes", "at_peak.kv_cache", "at_peak.frozen_parameter", "frozen_bytes", "host_bytes"} & set(plain)
    assert not [name for name in plain if name.startswith("phases.decode")]
    cached = replace(report.estimates[0], at_peak={**report.estimates[0].at_peak, "kv cache": 8}, kv_cache_bytes=8)
    held = csv.DictReader(io.StringIO(replace(report, estimates=(cached,)).to_csv())).fieldnames
    assert {"kv_cache_bytes", "at_peak.kv_cache"} <= set(held)
    asked = {"mode": "inference", "optimizer": "adamw", "image_size": None, "train": "all", "adapter_rank": 16}
    question = csv.DictReader(io.StringIO(replace(report, request=asked).to_csv())).fieldnames
    assert [name for name in question if name.startswith("request.")] == ["request.mode", "request.train"]


def test_the_csv_ends_with_the_question(report):
    asked = {"mode": "training", "image_size": (224, 320), "optimizer": "adamw", "dtypes": ("float32",)}
    rows = list(csv.DictReader(io.StringIO(replace(report, request=asked).to_csv())))
    for row in rows:
        assert list(row.items())[-5:] == [
            ("model.name", report.model.name),
            ("request.mode", "training"),
            ("request.image_size", "224x320"),
            ("request.optimizer", "adamw"),
            ("gpu.name", report.gpu.name),
        ]


def test_the_modules_as_csv(report):
    rows = list(csv.DictReader(io.StringIO(report.modules_csv())))
    assert [(row["path"], row["class_name"], row["parameter_bytes"]) for row in rows] == [
        ("", "Tiny", "0"),
        ("head", "Linear", "1000"),
    ]


def test_dtypes_may_share_a_tape():
    shared = family(scale=2)
    report = make_report(tapes={"bfloat16": shared, "float16": shared})
    assert replace(report.find("float16", 4), dtype="bfloat16") == report.find("bfloat16", 4)
    assert [row.dtype for row in report.max_batch] == ["bfloat16", "float16"]


def test_a_batch_for_which_the_tape_is_no_line_is_a_note():
    # 5 bytes at batch 2, 15 at batch 3: -5 at batch 1
    tape = fit_affine(make_tape([("a", 5)], batch=2), make_tape([("a", 15)], batch=3))
    report = make_report(tapes={"float32": TapeFamily(lines=((1, tape),))}, batches=[1, 2])
    assert [row.batch for row in report.estimates] == [2]
    assert any(
        note.startswith("float32, batch 1: aten.a in m.a (block 0) would need -5 bytes") for note in report.notes
    )
