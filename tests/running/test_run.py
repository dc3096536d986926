"""`sizer run` over the null driver: what the script prints, what is reported, exit statuses."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn

from sizer import size_step
from sizer.catalogue.gpus import GPUS
from sizer.tracing.values.boxes import MATCHED
from tests.running.conftest import ROOT, DryRunner

MIB = 2**20
WIDTH = 1024
ELEMENTS = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH  # of train.py's parameters: two weights, two biases


def test_a_script_stops_after_its_steps_and_is_reported(dry_run: DryRunner, tmp_path: Path):
    saved = tmp_path / "model.pt"
    done = dry_run("--gpu", "rtx-3060-12gb", "--steps", "2", "--", "train.py", "--save", str(saved))
    assert done.status == 0, done.stderr
    row = done.figures
    assert (done.json["script_status"], done.json["steps"], done.json["route"]) == ("stopped", 2, "driver")
    assert [use["phase"] for use in row["phases"]] == ["load", "step1", "step2", "rest"]
    assert row["weights_bytes"] == 4 * ELEMENTS
    assert row["optimizer_bytes"] == 8 * ELEMENTS  # the step counters of AdamW are on the host
    assert row["gradients_bytes"] == 4 * ELEMENTS
    # the peak is in the optimizer's step: parameters, gradients, state, and one more copy of all by foreach, at least
    assert row["peak_allocated_bytes"] > 20 * ELEMENTS
    assert sum(row["at_peak"].values()) == row["peak_allocated_bytes"]
    assert not saved.exists() and done.json["not_saved"] == [str(saved)]
    assert any("nothing was computed on the device" in note for note in done.json["notes"])
    assert any(read["where"].endswith("train.py:25") for read in done.json["unknown_reads"]), done.json["unknown_reads"]
    assert any(row["line"].endswith("train.py:21") for row in done.json["lines_at_peak"])
    assert {row["module"] for row in done.json["modules_at_peak"]} >= {"0", "2"}
    assert "sizer/running" not in str(done.json["lines_at_peak"])


@pytest.mark.parametrize(
    "setting",
    ["", pytest.param("expandable_segments:True", marks=pytest.mark.full)],
)
def test_the_replay_is_what_pytorch_counts(dry_run: DryRunner, setting: str):
    """PyTorch's own counters, which the script prints, are those of the replayed tape; with --strict it runs as on the device."""
    words = ("--strict", "--steps", "0", "--", "train.py", "--steps", "3", "--empty")
    done = dry_run(*words, PYTORCH_ALLOC_CONF=setting)
    printed = re.search(r"allocated (\d+) reserved (\d+)", done.stdout)
    row = done.figures
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"]) == tuple(map(int, printed.groups()))
    assert done.json["script_status"] == "completed"


def test_more_than_the_device_has_is_5_and_says_how_much_is_missing(dry_run: DryRunner):
    # parameters, gradients, two states in float32: 16 bytes an element; 8 * 10,240² elements are 12.5 GiB, more than 11.65
    done = dry_run("--gpu", "rtx-3060-12gb", "--skip-draws", "--", "train.py", "--width", "10240")
    assert done.status == 5, done.stderr
    row = done.figures
    assert row["fits"] is False and row["out_of_memory"]["phase"] == "step1"
    assert done.json["missing_bytes"] == row["process_bytes"] - GPUS["rtx-3060-12gb"].total_bytes > 0
    assert "rtx-a6000" in done.json["fits_on"] and "rtx-3060-12gb" not in done.json["fits_on"]
    assert done.json["host_bytes"] < 2**30 and "It does not fit" in done.stdout


def test_strict_raises_pytorchs_own_error_at_the_scripts_line(dry_run: DryRunner):
    done = dry_run("--gpu", "rtx-3060-12gb", "--strict", "--skip-draws", "--", "train.py", "--width", "10240")
    assert done.status == 5
    assert re.search(
        r"OutOfMemoryError: CUDA out of memory\. Tried to allocate .* GPU 0 has a total capacity of 11\.65 GiB",
        done.stderr,
    )
    assert re.search(r"train\.py\", line \d+, in <module>", done.stderr) and "sizer/running" not in done.stderr
    assert done.json["script_status"] == "out of memory"


