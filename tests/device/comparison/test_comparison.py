from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sizer.base.codec import DecodeError
from sizer.base.errors import DeviceError, RequestError
from sizer.catalogue.gpus import GPUS
from sizer.device.comparison.comparison import Comparison, compare
from sizer.device.comparison.counterpart import gpu_of
from sizer.device.comparison.row import Row
from sizer.device.record.measurement import SAMPLED, DeviceFacts, DeviceOutOfMemory, TensorBytes
from sizer.device.record.recording import Measured
from sizer.tape.tape import Loop, Tape
from tests.device.tapes import CPU, CUDA, GIB, QUERY, measured_from, report_of, tape_of, training

MIB = 2**20
LARGE = ("+", "c", 400_000, "aten::clone", "two.norm")
KEPT = ("+", "k", 3_000, "aten::clone", "two.norm", "activation")


def compared(
    device: list, estimate: list | None = None, *, facts: DeviceFacts = CPU, report: dict | None = None, **changes
) -> Comparison:
    """The comparison of two courses of the same training step."""
    tape, recording = tape_of(estimate or training()), tape_of(device)
    changes.setdefault("query", QUERY)
    return compare(report_of(tape, gpu_of(facts), **(report or {})), measured_from(recording, facts, **changes), tape)


# ---------------------------------------------------------------------------------------------------------------- rows


def test_signs_and_fractions_of_a_row():
    row = Row(quantity="weights_bytes", estimated_bytes=90, measured_bytes=100, tolerance=0.1)
    assert (row.difference_bytes, row.error, row.holds) == (-10, -0.1, True)
    assert replace(row, tolerance=0.09).holds is False
    assert replace(row, tolerance=0).holds is False
    assert replace(row, tolerance=0, allowance_bytes=10).holds is True
    assert replace(row, tolerance=None).holds is None
    assert replace(row, estimated_bytes=115).error == 0.15


def test_nothing_measured_has_no_fraction():
    row = Row(quantity="buffers_bytes", estimated_bytes=0, measured_bytes=0, tolerance=0)
    assert (row.error, row.holds) == (0.0, True)
    assert replace(row, estimated_bytes=8).error is None
    assert replace(row, estimated_bytes=8).holds is False


def test_on_the_cpu_what_the_tensors_take_is_promised_exact():
    comparison = compared(training(sides="device"))
    assert comparison.holds
    assert comparison.wrong == ()
    assert all(row.difference_bytes == 0 for row in comparison.rows)
    exact = {row.quantity for row in comparison.rows if row.tolerance == 0}
    assert {"weights_bytes", "gradients_bytes", "optimizer_bytes", "inputs_bytes", "activations_bytes"} <= exact
    assert {
        f"phases.{phase}.allocated_bytes" for phase in ("load", "forward", "backward", "optimizer", "step2")
    } <= exact
    # weights 1,000,000 + inputs 4,000 + gradients 1,000,000 + state 2,000,000
    assert comparison.find("peak_allocated_bytes").measured_bytes == 4_004_000
    assert comparison.find("peak_allocated_bytes").tolerance == 0.05
    assert comparison.find("activations_bytes").measured_bytes == 20_000
    assert comparison.verdict == "All 17 figures hold; the peak of allocated memory is exact (3.82 MiB)."


def test_on_the_cpu_nothing_is_reserved_and_the_process_is_not_compared():
    comparison = compared(training(sides="device"))
    assert not [row for row in comparison.rows if "reserved" in row.quantity or "process" in row.quantity]
    assert any("keeps no cache" in note and "not compared" in note for note in comparison.notes)
    assert comparison.process_in_range is None


def test_what_a_cpu_says_of_its_process_is_left_out():
    measured = measured_from(tape_of(training(sides="device")))
    phases = tuple(replace(phase, driver_bytes=GIB) for phase in measured.measurement.phases)
    tape = tape_of(training())
    told = Measured(measurement=replace(measured.measurement, phases=phases), recording=measured.recording)
    assert compare(report_of(tape, gpu_of(CPU)), told, tape).find("process_bytes") is None


