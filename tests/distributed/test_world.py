"""One rank of a world: what its code is told, what is refused, and that nothing of it stays."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard

import sizer
from sizer.base.errors import RequestError, TraceError
from sizer.distributed.described_gpus import Accelerator
from sizer.distributed.world import world_of
from tests.benchmarks.bench_torchtitan import reduced_as_before_july_2024

GPU = "h100-80gb"
H100 = Accelerator(capability=(9, 0), total_bytes=80 * 2**30, name="H100")


def replicated() -> Callable[[], None]:
    """A training script as torchrun starts it."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    device = torch.device("cuda", local_rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256, device=device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(4, 256, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fully_sharded_by_one() -> Callable[[], None]:
    dist.init_process_group("nccl", rank=0, world_size=1)
    model = FullyShardedDataParallel(nn.Linear(256, 256, device="cuda"), device_id=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.zeros(4, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded() -> Callable[[], None]:
    model = nn.Linear(256, 256, device="cuda")
    fully_shard(model, mesh=dist.init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(4, 256, device="cuda")

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def made_on_meta() -> Callable[[], None]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    fully_shard(model)
    model.to_empty(device="cuda")
    for layer in model:
        layer.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(4, 256, device="cuda")

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    return step


def test_parameters_made_on_meta_are_drawn_in_parts() -> None:
    estimate = sizer.size_step(made_on_meta, gpu=GPU, world=8, rank=3).estimates[0]
    assert estimate.weights_bytes == estimate.gradients_bytes == 2 * 4 * (256 * 256 + 256) // 8


def test_a_script_as_torchrun_starts_it() -> None:
    estimate = sizer.size_step(replicated, gpu=GPU, world=16, rank=11).estimates[0]
    # 256 * 256 + 256 elements of 4 bytes, of which every rank holds all
    assert estimate.weights_bytes == estimate.gradients_bytes == 4 * (256 * 256 + 256)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("setup", [replicated, fully_sharded_by_one], ids=["DDP", "FSDP1"])
def test_a_step_that_makes_a_group_of_one_rank_is_that_of_a_world_of_one(monkeypatch, setup) -> None:
    """PyTorch's own NCCL group ends a process that has no driver."""
    right = sizer.size_step(setup, gpu=GPU, world=1).estimates[0]
    for name, number in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, number)
    before = _what_is_patched()
    estimate = sizer.size_step(setup, gpu=GPU).estimates[0]
    assert (estimate.peak_allocated_bytes, estimate.peak_reserved_bytes) == (right.peak_allocated_bytes, right.peak_reserved_bytes)
    assert _what_is_patched() == before


def test_a_step_that_joins_more_ranks_without_a_world_is_refused(monkeypatch) -> None:
    for name, number in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, number)
    with pytest.raises(RequestError, match=r"^world: given none, where the step joins 8 ranks.*give world=8"):
        sizer.size_step(replicated, gpu=GPU)


@pytest.mark.parametrize(
    ("world", "rank", "rows", "biases"), [(1, 0, 256, 256), (8, 0, 32, 32), (3, 0, 86, 86), (3, 2, 84, 84)]
)
def test_each_rank_holds_its_part(world: int, rank: int, rows: int, biases: int) -> None:
    estimate = sizer.size_step(sharded, gpu=GPU, world=world, rank=rank).estimates[0]
    # FSDP2 shards the first dimension: 256 rows over 3 ranks are 86, 86 and 84, padded to 86 in storage
    padded = -(-256 // world)
    assert estimate.weights_bytes == 4 * (padded * 256 + padded)
    assert estimate.optimizer_bytes == 2 * 4 * (rows * 256 + biases)


_UNIT = 4 * 2**20  # bytes of a local tensor


def scattered() -> Callable[[], None]:
    x = torch.zeros(2**20, device="cuda")
    operators = torch.ops._c10d_functional

    def step() -> None:
        out = operators.reduce_scatter_tensor(x * 2, "sum", dist.get_world_size(), dist.group.WORLD.group_name)
        other = torch.empty_like(x)
        operators.wait_tensor(out)
        del other

    return step


def test_a_functional_collective_holds_its_input_until_it_is_waited_for() -> None:
    estimate = sizer.size_step(scattered, gpu=GPU, world=4).estimates[0]
    # x, its double, a quarter of it, and another tensor of its size; the double would be free without the collective
    assert estimate.peak_allocated_bytes == 3 * _UNIT + _UNIT // 4


def twice_used(distributed: bool) -> Callable[[], None]:
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    x, grad = (torch.zeros(2**20, device="cuda", requires_grad=needs) for needs in (True, False))

    def step() -> None:
        whole, given = (DTensor.from_local(one, mesh, [Shard(0)]) if distributed else one.view(-1) for one in (x, grad))
        torch.autograd.backward([whole * 2, whole * 3], [given, given])
        x.grad = None

    return step


@pytest.mark.parametrize(("distributed", "units"), [(True, 7), (False, 6)])
def test_gradients_are_added_in_place_unless_they_are_of_a_subclass(distributed: bool, units: int) -> None:
    estimate = sizer.size_step(lambda: twice_used(distributed), gpu=GPU, world=2).estimates[0]
    # x, its gradient's start, two outputs and two gradients; the sum of two DTensors is a third one
    # (can_accumulate_inplace() of torch/csrc/autograd/input_buffer.cpp)
    assert estimate.peak_allocated_bytes - units * _UNIT in range(0, 4096)


def test_code_is_told_of_its_world() -> None:
    with world_of(16, 11, H100):
        assert (dist.get_world_size(), dist.get_rank(), torch.cuda.current_device(), torch.cuda.device_count()) == (
            16,
            11,
            3,
            8,
        )
        assert {name: os.environ[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
            "WORLD_SIZE": "16", "RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
        }  # fmt: skip
        assert torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory == H100.total_bytes
        assert torch.accelerator.current_accelerator().type == "cuda"


def _what_is_patched() -> list[object]:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    backend = dist.Backend
    return [
        dict(vars(torch.cuda)),
        dict(vars(torch.accelerator)),
        dict(vars(dist)),
        dict(vars(FSDPParamGroup)),
        dict(vars(ShardingPropagator)),
        dict(vars(backend)) | {"backend_list": [*backend.backend_list], "_plugins": {**backend._plugins}},
        dict(backend.backend_capability),
        dict(backend.default_device_backend_map),
        dict(os.environ),
        torch._C._get_accelerator,
        torch.UntypedStorage.resize_,
        torch.Tensor.record_stream,
        hasattr(torch, "meta"),
        dist.is_initialized(),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_it_stays(fails: bool) -> None:
    def failing() -> Callable[[], None]:
        raise ValueError("no such data")

    sizer.size_step(sharded, gpu=GPU, world=2)  # what PyTorch imports lazily is there
    before = _what_is_patched()
    if fails:
        with pytest.raises(TraceError, match=r"no such data"):
            sizer.size_step(failing, gpu=GPU, world=2)
    else:
        sizer.size_step(sharded, gpu=GPU, world=2)
    assert _what_is_patched() == before


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"world": 0}, r"^world: given 0, allowed 1 or more"),
        ({"world": 4, "rank": 4}, r"^rank: given 4, allowed 0 to 3"),
        ({"rank": 1}, r"^rank: given 1, allowed 0 without a world"),
        ({"world": 2, "gpu": "cpu"}, r"^gpu: given cpu, allowed a CUDA GPU with world="),
    ],
)
def test_worlds_that_cannot_be_are_refused(asked: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sizer.size_step(sharded, **{"gpu": GPU} | asked)


def test_a_world_within_a_world_is_refused() -> None:
    with (
        world_of(2, 0, H100),
        pytest.raises(RequestError, match=r"^world: given 2, with torch.distributed initialized"),
    ):
        sizer.size_step(sharded, gpu=GPU, world=2)


def of_accelerate(version: int) -> Callable[[], None]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    own = {"use_orig_params": True} if version == 1 else {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        **own,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.zeros(4, 256, device="cuda")).sum())
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("version", [1, 2])
def test_accelerates_plugin_shards_as_pytorch_does(version: int) -> None:
    pytest.importorskip("accelerate")
    estimate = sizer.size_step(lambda: of_accelerate(version), gpu=GPU, world=8, rank=0).estimates[0]
    shard = 4 * (256 * 256 + 256 + 8 * 256 + 8) // 8
    assert estimate.weights_bytes == estimate.gradients_bytes == shard
    assert estimate.optimizer_bytes == 2 * shard, (
        "two averages of every parameter, as the optimizer has found them again"
    )
    from accelerate.state import PartialState

    assert PartialState._shared_state == {}, "transformers' losses would reduce over ranks that are gone"


def test_what_fsdp2_reduced_before_july_2024_was_allocated_on_the_stream_that_reduces(monkeypatch: pytest.MonkeyPatch):
    streams: list[int] = []
    allocate = DefaultReduceScatter.allocate

    def seen(reduce: DefaultReduceScatter, *args: object, **others: object) -> Tensor:
        streams.append(torch.cuda.current_stream().stream_id)
        return allocate(reduce, *args, **others)

    def setup(reduced: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model).to_empty(device="cuda")
        batch = torch.zeros(1, 2048, device="cuda")

        def step() -> None:
            with reduced():
                model(batch).sum().backward()

        return step

    monkeypatch.setattr(DefaultReduceScatter, "allocate", seen)
    peaks = []
    for reduced, count in ((nullcontext, 2), (reduced_as_before_july_2024, 1)):
        streams.clear()
        report = sizer.size_step(functools.partial(setup, reduced), gpu="h100-80gb", world=8)
        peaks.append(report.estimates[0].peak_allocated_bytes)
        assert len(set(streams)) == count  # of what is reduced, and of what comes of it
    assert peaks[0] > peaks[1]  # today what is reduced lives until the next layer's is