def test_an_error_of_the_script_keeps_its_traceback_and_is_1(dry_run: DryRunner):
    done = dry_run("--", "failing.py")
    assert done.status == 1
    assert 'failing.py", line 9, in <module>' in done.stderr and "ValueError: an error of the script" in done.stderr
    assert (done.json["script_status"], done.json["steps"]) == ("failed", 1)
    assert done.json["fits_on"] == [] and "It fits" not in done.stdout  # the rest of the script did not run


@pytest.mark.exhaustive
def test_a_gan_with_a_scaler_steps_both_optimizers(dry_run: DryRunner):
    done = dry_run("--", "gan.py")
    assert done.status == 0, done.stderr
    assert [use["phase"] for use in done.figures["phases"]] == ["load", "step1", "step2", "step3", "rest"]
    assert "step 2 scale 65536.0" in done.stdout and "step 3" not in done.stdout
    assert done.figures["optimizer_bytes"] > 0 and done.json["assumed_counts"] == []


def test_counts_of_known_masks_are_those_of_the_data(dry_run: DryRunner):
    done = dry_run("--steps", "0", "--", "tagger.py")
    assert done.status == 0, done.stderr
    assert done.json["assumed_counts"] == []
    assert [use["phase"] for use in done.figures["phases"]] == ["load", *(f"step{n}" for n in range(1, 7)), "rest"]


def test_values_are_followed_in_kernels_that_are_python_functions(dry_run: DryRunner):
    done = dry_run("--steps", "0", "--", "operators.py")
    assert done.status == 0, done.stderr
    printed = [line for step in range(3) for line in (f"kept {216 - step}", f"positions {40 + step}")]
    assert done.stdout.splitlines()[:6] == printed
    assert done.json["assumed_counts"] == []


def test_checkpoints_that_are_not_written_are_read_again(dry_run: DryRunner, tmp_path: Path):
    done = dry_run("--", "folds.py")
    assert done.status == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("fold ")] == [
        f"fold {fold} 2.303 cpu 0" for fold in range(3)
    ]
    assert done.json["not_saved"] == ["best.pt"] and not (tmp_path / "best.pt").exists()
    assert (tmp_path / "host.pt").exists()  # of the host alone
    # of the last fold alone: its weights and their copy in the checkpoint, gradients, and two states of the optimizer's own and of
    # the checkpoint's; earlier folds would add as much each
    weights = 4 * (256 * 512 + 512 + 512 * 10 + 10)
    assert done.figures["phases"][-1]["allocated_bytes"] < 8 * weights


