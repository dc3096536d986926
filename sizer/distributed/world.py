"""A world of ranks with a single real rank: a fake process group, and patches of torch.distributed and FSDP1 for meta tensors.

All patches of torch.distributed are in this module; read in PyTorch 2.11 and 2.15. FSDP1's flat parameters are those of
torch/distributed/fsdp/_flat_param.py, _init_utils.py, _common_utils.py.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from sizer.base.errors import RequestError
from sizer.catalogue.parallel import PER_HOST
from sizer.distributed.described_gpus import Accelerator, devices_answer

_DEVICE = torch.device("meta")  # made here: in a trace this call would name meta itself, which has no memory


@contextmanager
def flat_parameters_patched(on_no_device: Callable[[Tensor], bool]) -> Iterator[None]:
    """Make FSDP1 treat tensors on meta as tensors of a device, within the context.

    FSDP1 only materializes tensors that are `on_no_device`. It distinguishes their storages, and tells the allocator which
    streams use them.
    """
    from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils

    def needs_materializing(module: nn.Module, ignored: Iterable[nn.Parameter], *others: Any) -> tuple[bool, bool]:
        left_out = set(ignored)
        held = (*(one for one in module.parameters() if one not in left_out), *module.buffers())
        return any(on_no_device(tensor) for tensor in held), False

    def record_stream(tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def compute_device(*args: Any) -> torch.device:
        return _DEVICE

    def moved_to(device_id: int | torch.device | None, *args: Any) -> torch.device | None:
        return None if device_id is None else _DEVICE

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(_init_utils, "_get_compute_device", compute_device))
        stack.enter_context(mock.patch.object(_init_utils, "_get_device_from_device_id", moved_to))
        stack.enter_context(mock.patch.object(_init_utils, "_need_to_materialize_module", needs_materializing))
        for module in (_flat_param, _runtime_utils):
            stack.enter_context(mock.patch.object(module, "_no_dispatch_record_stream", record_stream))
        yield


@contextmanager
def _storages_told_apart(is_needed: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Return distinct storage addresses to FSDP1, which compares storages by address.

    All addresses are 0 on meta, as are those of storages without bytes on any device.
    """
    address = torch.UntypedStorage.data_ptr

    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta" or not is_needed():
            return address(storage)
        return storage._cdata if storage.nbytes() else 0

    with mock.patch.object(torch.UntypedStorage, "data_ptr", data_ptr):
        yield


# --------------------------------------------------------------------------------------------------------------- world


_FAKE = "fake_on_meta"
_DEVICES = ("cpu", "cuda", "meta")


_remembered: Hashable = None  # the groups of the world in DTensor's caches


@contextmanager
def world_of(
    size: int,
    rank: int,
    accelerator: Accelerator,
    *,
    groups: Hashable = None,
    backend: str = "fake",
    local: int = PER_HOST,
    on_no_device: Callable[[Tensor], bool] = lambda tensor: False,
) -> Iterator[None]:
    """Make this process one rank of a world, as `torchrun` would start it, within the context.

    torch.distributed is initialized with a process group without peers. Code that initializes it again finds it initialized.

    Args:
        size: Number of ranks.
        rank: This rank.
        accelerator: The answers of torch.cuda.
        groups: The same for worlds with equal meshes, None if not known. DTensor's caches of one are valid for the next.
        backend: Name of torch.distributed's backend. With "fake", pipeline stages do not query each other
            (torch/distributed/pipelining/schedules.py, 2.15); with another name the queries need answers.
        local: Number of ranks, and of GPUs, of one host.
        on_no_device: Returns True for a tensor on meta that does not represent a tensor of the device.

    Raises:
        RequestError: torch.distributed is initialized already.
    """
    if dist.is_initialized():
        raise RequestError(
            "world",
            given=f"{size}, with torch.distributed initialized already",
            allowed="a process without a process group",
            todo="leave init_process_group() to the step, where it does nothing, or destroy the group before",
        )
    _import_scripted()
    local_rank = rank % local
    with ExitStack() as stack:
        stack.enter_context(devices_answer(accelerator, local_rank, count=local))
        stack.enter_context(_environment(size, rank, local_rank, min(size, local)))
        stack.enter_context(_joined(size, rank, backend, groups))
        if groups is None:
            stack.enter_context(_addresses_differ())
            stack.enter_context(_accelerate_forgets())
            stack.enter_context(flat_parameters_patched(on_no_device))
            stack.enter_context(_storages_told_apart())
        yield


@contextmanager
def _joined(size: int, rank: int, backend: str, groups: Hashable) -> Iterator[None]:
    """Within the context torch.distributed is initialized, and takes tensors on meta."""
    with ExitStack() as stack:
        stack.enter_context(_process_group(size, rank, backend))
        stack.enter_context(_meshes_kept_apart((size, rank, groups) if groups is not None else None))
        for patched in (
            _sharding_patched,
            _strides_looked_for_once,
            _fully_shard_patched,
            _replicated_patched,
            _random_states_moved,
            _normalized_over_ranks,
        ):
            stack.enter_context(patched())
        yield


