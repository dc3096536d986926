"""Conflicts between values of a query that are valid on their own: a refusal by name for each."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.base.errors import Refusal, quote
from sizer.base.units import format_bytes
from sizer.catalogue.adapters import ADAPTERS, COMPILED_ADAPTERS, TRAINS, WITHOUT_TOWER
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import BLOCKS, MODES, OFFLOADED, QUANTIZED, REDUCE_OVERHEAD
from sizer.catalogue.modes import MODEL as WHOLE
from sizer.catalogue.optimizers import BITSANDBYTES, OPTIMIZERS
from sizer.catalogue.parallel import PARALLELS, SCHEDULES, takes_weights
from sizer.catalogue.pipelines import TRAINS_OF_DENOISERS
from sizer.catalogue.recipes import (
    ADAPTER,
    AFTER,
    DPO,
    FULL,
    GRPO,
    IN_BACKWARD,
    KEEP,
    KTO,
    LM,
    LOSS,
    MODEL,
    NONE,
    OFFLOAD,
    PRECOMPUTED,
    RECIPE_KEYS,
    TRL,
    WITH_LIGER,
    cached_texts,
    is_contrastive,
    is_library,
    is_made_by_trl,
)
from sizer.catalogue.serving import ENGINES, LAYOUTS, NEWEST_BUILD, Engine, format_release
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import WEIGHTS
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.query.values import CACHES, MAX_MICROBATCHES, MAX_WORLD


def conflicts(request: Request) -> Iterator[Refusal]:
    """Yield a refusal for each key of a request that conflicts with others; the request's source may be empty."""
    if request.source:
        yield from _refused_by_source(request)
    for name, key in KEYS.items():
        if not key.is_default(request) and (needs := key.needs(request)):
            yield Refusal(
                key=name,
                given=f"{quote(key.write(request))} without {needs}",
                allowed=f"{name} with {needs}",
                todo=f"remove it, or ask for {needs}",
            )
    if request.focus is not None and not (request.focus[0] in request.dtypes and request.focus[1] in request.batches):
        yield Refusal(
            key="focus",
            given=f"{request.focus[0]}:{request.focus[1]}",
            allowed="one of the values of dtype, a colon, one of the values of batch",
            todo="remove it, or ask for that dtype and batch",
        )
    gpu = find_gpu(request.gpu)
    if request.compile is not None:
        yield from _refused_in_compiled_code(request, gpu)
    yield from _refused_in_recipe(request, gpu)
    if request.is_of_pipeline:
        yield from _refused_by_denoiser(request)
    if MODES[request.mode].serves:
        yield from _refused_by_server(request, gpu)
    yield from _refused_on_device(request, gpu)
    if request.parallel != "none":
        yield from _refused_in_parallel(request, gpu)


_NOT_COMPILED = ("cudnn_benchmark", "outputs", "modules_to_save", "fla", *RECIPE_KEYS)