def test_wrapped_states_sorted_scores_and_printed_tensors(dry_run: DryRunner):
    done = dry_run("--route", "both", "--", "states.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr[-2000:]
    assert len(re.findall(r"^tensor\(\[.*\], device='cuda:0'\) tensor\(\[0\., 0\.\], device='cuda:0'\)$", done.stdout, re.M)) == 2
    assert done.stdout.count("equal False True False\n") == 4
    assert done.stdout.count("third 100\n") == 4  # known, although only the dtype of the other tensor is
    assert done.figures["optimizer_bytes"] == 2 * done.figures["weights_bytes"]  # each is of two tensors
    assert done.json["assumed_counts"] == []  # six graphs, in whatever order


def test_values_that_nobody_computed_pass_checks_and_are_counted(dry_run: DryRunner):
    done = dry_run("--route", "both", "--", "checks.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.json
    printed = ["torch.Size([2, 4])", "torch.Size([4, 3]) False", "unfinished 1", "boxes 50", "detected 100"]
    assert done.stdout.splitlines()[:10] == 2 * printed
    assert {row["where"].split(": ")[1] for row in done.json["assumed_counts"]} >= {
        "__getitem__ selects all 20 elements",
        "__setitem__ selects all 20 elements",
        "nms keeps all 50 boxes",
        MATCHED,
    }


@pytest.mark.exhaustive
def test_torch_cuda_answers_alike_on_both_routes(dry_run: DryRunner):
    printed = []
    for route in ("driver", "meta"):
        done = dry_run("--route", route, "--steps", "0", "--", "answers.py")
        assert done.status == 0, done.stderr
        printed.append(done.stdout.splitlines()[:12])
    assert printed[0] == printed[1] and printed[0][-1].startswith("can't convert cuda:0 device type tensor to numpy")


def test_a_script_without_optimizer_reports_what_it_measured(dry_run: DryRunner):
    done = dry_run("--gpu", "t4", "--", "inference.py")
    assert done.status == 0, done.stderr
    assert "shape (32, 64, 256) sure 512" in done.stdout  # an unknown mask selects all of 8 * 64
    assert (done.json["script_status"], done.json["steps"]) == ("completed", 0)
    (assumed,) = done.json["assumed_counts"]
    assert "inference.py:12" in assumed["where"] and assumed["count"] == 4
    assert "with assumed counts" in done.stdout and done.figures["gradients_bytes"] == 0


@pytest.mark.parametrize("route", ["driver", "meta"])
def test_tokens_that_nothing_computed_do_not_end_a_generation(dry_run: DryRunner, tmp_path: Path, route: str):
    done = dry_run("--route", route, "--", "generating.py", str(tmp_path))
    assert done.status == 0, done.stderr
    assert "beams [4, 28] " in done.stdout  # 16 + 12 tokens
    # in the middle of four shares of 8,000 tokens: (2 * number + 1) * 8,000 / 8
    tokens = "[1000, 3000, 5000, 7000]"
    assert done.stdout.count(f"lengths [12, 12, 12, 12] first {tokens} {tokens}") == 2
    # tensors of the host are what they are, those of the device are not written
    assert "loaded [0.0, 1.0, 2.0, 3.0]" in done.stdout
    assert done.json["not_saved"] == [str(tmp_path / "device.safetensors")]


@pytest.mark.parametrize(
    "words",
    [
        ("--", "torchrun", "--nproc_per_node=4", "ranks.py"),
        pytest.param(("--world", "4", "--rank", "2", "--", "ranks.py"), marks=pytest.mark.full),
        pytest.param(("--", "accelerate", "launch", "--num_processes", "4", "ranks.py"), marks=pytest.mark.full),
    ],
    ids=["torchrun", "world", "accelerate"],
)
def test_one_rank_of_four_runs_with_nccl(dry_run: DryRunner, words: tuple[str, ...]):
    done = dry_run("--steps", "0", *words)
    assert done.status == 0, done.stderr
    rank = 2 if "--rank" in words else 0
    assert f"world 4 local {rank} names ['rank {rank}', 'rank {rank}'" in done.stdout
    assert (done.json["world"], done.json["rank"]) == (4, rank)
    # DDP's buckets hold the gradients once more
    assert done.figures["peak_allocated_bytes"] > 4 * 4 * ELEMENTS


@pytest.mark.parametrize(
    "script",
    [
        "train.py",
        "losses.py",
        "drawn.py",
        "denoising.py",
        "operators.py",
        "offloading.py",
        "places.py",
        *(
            pytest.param(script, marks=pytest.mark.exhaustive)
            for script in ("functional.py", "folds.py", "detector.py", "speech.py", "masks.py", "typed.py", "recurrent.py")
        ),
    ],
)
def test_route_meta_counts_as_the_driver_does(dry_run: DryRunner, script: str):
    done = dry_run("--route", "both", "--", script)
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.json


@pytest.mark.parametrize(
    "words",
    [("single.py",), pytest.param(("torchrun", "--nproc-per-node=1", "single.py"), marks=pytest.mark.exhaustive)],
    ids=["script", "torchrun"],
)
def test_a_group_of_one_rank_counts_alike_on_both_routes(dry_run: DryRunner, words: tuple[str, ...]):
    done = dry_run("--route", "both", "--", *words)
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr[-2000:]
    assert done.stdout.count("told [{'rank': 0}] 1 nccl") == 2, done.stdout


def test_the_scripts_own_recordings_and_compiled_code_run(dry_run: DryRunner):
    """CUPTI would end the process; Dynamo would break its graphs at each call that the values follow."""
    done = dry_run("--route", "both", "--snapshot", "run.pickle", "--", "recorded.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.json
    assert done.stdout.count("breaks 0 snapshot True\n") == 6
    counters = [line for line in done.stdout.splitlines() if line.startswith("counters")]
    assert len(counters) == 6 and counters[:3] == counters[3:]
    # the report lists what was compiled
    assert len(done.json["compiled"]["regions"]) == 1 and "recorded.py" in done.json["compiled"]["regions"][0]
    assert "torch.compile, compiled region: loss_of (recorded.py:" in done.stdout
    # the script ends its own recording; that of the run goes on
    assert done.figures["phases"][-1]["phase"] == "rest" and done.json["lines_at_peak"]


_LONG = (("synchronized.py", 3), ("stages.py", 0), ("compiled_ddp.py", 1), ("by_tokens.py compiled", 1))


@pytest.mark.parametrize(
    ("script", "rank"),
    [
        ("sharded.py", 0),
        ("by_tokens.py", 1),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _LONG),
        pytest.param("stages.py", 1, marks=pytest.mark.full),
    ],
)
def test_route_meta_counts_ranks_as_the_driver_does(dry_run: DryRunner, script: str, rank: int):
    done = dry_run("--route", "both", "--rank", str(rank), "--", "torchrun", "--nproc_per_node=4", *script.split())
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr[-2000:]


def test_a_script_that_spawns_its_ranks_runs_one_of_them(dry_run: DryRunner):
    done = dry_run("--route", "both", "--world", "4", "--rank", "2", "--", "spawned.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr[-2000:]
    # on each route, rank 2 loads what rank 0 saves, which therefore runs first
    assert done.stdout.count("starting 4\n") == 4 and (done.json["world"], done.json["rank"]) == (4, 2)


_PRINTED = {0: f"objects {[{'of': 0}] * 4} ['for 0'] 12 []", 2: "objects None ['for 2'] 0 []"}


@pytest.mark.parametrize(("rank", "printed"), _PRINTED.items())
def test_distributed_checkpoints_are_read_and_not_written(dry_run: DryRunner, tmp_path: Path, rank: int, printed: str):
    block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    weights = {f"{number}.{name}": part for number in range(3) for name, part in block.state_dict().items()}
    with pytest.warns(UserWarning, match="save in a single process"):
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "there", no_dist=True)
    (folder := tmp_path / "made").mkdir()
    words = "torchrun", "--nproc_per_node=4", "parts.py", str(tmp_path / "there"), str(folder)
    done = dry_run("--route", "both", "--steps", "0", "--rank", str(rank), "--", *words)
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr[-2000:]
    assert done.stdout.splitlines().count(printed) == 2, done.stdout[:2000]
    assert done.json["not_saved"] == [str(folder / "step3"), str(folder / "last")] and not any(folder.iterdir())


@pytest.mark.exhaustive
def test_route_meta_refuses_processes_that_share_the_device(dry_run: DryRunner):
    code = """
import torch, torch.multiprocessing as mp
model = torch.nn.Linear(8, 8).cuda().share_memory()
print(model(torch.ones(2, 8, device="cuda")).shape)
mp.Process(target=print, args=(model,)).start()
"""
    done = dry_run("--route", "meta", "--", "python", "-c", code)
    assert done.status == 3 and "torch.Size([2, 8])" in done.stdout, done.stderr
    assert "a process that the script starts is not traced" in done.stderr and "--route driver" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["driver", "meta"])
def test_more_ranks_than_asked_for_are_refused_with_the_option(dry_run: DryRunner, tmp_path: Path, route: str):
    code = "import torch.distributed as dist; dist.init_process_group('nccl', rank=0, world_size=4, init_method='tcp://127.0.0.1:29513')"
    done = dry_run("--route", route, "--", "python", "-c", code)
    assert done.status != 0 and "joins a world of 4 ranks" in done.stderr and "--world 4" in done.stderr, done.stderr


def test_selective_checkpointing_sees_only_the_scripts_operators(dry_run: DryRunner):
    # with the gpu's own grouped product, since capability 9.0; both routes run the recomputation
    done = dry_run("--gpu", "h100-80gb", "--route", "both", "--", "grouped_experts.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("tokens")]
    assert len(lines) >= 12 and set(lines) == {f"tokens {[128] * 8} {[128] * 8}"}


def test_tokens_are_spread_evenly_over_experts_on_both_routes(dry_run: DryRunner):
    done = dry_run("--route", "both", "--", "experts.py")
    assert done.status == 0, done.stderr
    allocated = re.search(r"allocated ([\d,]+) and ([\d,]+) bytes", done.json["route_reason"])
    assert allocated is not None and allocated[1] == allocated[2], done.json["route_reason"]
    assert {line.split()[1] for line in done.stdout.splitlines() if re.fullmatch(r"\d 128", line)} == {"128"}
    (assumed,) = done.json["assumed_counts"]
    assert assumed["count"] == 24 and assumed["where"].endswith("where counts choices that are spread evenly")


@pytest.mark.exhaustive
def test_an_optimizer_that_converges_takes_every_iteration(dry_run: DryRunner):
    done = dry_run("--route", "both", "--", "closures.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.stderr
    assert [use["phase"] for use in done.figures["phases"]] == ["load", "step1", "step2", "step3", "rest"]
    # four iterations of four evaluations, and of five with a line search, which accepts its first point; on both routes
    assert done.stdout.count("calls 9\n") == 2 and done.stdout.count("calls 27\n") == 2
    assert {row["where"].split(" was taken to ")[1] for row in done.json["assumed_counts"]} == {
        f"evaluate its closure {count} times, without reaching a tolerance" for count in (4, 5)
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["driver", "meta"])
def test_a_trainer_loads_its_best_model(dry_run: DryRunner, route: str):
    done = dry_run("--route", route, "--steps", "0", "--", "best.py")
    assert (done.status, done.json["script_status"], done.json["steps"]) == (0, "completed", 4), done.stderr[-2000:]
    assert "loaded [['lm_head.weight']] evaluated ['epoch']" in done.stdout or "loaded [[]] evaluated" in done.stdout


@pytest.mark.exhaustive
def test_route_meta_is_taken_where_the_driver_cannot_run(dry_run: DryRunner):
    done = dry_run("--gpu", "v100-16gb", "--", "train.py")
    assert done.status == 0, done.stderr
    assert done.json["route"] == "meta" and "7.0" in done.json["route_reason"]
    assert [use["phase"] for use in done.figures["phases"]] == ["load", "step1", "step2", "step3", "rest"]
    done = dry_run("--route", "meta", "--", "failing.py")
    assert done.status == 1 and "ValueError: an error of the script" in done.stderr


def test_a_script_for_a_mac_runs_on_one(dry_run: DryRunner):
    """Its device, torch.mps's counters and its peaks, which are those of the same step by size_step."""
    done = dry_run("--gpu", "m4-24gb", "--steps", "0", "--", "mac.py")
    assert done.status == 0 and done.json["route"] == "meta", done.stderr
    assert "is mps:0 True False mps mps\ncuda False\n" in done.stdout
    kept = done.figures["phases"][-1]
    assert f"allocated {kept['allocated_bytes']} driver {kept['reserved_bytes']}\n" in done.stdout
    script = runpy.run_path(str(ROOT / "tests" / "running" / "scripts" / "mac.py"))
    script["make"].__globals__["DEVICE"] = "mps"
    stepped = {use.phase: use.peak_allocated_bytes for use in size_step(script["make"], gpu="m4-24gb").estimates[0].phases}
    ran = {use["phase"]: use["peak_allocated_bytes"] for use in done.figures["phases"]}
    assert (ran["load"], ran["step1"], ran["step2"]) == (stepped["load"], stepped["optimizer"], stepped["step2"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "cpu"), "--gpu: given cpu, allowed a GPU; run the script itself"),
        (("--gpu", "m4-24gb", "--world", "2"), "--world: given 2 with --gpu m4-24gb, allowed 1: a Mac has one GPU"),
    ],
)
def test_what_no_dry_run_is_on_is_refused(dry_run: DryRunner, words: tuple[str, ...], said: str):
    done = dry_run(*words, "--", "mac.py")
    assert done.status == 2 and said in done.stderr


@pytest.mark.parametrize("route", ["driver", "meta"])
def test_pinned_memory_is_reported(dry_run: DryRunner, route: str):
    done = dry_run("--route", route, "--", "offloading.py")
    # two saved tensors of 256 x 2,048 floats; two of 256 x 512 are small, and not counted on route meta
    assert done.json["pinned_bytes"] == {"driver": 5, "meta": 4}[route] * 2**20
    assert "; pinned memory: " in done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("route", ["driver", "meta"])
def test_other_libraries_run_and_their_workspaces_are_named(dry_run: DryRunner, route: str):
    done = dry_run("--route", route, "--", "libraries.py", *(["dense"] if route == "meta" else []))
    assert done.status == 0, done.stderr
    assert "(2, 201, 41) (300,) (300, 2) [(300, 300), (300, 300), (300, 300)] (300, 300)" in done.stdout
    assert {text.split(":")[0] for text in done.json["uncounted"]} == {"workspaces of cuFFT", "workspaces of cuSOLVER"}


def test_a_guard_fails_over_a_size(dry_run: DryRunner):
    done = dry_run("--fail-over", "100MiB", "--", "train.py")
    assert done.status == 5 and "more than 104,857,600" in done.stderr
    assert done.figures["peak_reserved_bytes"] > 100 * MIB


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--gpu", "rtx-9999", "--", "train.py"), "gpu: given 'rtx-9999'"),
        (("--", "missing.py"), "script: given 'missing.py', allowed a file that exists"),
        ((), "run has no script"),
        (("--fail-over", "20 apples", "--", "train.py"), "is not a size: write for example 20GiB"),
        (("--world", "2", "--rank", "2", "--", "train.py"), "--rank: given 2, allowed 0 to 1"),
    ],
)
def test_bad_input_is_2_and_one_line(dry_run: DryRunner, words: tuple[str, ...], text: str):
    done = dry_run(*words)
    assert done.status == 2 and text in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_device_without_kernels_is_4(dry_run: DryRunner):
    done = dry_run("--gpu", "v100-16gb", "--route", "driver", "--", "train.py")
    assert done.status == 4 and "7.0" in done.stderr, done.stderr