def test_on_cuda_allocated_reserved_and_process_stand_beside_their_like():
    comparison = compared(training(sides="device"), facts=CUDA)
    rows = {row.quantity: row for row in comparison.rows}
    # Rounded to 512: 400,000 → 400,384; 600,000 → 600,064.
    assert rows["phases.load.allocated_bytes"].measured_bytes == 400_384 + 600_064
    assert rows["phases.load.allocated_bytes"].tolerance == 0
    assert rows["weights_bytes"].measured_bytes == 1_000_000
    assert rows["peak_reserved_bytes"].measured_bytes == comparison.estimate.peak_reserved_bytes
    process = rows["process_bytes"]
    # the recording's reserved bytes and 697 MiB of context; for an H200 the estimate takes 677
    assert process.measured_bytes - process.estimated_bytes == 20 * MIB
    assert comparison.process_in_range is True
    assert {row.tolerance for name, row in rows.items() if "reserved" in name} == {0.12}  # a CNN's aim
    assert comparison.family == "CNN"


def test_activations_on_cuda_are_what_the_counter_gained_on_both_sides():
    device = training(sides="device")
    measured = measured_from(tape_of(device), CUDA)
    # 8,000 → 8,192 and 12,000 → 12,288, and 96 that the input's 4,000 take beyond its bytes
    tensors = replace(measured.measurement.tensors, activations_bytes=8_192 + 12_288 + 96)
    told = Measured(measurement=replace(measured.measurement, tensors=tensors), recording=measured.recording)
    tape = tape_of(training())
    comparison = compare(report_of(tape, gpu_of(CUDA)), told, tape)
    assert comparison.find("activations_bytes").difference_bytes == 0
    assert any("the tensors themselves take 19.53 KiB" in note for note in comparison.notes)


def test_what_is_sampled_is_shown_and_not_judged():
    mps = DeviceFacts(device="mps", name="Apple M2", total_bytes=10 * GIB)
    comparison = compared(training(sides="device"), facts=mps, source=SAMPLED)
    assert comparison.find("peak_allocated_bytes").holds is None
    assert comparison.find("weights_bytes").holds is True
    assert any("sampled" in note for note in comparison.notes)


def test_numbers_that_autograd_saved_are_allowed_for_on_the_cpu():
    wrapped = [("+", "n1", 8, "", "two", "activation"), ("+", "n2", 8, "", "two", "activation")]
    comparison = compared([*training(forward=wrapped, sides="device")])
    row = comparison.find("phases.forward.allocated_bytes")
    assert (row.difference_bytes, row.allowance_bytes, row.holds) == (-16, 16, True)
    assert row.allowance == "Python numbers that autograd saved"
    assert compared(training(sides="device")).find("phases.forward.allocated_bytes").allowance_bytes == 0


# -------------------------------------------------------------------------------------------------------- what is wrong


def test_a_row_that_fails_names_category_phase_operator_and_module():
    device = [*training(forward=[KEPT], sides="device")]
    comparison = compared(device)
    assert not comparison.holds
    texts = {text.partition(" is ")[0]: text for text in comparison.wrong}
    # the copy is never released, so it is there at the end of every phase but load; the peaks are within 5 %
    assert list(texts) == [
        "activations_bytes",
        *(f"phases.{phase}.allocated_bytes" for phase in ("forward", "backward", "optimizer", "step2")),
    ]
    forward = texts["phases.forward.allocated_bytes"]
    assert "is 2.93 KiB (0.29%) too low: estimated 1,000.00 KiB" in forward
    assert "promised exact. At the end of forward: the device holds 2.93 KiB by aten::clone in two.norm" in forward
    assert "(activation) that the estimate has not" in forward
    assert comparison.verdict.startswith("12 of 17 figures hold; the peak of allocated memory is 0.07% too low")


