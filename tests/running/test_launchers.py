"""Launchers: what they start, and scripts whose parallelism they decide."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from sizer.base.errors import RequestError
from sizer.running.command_line import read_command
from tests.running.conftest import DryRunner

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
CONFIG = str(SCRIPTS / "fully_sharded.yaml")
DEEPSPEED = find_spec("deepspeed") is not None


@pytest.mark.parametrize(
    ("words", "world", "local", "rank_option"),
    [
        (["deepspeed", TRAIN], 8, 8, "--local_rank"),
        (["deepspeed", "--num_gpus", "4", "--master_port=1234", TRAIN, "--deepspeed", "ds.json"], 4, 4, "--local_rank"),
        (["deepspeed", "--num_gpus=2", "--num_nodes", "3", TRAIN], 6, 2, "--local_rank"),
        (["deepspeed", "-i", "localhost:1,3,5", TRAIN], 3, 3, "--local_rank"),
        (["deepspeed", "--include", "a@b", TRAIN], 16, 8, "--local_rank"),
        (["deepspeed", "--include", "a:0,1@b:0,1", "--no_local_rank", TRAIN], 4, 2, ""),
        (["python", "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", TRAIN], 2, 2, "--local_rank"),
        (["torchrun", "--nnodes=2", "--nproc-per-node", "gpu", TRAIN], 16, 8, ""),
        (["python", "-m", "torch.distributed.launch", "--nproc_per_node=2", TRAIN], 2, 2, "--local-rank"),
        (["python", "-m", "torch.distributed.launch", "--use_env", "--nproc_per_node=2", TRAIN], 2, 2, ""),
    ],
)
def test_a_launcher_starts_ranks(words: list[str], world: int, local: int, rank_option: str):
    command = read_command(words)
    assert (command.world, command.local, command.rank_option, command.target) == (world, local, rank_option, TRAIN)
    assert command.arguments == tuple(words[words.index(TRAIN) + 1 :])


def test_a_host_file_tells_the_ranks_of_each_host(tmp_path: Path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\none slots=4\ntwo slots=4  # new\nthree slots=8\n")
    command = read_command(["deepspeed", "-H", str(hosts), "--num_nodes", "2", TRAIN])
    assert (command.world, command.local) == (8, 4)


def test_accelerate_reads_its_config_file_and_its_options():
    command = read_command(["accelerate", "launch", "--config_file", CONFIG, "--num_processes=16", TRAIN, "--lr", "1"])
    told = dict(command.environment)
    assert (command.world, command.local, command.arguments) == (16, 16, ("--lr", "1"))
    assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"], told["ACCELERATE_MIXED_PRECISION"]) == ("true", "2", "bf16")
    assert told["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert not {"CUDA_VISIBLE_DEVICES", "WORLD_SIZE"} & set(told)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "world", "told"),
    [
        (["--multi_gpu", "--num_processes", "8", "--num_machines", "2"], 8, {"ACCELERATE_MIXED_PRECISION": "no"}),
        (["--gpu_ids", "2", "--mixed_precision", "fp16"], 1, {"ACCELERATE_MIXED_PRECISION": "fp16"}),
        (["-m", "--num_processes=2", "--multi_gpu", "--dynamo_backend", "inductor"], 2, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
    ],
)
def test_accelerate_without_a_config_file(words: list[str], world: int, told: dict[str, str]):
    command = read_command(["accelerate", "launch", *words, TRAIN])
    assert command.world == world and told.items() <= dict(command.environment).items()
    assert command.kind == ("module" if "-m" in words else "script")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(["accelerate", "launch", "--no-such-option", TRAIN], "--no-such-option", marks=pytest.mark.exhaustive),
        pytest.param(["accelerate", "launch", "--tpu", TRAIN], "TPU", marks=pytest.mark.exhaustive),
        (["accelerate", "launch", "--config_file", "no-such-file.yaml", TRAIN], "no-such-file.yaml"),
        (["deepspeed", "--no-such-option", TRAIN], "--no-such-option"),
        (["deepspeed", "--exclude", "localhost:0", TRAIN], "--exclude"),
        (["deepspeed", "--num_gpus", "2"], "no script"),
        (["deepspeed", "no-such-script.py"], "no-such-script.py"),
    ],
)
def test_a_launcher_that_cannot_start_says_why(words: list[str], why: str):
    with pytest.raises(RequestError, match=why):
        read_command(words)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", ["0", "3"])
def test_accelerate_shards_what_the_config_file_says(dry_run: DryRunner, rank: str):
    """accelerate leaves the model on meta while it is sharded: on route meta that is not the device."""
    done = dry_run("--route", "both", "--rank", rank, "--", "accelerate", "launch", "--config_file", CONFIG, "launched.py")
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.json
    assert done.stdout.count(f"FSDP bf16 4 {rank} {rank}\n") == 2


@pytest.mark.full
@pytest.mark.parametrize("rank", ["0", "5"])
@pytest.mark.parametrize(
    ("stage", "optimizer", "offload"),
    [
        ("0", "own", "none"),
        ("1", "AdamW", "none"),
        ("2", "AdamW", "none"),
        ("2", "own", "none"),
        ("3", "AdamW", "none"),
        ("3", "own", "cpu"),
    ],
)
def test_deepspeed_runs_its_own_engine(dry_run: DryRunner, rank: str, stage: str, optimizer: str, offload: str):
    assert DEEPSPEED, "install deepspeed"
    launch = ("deepspeed", "--num_gpus", "8", "zero.py", stage, optimizer, offload)
    done = dry_run("--route", "both", "--rank", rank, "--", *launch)
    assert done.status == 0 and "driver and meta agree" in done.json["route_reason"], done.json
    assert done.stdout.count(f"local {rank} world 8\n") == 2