@contextmanager
def alone(
    accelerator: Accelerator, on_no_device: Callable[[Tensor], bool], refuse: Callable[[int], None] = lambda ranks: None
) -> Iterator[None]:
    """Answer for the device, and let code create a process group of one rank, as scripts do without a launcher.

    PyTorch's NCCL group needs a driver, and ends the process without one. Groups on the host are PyTorch's own.

    Args:
        accelerator: The described device.
        on_no_device: See `world_of`.
        refuse: Called with the number of ranks if code joins more than one.
    """
    own, joined = dist.init_process_group, ExitStack()

    def init_process_group(backend: Any = None, init_method: Any = None, *more: Any, **kwargs: Any) -> None:
        asked = inspect.signature(own).bind(backend, init_method, *more, **kwargs).arguments
        ranks = asked.get("world_size", -1)
        ranks = int(os.environ.get("WORLD_SIZE", 1)) if ranks == -1 else ranks
        if ranks > 1:
            refuse(ranks)
        named = str(backend or "").lower()
        is_of_device = not named or "nccl" in named or "cuda" in named
        if ranks > 1 or not is_of_device or (asked.get("rank", -1) == -1 and "RANK" not in os.environ):
            own(backend, init_method, *more, **kwargs)
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            joined.enter_context(_joined(1, 0, "nccl", None))
            joined.enter_context(flat_parameters_patched(on_no_device))

    with devices_answer(accelerator, count=1), _storages_told_apart(dist.is_initialized), ExitStack() as stack:
        for place in (dist, device_mesh):
            stack.enter_context(mock.patch.object(place, "init_process_group", init_process_group))
        with joined:
            yield


@contextmanager
def _environment(size: int, rank: int, local_rank: int, local: int) -> Iterator[None]:
    """Set the variables that torchrun sets (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    numbers = {"WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local}
    texts = {name: str(number) for name, number in numbers.items()}
    with mock.patch.dict(os.environ, texts | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}):
        yield


@contextmanager
def _process_group(size: int, rank: int, backend: str) -> Iterator[None]:
    """Initialize PyTorch's own fake process group, also for meta tensors.

    User code that makes or destroys a group does nothing.

    `backend` is the backend name that it reports.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

    with _registered(_create_fake_pg):
        c10d.init_process_group(
            ",".join(f"{device}:{_FAKE}" for device in _DEVICES), rank=rank, world_size=size, store=FakeStore()
        )
        try:
            with ExitStack() as stack:
                for function in ("init_process_group", "destroy_process_group"):
                    stack.enter_context(mock.patch.object(dist, function, _nothing))
                stack.enter_context(mock.patch.object(dist, "get_backend", lambda group=None: backend))
                yield
        finally:
            dist.destroy_process_group()


@contextmanager
def _registered(create: Callable[..., Any]) -> Iterator[None]:
    """Register a backend with torch.distributed that calls `create` for all device types, within the context."""
    backend, name = dist.Backend, _FAKE.upper()
    tables = (backend.backend_list, backend.backend_capability, backend.backend_type_map,
              backend.default_device_backend_map, backend._plugins)  # fmt: skip
    before = [table.copy() for table in tables]
    backend.register_backend(_FAKE, create, extended_api=True, devices=list(_DEVICES))
    try:
        yield
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(was)
        delattr(backend, name)


@contextmanager
def _sharding_patched() -> Iterator[None]:
    """Hide DTensor's propagation of shapes and placements from the trace.

    It runs operators on fake tensors (torch/distributed/tensor/_sharding_prop.py), and their decompositions on meta tensors of
    the global shape (_decompositions.py). The result of an in-place operator is its first argument. Fake
    tensors of a GPU would draw with PyTorch's generator of it, and need no GPU as FakeTensorMode has it without one.
    """
    from torch.distributed.tensor._decompositions import DecompShardingStrategy
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    ask = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(propagator: Any, schema: Any) -> Any:
        if schema.is_inplace_op() and isinstance(schema.args_schema[0], DTensorSpec):
            return schema.args_schema[0].tensor_meta
        torch._C._ensureCUDADeviceGuardSet()
        with _disable_current_modes():
            return ask(propagator, schema)

    decompose = DecompShardingStrategy.propagate_strategy

    def unseen_parts(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return decompose(*args, **kwargs)

    with (
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen),
        mock.patch.object(DecompShardingStrategy, "propagate_strategy", unseen_parts),
    ):
        yield


@contextmanager
def _meshes_kept_apart(groups: Hashable) -> Iterator[None]:
    """Clear DTensor's caches of other worlds.

    They are keyed by meshes, which are equal in worlds with different groups: the shape of a view on a rank
    (torch/distributed/tensor/_sharding_prop.py), and the groups to use (_redistribute.py).
    """
    global _remembered
    if groups is None or groups != _remembered:
        _forget()
    _remembered = groups
    yield