def test_a_peak_that_fails_says_who_makes_it():
    (text,) = compared(training(forward=[LARGE, "-c"], sides="device")).wrong
    # The device: weights 1,000,000 + input 4,000 + first activation 8,000 + the copy 400,000 = 1,412,000.
    # The estimate: 1,012,000 + second activation 12,000 = 1,024,000, which is 388,000 less.
    assert text.startswith("phases.forward.peak_allocated_bytes is 378.91 KiB (27.48%) too low")
    assert "tolerance 5.0%. At the device's peak, aten::clone in two.norm: the device holds 390.63 KiB" in text
    (text,) = compared(training(sides="device"), training(forward=[LARGE, "-c"])).wrong
    assert "(37.89%) too high" in text
    assert "At the estimate's peak, aten::clone in two.norm: the estimate holds 390.63 KiB" in text


def test_tensors_that_differ_name_their_category():
    device = training(sides="device")
    device[0] = ("+", "w1", 500_000, "aten::to", "one", "parameter")
    texts = compared(device).wrong
    assert any(text.startswith("weights_bytes is 97.66 KiB (9.09%) too low") for text in texts)
    assert any("Category parameter, phase load" in text for text in texts)


def test_reserved_memory_that_differs_says_whether_events_or_rules_are_wrong():
    tape = tape_of(training())
    measured = measured_from(tape_of(training(sides="device")), CUDA)
    phases = tuple(
        replace(phase, peak_reserved_bytes=200 * MIB, reserved_bytes=200 * MIB) for phase in measured.measurement.phases
    )
    told = Measured(measurement=replace(measured.measurement, phases=phases), recording=measured.recording)
    comparison = compare(report_of(tape, gpu_of(CUDA)), told, tape)
    text = next(text for text in comparison.wrong if text.startswith("peak_reserved_bytes"))
    assert "Our replay of the device's own allocations reserves" in text
    assert text.endswith("the rules of the allocator differ")

    device = training(forward=[("+", "c", 60 * MIB, "aten::clone", "two")], sides="device")
    text = next(text for text in compared(device, facts=CUDA).wrong if text.startswith("peak_reserved_bytes"))
    assert text.endswith("the allocations differ, see where the two diverge")


def test_a_process_that_differs_names_the_context():
    tape = tape_of(training())
    measured = measured_from(tape_of(training(sides="device")), CUDA)
    phases = tuple(replace(phase, driver_bytes=2 * GIB) for phase in measured.measurement.phases)
    comparison = compare(
        report_of(tape, gpu_of(CUDA)), Measured(measurement=replace(measured.measurement, phases=phases)), tape
    )
    text = next(text for text in comparison.wrong if text.startswith("process_bytes"))
    assert "Outside the allocator the device holds" in text
    assert "the estimate assumes 677.00 MiB" in text
    assert comparison.process_in_range is False


# ------------------------------------------------------------------------------------------------------- out of memory

FAILED = DeviceOutOfMemory(
    phase="backward",
    requested_bytes=600_000,
    free_bytes=1_000,
    allocated_bytes=1_024_000,
    reserved_bytes=2 * MIB,
    message="no",
)


def cut(steps: list, phase: str) -> list:
    """The work up to the end of a phase."""
    return steps[: steps.index(f"={phase}") + 1]


def test_a_device_that_ran_out_of_memory_where_the_estimate_fits():
    comparison = compared(cut(training(sides="device"), "forward"), facts=CUDA, out_of_memory=FAILED)
    assert comparison.estimate.fits is True
    assert not comparison.holds
    assert "the device ran out of memory in backward" in comparison.wrong[0]
    assert comparison.verdict.startswith(
        "The device ran out of memory in backward, requesting 585.94 KiB with 1,000 B free; the estimate predicted that it fits; "
    )
    assert comparison.find("peak_allocated_bytes") is None
    assert comparison.find("phases.forward.allocated_bytes").holds
    assert any("did not complete the work" in note for note in comparison.notes)