def _refused_in_compiled_code(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Yield a refusal for each value without a comparison of its compiled steps with PyTorch's own."""
    compiled = f"compile={request.compile}"
    if gpu.backend != "cuda":
        yield Refusal(
            key="compile",
            given=f"{quote(request.compile)} with gpu={request.gpu}",
            allowed="a CUDA device: Inductor writes its kernels with Triton",
            todo="remove it, or choose another gpu",
        )
    yield from _refused_in_graphs(request)
    allowed = {key: "its default" for key in _NOT_COMPILED if not KEYS[key].is_default(request)}
    if request.train == WITHOUT_TOWER:
        allowed["train"] = ", ".join(value for value in TRAINS if value != WITHOUT_TOWER)
    if request.train == "adapter" and request.adapter not in COMPILED_ADAPTERS:
        allowed["adapter"] = ", ".join(COMPILED_ADAPTERS)
    if (weights := WEIGHTS[request.weights]).quantizes and weights.package != BITSANDBYTES:
        bitsandbytes = [row.key for row in WEIGHTS.values() if row.package == BITSANDBYTES]
        allowed["weights"] = ", ".join(("checkpoint", "full", *bitsandbytes))
    allowed |= {key: "its default" for key in ("pp", "sp", "lp") if not KEYS[key].is_default(request)}
    if request.parallel == "pp":
        allowed["parallel"] = ", ".join(row for row in PARALLELS if row != "pp")
    elif request.compile == REDUCE_OVERHEAD and request.parallel not in ("none", "ddp"):
        allowed["parallel"] = "none, ddp"
    for key, values in allowed.items():
        yield Refusal(
            key=key,
            given=f"{quote(KEYS[key].write(request))} with {compiled}",
            allowed=f"{values} with {compiled}: other values were not compared with PyTorch's own",
            todo=f"remove it, or remove {compiled}",
        )


def _refused_in_graphs(request: Request) -> Iterator[Refusal]:
    """Yield a refusal for each value that makes PyTorch drop CUDA graphs (cudagraph_trees.py, 2.15)."""
    if request.compile != REDUCE_OVERHEAD:
        return
    if request.accumulate > 1:
        yield Refusal(
            key="accumulate",
            given=f"{request.accumulate} with compile={REDUCE_OVERHEAD}",
            allowed="1: gradients are in the graphs' memory, which the next pass overwrites; PyTorch refuses to add to them",
            todo="remove it, or ask for compile=default",
        )
    if request.compile_scope == BLOCKS and not MODES[request.mode].trains:
        yield Refusal(
            key="compile_scope",
            given=f"{BLOCKS!r} with compile={REDUCE_OVERHEAD} and mode={request.mode}",
            allowed=f"{WHOLE}: each call of a block overwrites the output of the block before it; PyTorch refuses to read that",
            todo=f"ask for compile_scope={WHOLE}",
        )


def _refused_in_recipe(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Refuse values of a training recipe that contradict each other or the source."""
    if request.step == IN_BACKWARD and request.accumulate > 1:
        yield Refusal(
            key="step",
            given=f"{request.step!r} with accumulate={request.accumulate}",
            allowed="accumulate=1: a step in the backward pass drops each gradient before the next pass",
            todo="remove it, or accumulate",
        )
    if request.step == IN_BACKWARD and request.optimizer == "none":
        yield Refusal(
            key="step",
            given=f"{request.step!r} with optimizer=none",
            allowed=f"{IN_BACKWARD} with an optimizer, which steps there",
            todo="remove it, or choose an optimizer",
        )
    if is_library(request.loss) and gpu.backend != "cuda":
        yield Refusal(
            key="loss",
            given=f"{request.loss!r} with gpu={request.gpu}",
            allowed="full, torch, chunked:<chunks>; on a CUDA device also the other losses, which have only CUDA kernels",
            todo="choose a CUDA device, or loss=torch",
        )
    if request.autocast and request.dtypes != ("bfloat16",):
        wide = [dtype for dtype in request.dtypes if dtype != "bfloat16"]
        yield Refusal(
            key="autocast",
            given=f"1 with dtype={','.join(wide)}",
            allowed="1 with dtype=bfloat16: amp-bfloat16 is autocast of float32 weights",
            todo="ask for dtype=bfloat16, or remove it",
        )
    if request.liger:
        yield from _refused_with_liger(request, gpu)
    if request.fla and gpu.backend != "cuda":
        given, todo = f"1 with gpu={request.gpu}", "choose a CUDA device"
        yield Refusal(key="fla", given=given, allowed="0; 1 with a CUDA device, for which its kernels are written", todo=todo)
    if not request.prepare and is_made_by_trl(request.objective, request.loss):
        yield Refusal(
            key="prepare",
            given=f"0 with {'loss=trl' if request.loss == TRL else f'objective={request.objective}'}",
            allowed="its default: TRL's trainers do not call prepare_model_for_kbit_training",
            todo="remove it",
        )
    if request.objective != LM:
        yield from _refused_in_preferences(request, gpu)
    if request.activations == OFFLOAD and gpu.backend != "cuda":
        yield Refusal(
            key="activations",
            given=f"{OFFLOAD!r} with gpu={request.gpu}",
            allowed="keep; offload with a CUDA device",
            todo="choose a CUDA device",
        )
    if request.optimizer_offload:
        yield from _refused_on_the_host(request, gpu)
    if request.activations == OFFLOAD and request.loss == "liger":
        yield Refusal(
            key="activations",
            given=f"{OFFLOAD!r} with loss=liger",
            allowed="keep with loss=liger: TRL does not offload its activations",
            todo="remove it, or ask for loss=trl",
        )
    row = ADAPTERS[request.adapter]
    if request.loss != FULL and request.train == "adapter" and row.learns_prompt:
        yield Refusal(
            key="loss",
            given=f"{request.loss!r} with adapter={request.adapter}",
            allowed=f"full: {row.title} adds tokens to the sequence",
            todo="remove it, or ask for adapter=lora",
        )
    others = request.source and SOURCES[request.source].package != "transformers"
    if others and request.evaluate not in (NONE, LOSS):
        yield Refusal(
            key="evaluate",
            given=f"{request.evaluate!r} with a {request.source} architecture",
            allowed="none, loss: only transformers' models have logits to keep",
            todo="ask for evaluate=loss, or choose a model of transformers",
        )


def _refused_with_liger(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Refuse Liger's layers on devices that its kernels are not written for, and in trainers that were not compared with them."""
    if gpu.backend != "cuda":
        given, todo = f"1 with gpu={request.gpu}", "choose a CUDA device"
        yield Refusal(key="liger", given=given, allowed="0; 1 with a CUDA device, for which its kernels are written", todo=todo)
    if request.objective not in WITH_LIGER:
        given, todo = f"1 with objective={request.objective}", "remove it"
        yield Refusal(key="liger", given=given, allowed=f"0; 1 with objective={', '.join(WITH_LIGER)}", todo=todo)


def _refused_on_the_host(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Refuse values that torchao's CPUOffloadOptimizer does not support, or that were not compared with it."""
    row = OPTIMIZERS[request.optimizer]
    other = (
        (gpu.backend != "cuda", f"gpu={request.gpu}", "a CUDA device"),
        (row.package != "torch" or request.optimizer == "none", f"optimizer={request.optimizer}", "an optimizer of torch.optim"),
        (request.optimizer_impl is not None, f"optimizer_impl={request.optimizer_impl}", "the implementation left out"),
        (request.step != AFTER, f"step={request.step}", "step=after"),
    )
    for is_refused, given, allowed in other:
        if is_refused:
            yield Refusal(
                key="optimizer_offload",
                given=f"1 with {given}",
                allowed=f"1 with {allowed}",
                todo="remove it, or choose so",
            )


def _refused_in_preferences(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Refuse values that TRL's losses, or sentence-transformers', do not support, and a reference that the question lacks."""
    asked = f"objective={request.objective}"
    if gpu.backend != "cuda":
        yield Refusal(
            key="objective",
            given=f"{request.objective!r} with gpu={request.gpu}",
            allowed="lm; other objectives were compared on CUDA devices only",
            todo="choose a CUDA device",
        )
    for key in ("loss", "evaluate"):
        if not KEYS[key].is_default(request):
            todo = f"remove it, or remove {asked}"
            given = f"{KEYS[key].write(request)!r} with {asked}"
            yield Refusal(key=key, given=given, allowed=f"its default with {asked}, which has its own loss", todo=todo)
    shards = PARALLELS[request.parallel].shards
    if shards and (request.objective == GRPO or is_contrastive(request.objective)):
        yield Refusal(
            key="objective",
            given=f"{request.objective!r} with parallel={request.parallel}",
            allowed="lm, dpo, kto, orpo, reward; grpo and contrastive with parallel=ddp or zero1: each rank has all weights",
            todo="ask for parallel=ddp, or run the script: sizer run -- torchrun --nproc-per-node=2 train.py",
        )
    if request.objective == GRPO:
        yield from _refused_in_groups(request)
    if is_contrastive(request.objective):
        cached = cached_texts(request.objective) is not None
        for key in ("activations", *(("step", "optimizer_offload") if cached else ())):
            if not KEYS[key].is_default(request):
                given, todo = f"{KEYS[key].write(request)!r} with {asked}", "remove it"
                why = "its backward pass runs further passes" if cached else "sentence-transformers does not offload them"
                yield Refusal(key=key, given=given, allowed=f"its default with {asked}: {why}", todo=todo)
    adapts = request.train == "adapter"
    if adapts and ADAPTERS[request.adapter].learns_prompt:
        given, todo = f"{request.objective!r} with adapter={request.adapter}", "ask for adapter=lora"
        yield Refusal(key="objective", given=given, allowed="adapters that add no tokens to the sequence", todo=todo)
    if request.reference == ADAPTER and not adapts:
        given, todo = f"{ADAPTER!r} without train=adapter", "ask for train=adapter, or reference=model"
        yield Refusal(key="reference", given=given, allowed="model, precomputed; adapter with train=adapter", todo=todo)
    if request.reference == NONE and request.objective in (DPO, KTO):
        given, todo = f"{NONE!r} with {asked}", "remove it, or ask for reference=precomputed"
        yield Refusal(key="reference", given=given, allowed="model, adapter, precomputed", todo=todo)
    if request.reference == MODEL and adapts:
        given, todo = f"{MODEL!r} with train=adapter", "remove it: the reference is the model without its adapter"
        yield Refusal(key="reference", given=given, allowed="adapter, precomputed with train=adapter", todo=todo)
    if not adapts and WEIGHTS[request.weights].quantizes:
        given, todo = f"{request.objective!r} with weights={request.weights}", "ask for train=adapter"
        yield Refusal(key="objective", given=given, allowed="quantized weights with train=adapter", todo=todo)


def _refused_by_denoiser(request: Request) -> Iterator[Refusal]:
    """Refuse training that diffusers' example scripts do not have."""
    trains = MODES[request.mode].trains
    if trains and request.train not in TRAINS_OF_DENOISERS:
        yield Refusal(
            key="train",
            given=f"{request.train!r} with a diffusers architecture",
            allowed="all, adapter: the complete denoiser, or an adapter of it",
            todo="ask for train=adapter",
        )
    if trains and request.train == "adapter" and ADAPTERS[request.adapter].learns_prompt:
        yield Refusal(
            key="adapter",
            given=f"{request.adapter!r} with a diffusers architecture",
            allowed="adapters of layers: a denoiser has no prompt to learn",
            todo="ask for adapter=lora",
        )
    if trains and request.part_weights:
        yield Refusal(
            key="weights",
            given=f"{KEYS['weights'].write(request)!r} with mode={request.mode}",
            allowed="checkpoint, full, nf4, nf4-dq, int8 of the denoiser: diffusers' scripts train with these only",
            todo="ask for weights=nf4&train=adapter",
        )
    if WEIGHTS[request.weights].config.get("quant_method") not in (None, BITSANDBYTES):
        yield Refusal(
            key="weights",
            given=f"{request.weights!r} with a diffusers architecture",
            allowed="checkpoint, full, or quantized by bitsandbytes",
            todo="ask for weights=nf4",
        )
    mixed = [dtype for dtype in request.dtypes if dtype.startswith("amp-")]
    if mixed and not (trains and request.train == "all"):
        what = "an adapter trains under autocast in 16 bits already" if trains else "a call has no mixed precision"
        yield Refusal(
            key="dtype",
            given=f"{', '.join(mixed)} with a diffusers architecture",
            allowed=f"float32, bfloat16, float16: {what}",
            todo=f"ask for dtype={mixed[0].removeprefix('amp-')}",
        )


def _refused_in_groups(request: Request) -> Iterator[Refusal]:
    """Refuse values that TRL's GRPOTrainer lacks, and batches with incomplete groups."""
    if request.possible_batches != request.batches:
        step, refused = request.batch_step, [batch for batch in request.batches if batch not in request.possible_batches]
        possible = ",".join(map(str, dict.fromkeys(-(-batch // step) * step for batch in request.batches)))
        passes = f" and accumulate={request.accumulate}" if request.accumulate > 1 else ""
        yield Refusal(
            key="batch",
            given=f"{','.join(map(str, refused))} with group={request.group}{passes}",
            allowed=f"multiples of {step}: a {'step' if passes else 'batch'} has all completions of each prompt",
            todo=f"ask for batch={possible}",
        )
    if request.activations != KEEP:
        given, allowed = f"{request.activations!r} with objective=grpo", "keep: GRPOTrainer does not offload activations"
        yield Refusal(key="activations", given=given, allowed=allowed, todo="remove it")
    if request.reference == PRECOMPUTED:
        given, todo = f"{PRECOMPUTED!r} with objective=grpo", "ask for reference=model, adapter or none"
        yield Refusal(
            key="reference", given=given, allowed="model, adapter, none: completions are new in each step", todo=todo
        )


def _refused_version(request: Request, engine: Engine) -> Iterator[Refusal]:
    """Yield a refusal for a version that the requested server does not have, or whose rules are not known."""
    version = request.engine_version
    if version is None:
        return
    if engine.oldest is None or engine.newest is None:
        if not version.startswith("b") or int(version[1:]) > NEWEST_BUILD:
            yield Refusal(
                key="engine_version",
                given=f"{version!r} with engine={engine.key}",
                allowed=f"the number of a build, up to b{NEWEST_BUILD}",
                todo="write the build that the server's log names, or leave it out for the newest known",
            )
        return
    release = (0, 0, 0) if version.startswith("b") else tuple(map(int, version.split(".")))
    if not engine.oldest <= release <= engine.newest:
        age = "older" if release < engine.oldest else "newer"
        yield Refusal(
            key="engine_version",
            given=f"{version!r}, {age} than the supported versions of {engine.title}",
            allowed=f"{format_release(engine.oldest)} to {format_release(engine.newest)}",
            todo="write the server's version, or leave it out for the newest known",
        )


def _refused_by_server(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Yield a refusal for each value that the requested server does not support."""
    engine = ENGINES[request.engine]
    if gpu.backend not in engine.backends:
        yield Refusal(
            key="gpu",
            given=f"{quote(request.gpu)} with engine={engine.key}",
            allowed=f"a device of {' or '.join(engine.backends)}",
            todo="choose another gpu, or engine=llama.cpp",
        )
    yield from _refused_version(request, engine)
    asked = request.server_weights or request.weights
    if asked not in ("checkpoint", "full", *engine.layouts):
        files = engine.layouts is not LAYOUTS
        hint = "ask for weights=w8a8, a server's INT8" if asked == "int8" else "ask for weights=awq"
        yield Refusal(
            key="weights",
            given=f"{asked!r} with engine={engine.key}",
            allowed="checkpoint, full, or the type of a GGUF file" if files else f"checkpoint, full, {', '.join(LAYOUTS)}",
            todo="ask for weights=q4_k_m, or engine=vllm" if files else hint,
        )
    if request.kv not in engine.kv:
        yield Refusal(
            key="kv",
            given=f"{request.kv!r} with engine={engine.key}",
            allowed=", ".join(engine.kv),
            todo=f"ask for kv={engine.kv[2] if len(engine.kv) > 2 else engine.kv[1]}",
        )
    if request.fully_sharded_loras and not (request.max_loras or request.max_lora_rank):
        yield Refusal(
            key="fully_sharded_loras",
            given="1 without max_loras",
            allowed="1 with max_loras or max_lora_rank, which make slots of adapters",
            todo="write for example max_loras=4",
        )
    if request.used > gpu.total_bytes * (request.util or 1):
        yield Refusal(
            key="used",
            given=f"{format_bytes(request.used)} with gpu={request.gpu}",
            allowed=f"less than the server's share of the device's {format_bytes(gpu.total_bytes)}",
            todo="free memory of the device, or choose another gpu",
        )


def _refused_on_device(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Yield a refusal for each value that this kind of device lacks, or has unknown kernels for."""
    known = OPTIMIZERS[request.optimizer].implementations_on(gpu.backend)
    if request.optimizer_impl is not None and request.optimizer_impl not in known:
        optimizer = request.optimizer
        yield Refusal(
            key="optimizer_impl",
            given=f"{request.optimizer_impl!r} with optimizer={optimizer}, gpu={request.gpu}",
            allowed=f"{' or '.join(known)} for {optimizer}" if known else f"none for {optimizer}: it has a single one",
            todo="remove it for PyTorch's own choice, or choose another optimizer",
        )
    if OPTIMIZERS[request.optimizer].has_kernels and gpu.backend != "cuda":
        yield Refusal(
            key="optimizer",
            given=f"{quote(request.optimizer)} with gpu={request.gpu}",
            allowed=f"PyTorch's own; on a CUDA device also those of {OPTIMIZERS[request.optimizer].package}",
            todo="choose another optimizer, or another gpu",
        )
    if request.is_pipeline and gpu.backend != "cuda":
        yield Refusal(
            key="gpu",
            given=quote(request.gpu),
            allowed="a CUDA device: offloading of pipelines was compared on these only",
            todo="choose a CUDA device",
        )
    if WEIGHTS[request.weights].quantizes and gpu.backend not in ("cuda", "cpu"):
        yield Refusal(
            key="weights",
            given=f"{quote(request.weights)} with gpu={request.gpu}",
            allowed="checkpoint, full; on a CUDA device or the CPU also quantized weights",
            todo="remove it, or choose another gpu",
        )
    if request.cache in OFFLOADED and gpu.backend != "cuda":
        yield Refusal(
            key="cache",
            given=f"{quote(request.cache)} with gpu={request.gpu}",
            allowed=f"{', '.join(kind for kind in CACHES if kind not in OFFLOADED)}; others need a CUDA device",
            todo="remove it, or choose another gpu",
        )
    if request.cache == QUANTIZED and gpu.backend not in ("cuda", "cpu"):
        yield Refusal(
            key="cache",
            given=f"{quote(request.cache)} with gpu={request.gpu}",
            allowed="another cache; a quantized one needs a CUDA device or the CPU",
            todo="remove it, or choose another gpu",
        )
    if request.expandable_segments and gpu.backend != "cuda":
        yield Refusal(
            key="expandable",
            given=f"'1' with gpu={request.gpu}",
            allowed="1 only with a CUDA device: other allocators have no expandable segments",
            todo="remove it, or choose another gpu",
        )


def _refused_in_parallel(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    """Yield a refusal for each value that no world of ranks can have."""
    if gpu.backend != "cuda":
        yield Refusal(
            key="parallel",
            given=f"{request.parallel!r} with gpu={request.gpu}",
            allowed="a CUDA device, for NCCL",
            todo="remove it, or choose another gpu",
        )
    weights = WEIGHTS[request.weights]
    if weights.quantizes and not takes_weights(request.parallel, str(weights.config["quant_method"])):
        yield Refusal(
            key="weights",
            given=f"{quote(request.weights)} with parallel={request.parallel}",
            allowed="checkpoint, full, or fp8 with tp: other splits were not compared with PyTorch's own",
            todo="remove it, or ask for parallel=ddp",
        )
    if OPTIMIZERS[request.optimizer].package != "torch":
        yield Refusal(
            key="optimizer",
            given=f"{quote(request.optimizer)} with parallel={request.parallel}",
            allowed=f"PyTorch's own: shards in {OPTIMIZERS[request.optimizer].package} were not compared",
            todo="choose another optimizer, or remove parallel",
        )
    if request.parallel == "zero1" and request.modules_to_save and {"bfloat16", "float16"} & {*request.dtypes}:
        yield Refusal(
            key="modules_to_save",
            given=f"{quote(','.join(request.modules_to_save))} with parallel=zero1 and 16-bit weights",
            allowed="float32 weights: ZeroRedundancyOptimizer takes parameters of one dtype, and the adapter's are float32",
            todo="ask for parallel=ddp or parallel=fsdp, or for dtype=amp-bfloat16",
        )
    if request.world > MAX_WORLD:
        yield _too_many_ranks(request)
    if request.rank is not None and request.rank >= request.world:
        yield Refusal(
            key="rank",
            given=f"{request.rank} with {request.world:,} ranks",
            allowed=f"0 to {request.world - 1:,}",
            todo=f"ask for rank={request.world - 1}",
        )
    if request.tp > 1 or request.parallel == "tp":
        yield from _refused_in_tensor_parallel(request, gpu)
    if request.pp > 1 or request.parallel == "pp":
        yield from _refused_in_pipeline(request)
    if request.reshard > 1 and (request.reshard >= request.ranks or request.ranks % request.reshard):
        fitting = max(
            size for size in range(1, min(request.reshard, request.ranks - 1) + 1) if not request.ranks % size
        )
        yield Refusal(
            key="reshard",
            given=f"{request.reshard} with ranks={request.ranks}",
            allowed="1, 0, or a divisor of ranks below it",
            todo=f"ask for reshard={fitting}",
        )


def _too_many_ranks(request: Request) -> Refusal:
    """Return the refusal of a world that is too large, with a smaller one.

    Each degree in turn is as large as the others allow.
    """
    world, less = request.world, {}
    degrees = [key for key in ("replicate", "ranks", "cp", "pp", "tp") if key in PARALLELS[request.parallel].keys]
    for key in degrees:
        others = world // getattr(request, key)
        if world > MAX_WORLD and others < world:
            less[key] = max(1, MAX_WORLD // others)
            world = others * less[key]
    group = request.world // request.replicate
    return Refusal(
        key=next(iter(less)),
        given=f"{request.replicate} groups of {group} ranks" if request.replicate > 1 else f"{request.world:,} ranks",
        allowed=f"at most {MAX_WORLD:,} ranks",
        todo=f"ask for {' and '.join(f'{key}={degree}' for key, degree in less.items())}",
    )


def _refused_in_tensor_parallel(request: Request, gpu: Gpu) -> Iterator[Refusal]:
    if request.tp == 1:
        yield Refusal(
            key="tp", given="1 with parallel=tp", allowed="2 or more", todo="ask for tp=8, or remove parallel"
        )
    if request.train == "adapter":
        yield Refusal(
            key="train",
            given=f"'adapter' with tp={request.tp}",
            allowed="all, head: splits of an adapter's matrices were not compared with PyTorch's own",
            todo="remove it, or tp",
        )
    if MODES[request.mode].generates and request.sp:
        yield Refusal(
            key="sp",
            given=f"'1' with mode={request.mode}",
            allowed="0: one token cannot be sharded over several ranks",
            todo="remove it",
        )
    if request.cache in (*OFFLOADED, QUANTIZED):
        yield Refusal(
            key="cache",
            given=f"{quote(request.cache)} with tp={request.tp}",
            allowed=f"{', '.join(kind for kind in CACHES if kind not in (*OFFLOADED, QUANTIZED))}: "
            "other splits were not compared with PyTorch's own",
            todo="remove it, or tp",
        )
    known = OPTIMIZERS[request.optimizer].implementations_on(gpu.backend) if MODES[request.mode].trains else ()
    sharded = PARALLELS[request.parallel].shards
    if not sharded and not request.sp and request.optimizer_impl != "loop" and "foreach" in known:
        yield Refusal(
            key="optimizer_impl",
            given=f"{quote(request.optimizer_impl) if request.optimizer_impl else 'nothing'} with parallel={request.parallel}",
            allowed="loop: foreach and fused optimizers do not support mixing DTensor and regular parameters; with sp=1 any",
            todo="ask for optimizer_impl=loop, or sp=1",
        )


def _refused_in_pipeline(request: Request) -> Iterator[Refusal]:
    """Yield a refusal for each value that torch.distributed.pipelining lacks, or that was not compared with it."""
    if request.pp == 1:
        yield Refusal(
            key="pp", given="1 with parallel=pp", allowed="2 or more", todo="ask for pp=4, or remove parallel"
        )
        return
    pipeline = f"pp={request.pp}"
    if not MODES[request.mode].trains:
        yield Refusal(
            key="mode",
            given=f"{request.mode!r} with {pipeline}",
            allowed="training: its schedules are for training steps",
            todo="remove pp",
        )
    if request.train != "all":
        yield Refusal(
            key="train",
            given=f"{request.train!r} with {pipeline}",
            allowed="all: a stage that trains nothing sends no gradients",
            todo="remove it, or pp",
        )
    if request.accumulate > 1:
        yield Refusal(
            key="accumulate",
            given=f"{request.accumulate} with {pipeline}",
            allowed="1: a pipeline accumulates over its microbatches",
            todo=f"ask for a batch {request.accumulate} times as large",
        )
    if request.offload:
        yield Refusal(
            key="offload",
            given=f"1 with {pipeline}",
            allowed="0: stages on the host were not compared with PyTorch's own",
            todo="remove it, or pp",
        )
    for key in ("sp", "lp", "cp"):
        if (given := getattr(request, key)) > 1 or given is True:
            yield Refusal(
                key=key,
                given=f"{int(given)} with {pipeline}",
                allowed="none: stages that share sequences or logits were not compared with PyTorch's own",
                todo="remove it, or pp",
            )
    if request.possible_batches != request.batches:
        yield _unscheduled(request)


def _unscheduled(request: Request) -> Refusal:
    """Return the refusal of batch sizes that a schedule does not accept."""
    schedule, size = SCHEDULES[request.schedule], request.microbatch
    refused = [batch for batch in request.batches if batch not in request.possible_batches]
    takes = [number for number in range(1, MAX_MICROBATCHES + 1) if schedule.takes(number, request.pp)]
    nearest = min(takes, key=lambda number: abs(number * size - refused[0]))
    possible = ",".join(map(str, request.possible_batches or (nearest * size,)))
    least = f", {request.pp} microbatches or more" if schedule.fills else ""
    rounds = f", in equal rounds of {request.pp} microbatches or more" if schedule.stages > 1 else ""
    return Refusal(
        key="batch",
        given=f"{','.join(map(str, refused))} with pp={request.pp}, schedule={request.schedule}",
        allowed=f"a multiple of microbatch={size}{least}{rounds}, at most {MAX_MICROBATCHES}",
        todo=f"ask for batch={possible}",
    )


def _refused_by_source(request: Request) -> Iterator[Refusal]:
    source = SOURCES[request.source]
    if request.mode in source.refuses_modes:
        yield Refusal(
            key="mode",
            given=f"{request.mode!r} with a {source.key} architecture",
            allowed=", ".join(mode for mode in MODES if mode not in source.refuses_modes),
            todo="choose a language model of transformers",
        )
    for key in source.refuses:
        if not KEYS[key].is_default(request):
            taking = [f"{row.key}:" for row in SOURCES.values() if key not in row.refuses]
            others, last = taking[:-1], taking[-1]
            yield Refusal(
                key=key,
                given=f"{quote(KEYS[key].write(request))} with a {source.key} architecture",
                allowed=f"{key} with {', '.join(others)}{' or ' if others else ''}{last}",
                todo="remove it",
            )
