"""Steps of one rank, written as for GPUs: run over the null driver, by gloo on the CPU, and traced on meta."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

Step = Callable[[], None]
VOCABULARY, TOKENS = 4096, 256


def llama(layers: int = 2, heads: int = 8, key_heads: int = 4, hidden: int = 512) -> LlamaForCausalLM:
    """A small Llama: 8.5 M parameters with two layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        use_cache=False,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def mesh_of(device: str, *sizes: int) -> DeviceMesh:
    return dist.init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def looped(
    model: nn.Module,
    device: str,
    *,
    batch: int = 2,
    accumulate: int = 1,
    last_only: Callable[[bool], Any] | None = None,
    clip: bool = False,
    optimized: str = "foreach",
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """A step of AdamW over `accumulate` passes; `last_only` is told of each whether it is the last, and may return a context."""
    optimizer = optimizer or torch.optim.AdamW(
        model.parameters(), lr=1e-4, foreach=optimized == "foreach", fused=optimized == "fused"
    )
    tokens = torch.zeros(batch, TOKENS, dtype=torch.long, device=device)

    def step() -> None:
        for number in range(accumulate):
            told = last_only(number == accumulate - 1) if last_only else None
            with told or nullcontext():
                model(input_ids=tokens, labels=tokens).loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _checkpoint(model: nn.Module) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()


def fsdp(
    device: str,
    *,
    make: Callable[[], nn.Module] = llama,
    dtype: torch.dtype = torch.float32,
    mesh: tuple[int, ...] | None = None,
    reshard: bool | int = True,
    halves: tuple[torch.dtype, torch.dtype] | None = None,
    offload: bool = False,
    prefetch: int = 0,
    checkpointing: bool = False,
    sync_last: bool = False,
    **how: Any,
) -> Step:
    """FSDP2 by the model's layers."""
    with torch.device("cpu" if offload else device):
        model = make().to(dtype)
    if checkpointing:
        _checkpoint(model)
    options: dict[str, Any] = {
        "mesh": mesh_of(device, *(mesh or (dist.get_world_size(),))),
        "reshard_after_forward": reshard,
    }
    if halves:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=halves[0], reduce_dtype=halves[1])
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    layers = list(model.model.layers)
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for number, layer in enumerate(layers if prefetch else ()):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(0, number - prefetch) : number][::-1])
    if sync_last:
        how["last_only"] = model.set_requires_gradient_sync
    return looped(model, device, **how)


def loaded(device: str, **sizes: Any) -> Step:
    """A Llama, or a mixture of experts where tokens are spread over ranks, that transformers loads and distributes: its checkpoints
    (`save_checkpoints`) are in the folder that CHECKPOINTS names."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    path = Path(os.environ["CHECKPOINTS"]) / ("mixture" if "ep_size" in sizes else "llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", distributed_config=DistributedConfig(**sizes))
    return looped(model, device, optimized="loop")


def save_checkpoints(folder: Path) -> None:
    """Save what `loaded` loads, with random weights in bfloat16."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        moe_intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
    )
    for name, model in (("llama", llama()), ("mixture", Qwen3MoeForCausalLM(config))):
        model.to(torch.bfloat16).save_pretrained(folder / name)


def fsdp1(
    device: str,
    *,
    make: Callable[[], nn.Module] = llama,
    dtype: torch.dtype = torch.float32,
    halves: tuple[torch.dtype, torch.dtype] | None = None,
    strategy: str = "FULL_SHARD",
    mesh: tuple[int, ...] | None = None,
    checkpointing: bool = False,
    deferred: bool = False,
    sync_last: bool = False,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> Step:
    """FSDP1 by the model's layers; with `deferred` each is materialized there."""
    from torch.distributed import fsdp as module
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with torch.device("meta" if deferred else device):
        model = make().to(dtype)
    if checkpointing:
        _checkpoint(model)
    told: dict[str, Any] = {
        "use_orig_params": True,
        "sharding_strategy": module.ShardingStrategy[strategy],
        "auto_wrap_policy": ModuleWrapPolicy({type(model.model.layers[0])}),
    }
    if deferred:
        told["param_init_fn"] = lambda one: one.to_empty(device=device, recurse=False)
    if mesh:
        told["device_mesh"] = mesh_of(device, *mesh)
    if halves:
        told["mixed_precision"] = module.MixedPrecision(param_dtype=halves[0], reduce_dtype=halves[1])
    model = module.FullyShardedDataParallel(model, **told | (options or {}))
    if sync_last:
        how["last_only"] = lambda last: None if last else model.no_sync()
    return looped(model, device, **how)


def ddp(
    device: str,
    *,
    make: Callable[[], nn.Module] = llama,
    dtype: torch.dtype = torch.float32,
    sync_last: bool = False,
    sharded: bool | str = False,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> Step:
    """DDP, with `sharded` the optimizer's state over the ranks (ZeRO-1; "view": parameters as views of its buckets)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with torch.device(device):
        model = make().to(dtype)
    model = nn.parallel.DistributedDataParallel(model, **(options or {}))
    if sharded:
        how["optimizer"] = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-4, foreach=True, parameters_as_bucket_view=sharded == "view"
        )
    if sync_last:
        how["last_only"] = lambda last: None if last else model.no_sync()
    return looped(model, device, **how)


def tensor_parallel(
    device: str,
    *,
    make: Callable[[], nn.Module] | None = None,
    dtype: torch.dtype = torch.float32,
    degree: int | None = None,
    **how: Any,
) -> Step:
    """Tensor parallel by columns and rows of the layers' matrices; with a degree below the world's size FSDP2 over the others."""
    world = dist.get_world_size()
    mesh = dist.init_device_mesh(
        device, (world // (degree or world), degree or world), mesh_dim_names=("shard", "tensor")
    )
    with torch.device(device):
        model = (make or partial(llama, key_heads=8))().to(dtype)
    columns = *(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"
    plan = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
        if degree:
            fully_shard(layer, mesh=mesh["shard"])
    if degree:
        fully_shard(model, mesh=mesh["shard"])
    return looped(model, device, **how)


def context_parallel(device: str, *, rotate: str = "allgather") -> Step:
    """Each sequence over all ranks in bfloat16, by PyTorch's context_parallel around the layers of a Llama; keys and values come to
    a rank all at once, or (`rotate` "alltoall") go round."""
    from torch.distributed.tensor.experimental import context_parallel as shared
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh = mesh_of(device, dist.get_world_size())
    with torch.device(device):
        model = llama().to(torch.bfloat16)
    decoder, optimizer = model.model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens = torch.zeros(2, TOKENS, dtype=torch.long, device=device)
        positions = torch.arange(TOKENS, device=device).repeat(2, 1)
        set_rotate_method(rotate)
        with shared(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1]):
            hidden = decoder.embed_tokens(tokens)
            places = decoder.rotary_emb(hidden, positions)
            for layer in decoder.layers:
                hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=places)
            logits = model.lm_head(decoder.norm(hidden))
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        set_rotate_method("allgather")  # PyTorch's own, of the whole process
        optimizer.step()
        optimizer.zero_grad()

    return step