def test_both_sides_run_out_of_memory():
    tiny = replace(CUDA, total_bytes=1000 * MIB, name="A small one")
    large = training(forward=[("+", "h", 700 * MIB, "aten.mm.default", "two", "activation")])
    comparison = compared(
        cut(training(sides="device"), "load"), large, facts=tiny, out_of_memory=replace(FAILED, phase="forward")
    )
    assert comparison.estimate.fits is False
    assert comparison.holds
    assert "as the estimate predicted (aten.mm.default in two would fail in forward)" in comparison.verdict


def test_a_device_that_does_what_does_not_fit_by_the_estimate():
    tiny = replace(CUDA, total_bytes=1000 * MIB, name="A small one")
    large = training(forward=[("+", "h", 700 * MIB, "aten.mm.default", "two", "activation")])
    comparison = compared(training(sides="device"), large, facts=tiny)
    assert "the estimate says that it does not fit" in comparison.wrong[0]
    assert "But the estimate says that it does not fit" in comparison.verdict


def test_work_that_was_not_even_tried():
    tape = tape_of(training())
    nothing = measured_from(tape_of([]), CUDA, out_of_memory=replace(FAILED, phase="load"))
    tensors = TensorBytes()
    told = Measured(measurement=replace(nothing.measurement, tensors=tensors))
    comparison = compare(report_of(tape, gpu_of(CUDA)), told, tape)
    assert comparison.rows == ()
    assert comparison.verdict.endswith("the estimate predicted that it fits, before anything was read.")
    assert Comparison.from_dict(comparison.to_dict()) == comparison


def test_another_end_is_told():
    comparison = compared(cut(training(sides="device"), "forward"), facts=CUDA, failure="the device was lost")
    assert comparison.verdict.startswith("The device did not complete the work (the device was lost); up to there")


# --------------------------------------------------------------------------------------------------------------- notes


def test_doubts_retries_and_versions_are_told():
    comparison = compared(
        training(sides="device"),
        facts=CUDA,
        doubts=("another process uses the device",),
        retries=3,
        versions={"torch": "2.11.0+cu130"},
        report={"uncounted": ["cuDNN's choice"]},
    )
    assert "the measurement may not be trusted: another process uses the device" in comparison.notes
    assert any("retried 3 times" in note for note in comparison.notes)
    assert "the estimate was made with torch 2.15.0, the measurement with 2.11.0+cu130" in comparison.notes
    assert "the estimate does not count: cuDNN's choice" in comparison.notes


def test_builds_of_one_version_are_the_same():
    comparison = compared(training(sides="device"), versions={"torch": "2.15.0+cpu"})
    assert not [note for note in comparison.notes if "was made with" in note]


def test_without_a_recording_the_figures_stand_alone():
    tape = tape_of(training())
    measured = measured_from(tape_of(training(forward=[KEPT], sides="device")))
    comparison = compare(report_of(tape, gpu_of(CPU)), Measured(measurement=measured.measurement), tape)
    assert (
        comparison.first_divergence,
        comparison.largest_divergences,
        comparison.scratch,
        comparison.measured_curve,
    ) == (
        None,
        (),
        (),
        (),
    )
    assert comparison.estimated_curve
    assert any("were not recorded" in note for note in comparison.notes)
    assert any(text.endswith("The place is unknown without a recording of the device") for text in comparison.wrong)


def test_a_recording_that_does_not_add_up_is_told():
    tape = tape_of(training())
    measured = measured_from(tape_of(training(sides="device")))
    phases = (replace(measured.measurement.phases[0], allocated_bytes=1_000_512), *measured.measurement.phases[1:])
    told = Measured(measurement=replace(measured.measurement, phases=phases), recording=measured.recording)
    comparison = compare(report_of(tape, gpu_of(CPU)), told, tape)
    assert any(
        "adds up to 1,000,000 bytes at the end of load, the counter says 1,000,512" in note for note in comparison.notes
    )