def _forget() -> None:
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()


@contextmanager
def _strides_looked_for_once() -> Iterator[None]:
    """Search the tensors of a list for strided shards once.

    DTensor searches all tensors of a list once for each of them (torch/distributed/tensor/_sharding_prop.py; not in PyTorch
    2.11). This takes a third of the time for FSDP2 of an 8B model.
    """
    from torch.distributed.tensor import _sharding_prop as propagation
    from torch.distributed.tensor.placement_types import _StridedShard

    name = "_propagate_use_strided_shard_flag"
    if (pass_on := getattr(propagation, name, None)) is None:
        yield
        return
    asked, found = None, SimpleNamespace(args_spec=())

    def once(strategy: Any, schema: Any) -> None:
        nonlocal asked
        if schema is not asked:  # one spec with the flag and one without are sufficient
            specs = (
                spec for spec in schema.args_spec if any(isinstance(one, _StridedShard) for one in spec.placements)
            )
            flags = {spec.use_strided_shard_as_shard_order: spec for spec in specs}
            asked, found.args_spec = schema, tuple(flags.values())
        if found.args_spec:
            pass_on(strategy, found)

    with mock.patch.object(propagation, name, once):
        yield


@contextmanager
def _fully_shard_patched() -> Iterator[None]:
    """Let FSDP2 accept parameters on meta, and pad replaced parameters.

    FSDP2 refuses parameters on meta when training begins (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py), and does
    not pad parameters that were replaced on meta (_fsdp_param.py).
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    reset = FSDPParam.reset_sharded_param

    def reset_sharded_param(param: FSDPParam) -> None:
        reset(param)
        _pad(param)

    with (
        mock.patch.object(FSDPParamGroup, "_validate_no_meta_params", _nothing),
        mock.patch.object(FSDPParam, "reset_sharded_param", reset_sharded_param),
    ):
        yield


def _pad(param: Any) -> None:
    """Pad an FSDPParam with a shard that was replaced on meta, because all ranks gather the same size."""
    local = param.sharded_param._local_tensor
    if not local.is_meta or local.untyped_storage()._cdata == param._sharded_param_data.untyped_storage()._cdata:
        return
    dim, size = param.fsdp_placement.dim, param.padded_sharded_param_size
    length = local.size(dim) if local.numel() else 0
    padded = local if local.size() == size else local.new_zeros(size)
    param._sharded_param_data = padded.view(-1)
    param.sharded_param._local_tensor = padded.narrow(dim, 0, length)


@contextmanager
def _replicated_patched() -> Iterator[None]:
    """Skip DDP's comparison of the ranks' parameters in C++, which reads their values (torch/nn/parallel/distributed.py)."""
    with mock.patch.object(dist, "_verify_params_across_processes", _nothing):
        yield


@contextmanager
def _normalized_over_ranks() -> Iterator[None]:
    """Let SyncBatchNorm accept inputs on meta, where it requires a GPU or a private backend (torch/nn/modules/batchnorm.py)."""
    forward = nn.SyncBatchNorm.forward

    def forward_on_meta(module: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", lambda: "meta"):
            return forward(module, input)

    with mock.patch.object(nn.SyncBatchNorm, "forward", forward_on_meta):
        yield


@contextmanager
def _random_states_moved() -> Iterator[None]:
    """Move the state of the device's generator to meta when DTensor moves it to the device.

    Source: torch/distributed/tensor/_random.py.

    DTensor does so within a dispatch, where no function mode sends the device to meta.
    """
    from torch.distributed.tensor._random import OffsetBasedRNGTracker

    def get_device_state(tracker: Any) -> Tensor:
        return tracker._device_handle.get_rng_state().to("meta")

    with mock.patch.object(OffsetBasedRNGTracker, "_get_device_state", get_device_state):
        yield


@contextmanager
def _addresses_differ() -> Iterator[None]:
    """Return the addresses of storages for tensors on meta, whose own addresses are all 0.

    accelerate finds an optimizer's parameters by their addresses (accelerate/accelerator.py, 1.15). Addresses of live storages
    differ.
    """
    address = Tensor.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata if tensor.device.type == "meta" else address(tensor)

    with mock.patch.object(Tensor, "data_ptr", data_ptr):
        yield


@contextmanager
def _accelerate_forgets() -> Iterator[None]:
    """Reset accelerate's cached facts on the world when the context ends.

    accelerate stores them for all its objects (accelerate/state.py, 1.15), and transformers' losses reduce over its number of
    ranks.
    """

    def state() -> Any:
        return sys.modules.get("accelerate.state")

    if state() is not None and state().is_initialized():
        yield
        return
    try:
        yield
    finally:
        if state() is not None:
            state().AcceleratorState._reset_state(reset_partial_state=True)
            state().GradientState._reset_state()


def _import_scripted() -> None:
    """Import the modules that torch.jit.script compiles on import, which would fail among the stand-ins of a trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch.distributed.optim  # noqa: F401


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