@pytest.mark.full
def test_code_and_modules_run_as_python_runs_them(dry_run: DryRunner, tmp_path: Path):
    code = "import sys, torch; print(__name__, sys.argv, sys.path[0] == ''); torch.empty(2**20, device='cuda')"
    done = dry_run("--", "python", "-c", code, "--flag")
    assert done.status == 0 and "__main__ ['-c', '--flag'] True" in done.stdout, done.stderr
    assert done.figures["peak_allocated_bytes"] == 4 * MIB
    (tmp_path / "package.py").write_text("import os, sys; print(__name__, sys.argv[1:], os.getcwd() in sys.path[0])")
    done = dry_run("--", "-m", "package", "word")
    assert done.status == 0 and "__main__ ['word'] True" in done.stdout, done.stderr
    assert "allocated nothing on a device" in done.stdout


LOOP = """
import os, subprocess, sys, time, torch
torch.empty(2**20, device="cuda")
subprocess.Popen(["sleep", "1234"])
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("to", ["group", pytest.param("parent", marks=pytest.mark.full)])
def test_ctrl_c_ends_all_processes_and_reports(dry_run: DryRunner, tmp_path: Path, to: str):
    (tmp_path / "loop.py").write_text(LOOP)
    process = subprocess.Popen(
        [sys.executable, "-m", "sizer", "run", "--", str(tmp_path / "loop.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored if the tests run in the background
    )
    assert process.stdout.readline() == "ready\n"
    if to == "group":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after 0 optimizer steps" in stdout and "4.00 MiB allocated" in stdout
    end = time.monotonic() + 20
    with pytest.raises(ProcessLookupError, match="No such process"):  # no process of the session is left
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.1)


@pytest.mark.full
def test_a_limit_of_time_reports_where_it_was(dry_run: DryRunner, tmp_path: Path):
    (tmp_path / "loop.py").write_text(LOOP)
    done = dry_run("--seconds", "2", "--", str(tmp_path / "loop.py"))
    assert done.status == 0 and done.json["script_status"] == "out of time"
    assert "loop.py:9" in done.json["script_message"]