def test_a_report_of_other_work_is_refused():
    tape = tape_of(training())
    with pytest.raises(RequestError, match="given bfloat16 at batch 2, allowed float32 at batch 2"):
        compare(report_of(tape, gpu_of(CPU)), measured_from(tape, dtype="bfloat16"), tape)


def test_a_generation_of_too_many_steps_is_not_compared():
    tape = tape_of(training())
    length = len(tape.order)
    endless = replace(tape, loops=(Loop(begin=length - 2, end=length, count=10**7),))
    # 2 events, 10,000,000 times
    with pytest.raises(
        RequestError, match=r"too many steps to compare one by one: given 20,000,000 events, allowed 4,000,000"
    ):
        compare(report_of(tape, gpu_of(CPU)), measured_from(tape), endless)


# -------------------------------------------------------------------------------------------------------------- curves


def test_both_curves_have_the_same_places_and_keep_peaks_and_ends():
    device = training(forward=[LARGE, "-c"], sides="device")
    comparison = compared(device)
    curve, device_curve = comparison.estimated_curve, comparison.measured_curve
    assert len(curve) <= 200
    assert [(one.at, one.phase) for one in curve] == [(one.at, one.phase) for one in device_curve]
    assert [one.at for one in curve] == sorted(one.at for one in curve)
    ends = {one.phase: one for one in curve if one.at == int(one.at)}
    assert {phase: one.allocated_bytes for phase, one in ends.items()} == {
        use.phase: use.allocated_bytes for use in comparison.estimate.phases
    }
    for number, use in enumerate(comparison.measurement.phases):
        inside = [one.allocated_bytes for one in device_curve if one.phase == use.phase]
        assert max(inside) == use.peak_allocated_bytes
        assert device_curve[[one.at for one in device_curve].index(number + 1)].allocated_bytes == use.allocated_bytes


def test_curves_count_as_the_allocator_does():
    comparison = compared(training(sides="device"), facts=CUDA)
    assert max(one.allocated_bytes for one in comparison.measured_curve) == comparison.measurement.peak_allocated_bytes


# ------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("name", "mib", "capability", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", 81_153, (8, 0), "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 40_444, (8, 0), "a100-40gb"),
        ("NVIDIA H200", 143_167, (9, 0), "h200"),
        ("NVIDIA L40S", 45_589, (8, 9), "l40s"),
        ("NVIDIA L4", 22_565, (8, 9), "l4"),
        ("Tesla T4", 15_095, (7, 5), "t4"),
        ("NVIDIA GeForce RTX 4090", 24_217, (8, 9), "rtx-4090"),
        ("Tesla V100-SXM2-32GB", 32_494, (7, 0), "v100-32gb"),
        ("NVIDIA GeForce RTX 2080 Ti", 11_019, (7, 5), "rtx-2080-ti"),
        ("NVIDIA GeForce RTX 4070", 11_994, (8, 9), "rtx-4070"),
        ("NVIDIA GeForce RTX 4070 Ti", 12_007, (8, 9), "rtx-4070-ti"),  # the words of the 4070 are in its name, too
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16_376, (8, 9), "rtx-4090-laptop"),
        ("NVIDIA RTX 5000 Ada Generation", 32_200, (8, 9), "rtx-5000-ada"),
        ("AMD Instinct MI300X", 196_592, (9, 4), "mi300x"),  # AMD's capability is no number of NVIDIA's
    ],
)
def test_a_device_is_found_in_the_catalogue(name: str, mib: int, capability: tuple[int, int], key: str):
    gpu = gpu_of(DeviceFacts(device="cuda:0", name=name, total_bytes=mib * MIB, capability=capability))
    assert (gpu.key, gpu.total_bytes) == (key, mib * MIB)
    assert gpu.context_bytes == GPUS[key].context_bytes


@pytest.mark.parametrize(
    ("name", "mib", "capability"),
    [
        ("NVIDIA GeForce RTX 3080", 20_040, (8, 6)),  # the catalogue's have 10 and 12 GB
        ("NVIDIA A100X", 81_000, (8, 0)),
        ("NVIDIA GeForce RTX 5050 Laptop GPU", 4_096, (12, 0)),
    ],
)
def test_a_device_that_is_not_in_the_catalogue_is_made_from_its_facts(name: str, mib: int, capability: tuple[int, int]):
    gpu = gpu_of(DeviceFacts(device="cuda:1", name=name, total_bytes=mib * MIB, capability=capability))
    assert (gpu.key, gpu.name, gpu.total_bytes, gpu.capability) == ("cuda", name, mib * MIB, capability)
    assert gpu.source == "as the device reported"


def test_the_context_of_a_device_that_is_not_in_the_catalogue_follows_from_its_threads():
    facts = DeviceFacts(device="cuda:0", name="NVIDIA GeForce RTX 3080 X", total_bytes=20_040 * MIB, capability=(8, 6))
    # 80 multiprocessors of 1,536 threads, 2 KiB each: 240 MiB; the middle of Ampere's libraries, 76 MiB, 153 below, 589 above
    known = gpu_of(replace(facts, resident_threads=80 * 1536))
    assert (known.context_low_bytes, known.context_bytes, known.context_high_bytes) == (163 * MIB, 316 * MIB, 905 * MIB)
    # without the threads: as the catalogue's first of its capability, an A10 with 72 multiprocessors, 216 MiB and 76
    assert gpu_of(facts).context_bytes == 292 * MIB


def test_the_cpu_has_the_memory_that_it_reports():
    assert gpu_of(CPU) == replace(GPUS["cpu"], total_bytes=16 * GIB)


def test_a_device_that_does_not_say_how_much_memory_it_has():
    unknown = gpu_of(DeviceFacts(device="cuda:0", name="Unheard", total_bytes=None, capability=(9, 0)))
    assert unknown.total_bytes == GPUS["h100-80gb"].total_bytes
    assert "the device did not report its memory" in unknown.source
    assert gpu_of(DeviceFacts(device="cuda:0", name="NVIDIA H200", total_bytes=None)) == GPUS["h200"]


def test_a_kind_of_device_without_rules_is_refused():
    with pytest.raises(DeviceError, match="no estimate for this kind of device: given 'xpu:0', allowed cuda, mps, cpu"):
        gpu_of(DeviceFacts(device="xpu:0", name="Arc", total_bytes=GIB))


# ---------------------------------------------------------------------------------------------------------------- JSON


def test_json_and_back():
    comparison = compared(training(forward=[LARGE], backward=[KEPT], sides="device"))
    assert comparison.first_divergence is not None
    assert Comparison.from_dict(json.loads(json.dumps(comparison.to_dict(), allow_nan=False))) == comparison
    assert {
        "parting",
        "largest_partings",
    } <= comparison.to_dict().keys()  # what ledgers and files of schema 1 call them


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "comparison.schema was 2; allowed is 1"),
        ({"rows": [{}]}, r"comparison.rows\[0\]"),
        ({"family": "animal"}, "comparison.family"),
        ({"surprise": 1}, "only the keys of Comparison"),
    ],
)
def test_json_that_is_no_comparison_is_refused(change: dict, message: str):
    data = compared(training(sides="device")).to_dict() | change
    with pytest.raises(DecodeError, match=message):
        Comparison.from_dict(data)


def test_a_measurement_inside_is_checked_too():
    data = compared(training(sides="device")).to_dict()
    data["measurement"]["schema"] = 7
    with pytest.raises(DecodeError, match=r"measurement\.schema was 7"):
        Comparison.from_dict(data)


def test_tapes_for_tests_are_valid():
    assert isinstance(tape_of(training()), Tape)
