"""The levers: a row for each thing that can be changed, with its price and the lines of PyTorch that do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

from sizer.architecture.greedy_generation import keeps_last_logits
from sizer.base.units import pluralize
from sizer.base.versions import installed_version
from sizer.catalogue.adapters import PACKAGE, SCRIPT, targets_of_script
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import BLOCKS, DEFAULT, FREED, KEPT, MODES, REDUCE_OVERHEAD
from sizer.catalogue.optimizers import BITSANDBYTES, OPTIMIZERS
from sizer.catalogue.parallel import PARALLEL_KEYS
from sizer.catalogue.recipes import (
    CACHED,
    CHUNKED,
    FULL,
    GRPO,
    IN_BACKWARD,
    LOSSES,
    MODEL,
    NONE,
    OFFLOAD,
    PRECOMPUTED,
    RECIPE_KEYS,
    TORCH,
    TRL,
    cached_texts,
    is_contrastive,
    reference_of,
)
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import WEIGHTS
from sizer.decision import lever_code
from sizer.query.request import Request, scope_of
from sizer.report.census import ArchitectureCounts
from sizer.tracing.compiled.names import OLDEST_READ as COMPILED_FROM

Change = Callable[[Request, ArchitectureCounts], Request | None]

COMPILED = "compile"  # the lever that compiles a question's eager code
LOW_BUDGET = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One possible change. `change` returns the changed question, or None if it does not apply or was already made.

    Only one lever of a `group` can be used. `price` orders them: 1 costs nothing, 2 time, 3 precision, 4 changes the
    optimizer's results, 5 changes the task. `cost` is the text of the price; `code` are the lines of PyTorch.
    """

    key: str
    group: str
    price: int
    title: Callable[[Request], str]
    cost: Callable[[Request, ArchitectureCounts], str]
    code: lever_code.Code
    change: Change


def _with_batch(request: Request, known: ArchitectureCounts) -> Request | None:
    (batch,) = request.batches
    if is_contrastive(request.objective):  # its loss compares the texts of a batch
        return None
    return accumulated(request, known.smallest) if batch > known.smallest else None


def _with_cached_gradients(request: Request, known: ArchitectureCounts) -> Request | None:
    """Return the question with texts embedded in mini-batches: of 32 texts, or of half a small batch."""
    texts = min(CACHED, request.batches[0] // 2)
    if not is_contrastive(request.objective) or cached_texts(request.objective) is not None or not texts:
        return None
    return replace(request, objective=f"{request.objective}:{texts}")


def accumulated(request: Request, batch: int) -> Request:
    """Return the question of a smaller batch size. In training its step accumulates passes, for as many samples as before."""
    samples = request.batches[0] * request.accumulate
    passes = -(-samples // batch) if MODES[request.mode].trains else 1
    return replace(request, batches=(batch,), accumulate=passes)


def _with_dtype(dtype: str) -> Change:
    order = ("float32", "amp-float16", "amp-bfloat16", "float16", "bfloat16")

    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        (now,), gpu = request.dtypes, find_gpu(request.gpu)
        emulated = gpu.capability is not None and gpu.capability < (8, 0)  # a T4 has no tensor cores for bfloat16
        if emulated == ("bfloat16" in dtype):
            return None  # one of the two: they take the same bytes, and bfloat16 needs no scaler
        if "amp" in dtype and (not MODES[request.mode].trains or gpu.backend == "cpu"):
            return None
        return replace(request, dtypes=(dtype,)) if order.index(dtype) > order.index(now) else None

    return change


def _training(change: Change) -> Change:
    return lambda request, known: change(request, known) if MODES[request.mode].trains else None


def _with_optimizer(optimizer: str) -> Change:
    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        if request.optimizer in ("none", "sgd", optimizer):
            return None
        available = OPTIMIZERS[optimizer].implementations_on(find_gpu(request.gpu).backend)
        implementation = request.optimizer_impl if request.optimizer_impl in available else None
        return replace(request, optimizer=optimizer, optimizer_impl=implementation)

    return change


def _fused(request: Request, known: ArchitectureCounts) -> Request | None:
    available = OPTIMIZERS[request.optimizer].implementations_on(find_gpu(request.gpu).backend)
    return replace(request, optimizer_impl="fused") if "fused" in available else None


def _with_lora(request: Request, known: ArchitectureCounts) -> Request | None:
    adapts = find_spec(PACKAGE) and (SOURCES[request.source].package == "transformers" or request.is_of_pipeline)
    if not adapts or request.train != "all":
        return None
    if not request.is_of_pipeline:
        return replace(request, train="adapter")
    targets = targets_of_script(known.census.class_name, quantized=False)
    dtypes = tuple(dtype.removeprefix("amp-") for dtype in request.dtypes)
    return replace(request, train="adapter", dtypes=dtypes, adapter_targets=targets)


def _with_quantized_lora(request: Request, known: ArchitectureCounts) -> Request | None:
    if not find_spec(BITSANDBYTES) or find_gpu(request.gpu).backend != "cuda" or WEIGHTS[request.weights].quantizes:
        return None
    adapted = _with_lora(request, known)
    if request.train == "adapter":
        adapted = request
        if request.adapter_targets == (SCRIPT,):  # quantized weights have other targets
            adapted = replace(request, adapter_targets=targets_of_script(known.census.class_name, quantized=False))
    return None if adapted is None else replace(adapted, weights="nf4-dq", compute=None)


def _with_weights(weights: str) -> Change:
    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        if MODES[request.mode].trains or WEIGHTS[request.weights].quantizes or not find_spec(BITSANDBYTES):
            return None
        there = SOURCES[request.source].package == "transformers" and find_gpu(request.gpu).backend == "cuda"
        return replace(request, weights=weights) if there else None

    return change


def _last_logits(request: Request, known: ArchitectureCounts) -> Request | None:
    """Return the question as a generation: the prompt has the sequence's length, and one token's logits are computed."""
    passes_once = not MODES[request.mode].trains and not MODES[request.mode].generates
    if not passes_once or not keeps_last_logits(known.census.class_name):
        return None
    return replace(request, mode="generate", new=1, sequence_length=known.sequence_length)


def _with_library(optimizer: str) -> Change:
    change = _with_optimizer(optimizer)

    def with_library(request: Request, known: ArchitectureCounts) -> Request | None:
        there = find_spec(BITSANDBYTES) and find_gpu(request.gpu).backend == "cuda"
        return change(request, known) if there and request.optimizer in ("adam", "adamw") else None

    return with_library


def _in_backward(request: Request, known: ArchitectureCounts) -> Request | None:
    steps = request.optimizer != "none" and request.accumulate == 1 and request.dtypes != ("amp-float16",)
    return replace(request, step=IN_BACKWARD) if steps and request.step != IN_BACKWARD else None


def _with_loss(loss: str) -> Change:
    """Return the change to a loss that computes no more logits at once than it needs, where its package is installed."""

    def change(request: Request, known: ArchitectureCounts) -> Request | None:
        if known.vocabulary is None or request.loss != FULL or (known.changes_logits and loss != TRL):
            return None
        row = LOSSES.get(loss)
        if row is not None and row.module is not None and (not find_spec(row.module) or find_gpu(request.gpu).backend != "cuda"):
            return None
        return replace(request, loss=loss)

    return change


def _with_offloading(request: Request, known: ArchitectureCounts) -> Request | None:
    there = find_spec(TRL) and find_gpu(request.gpu).backend == "cuda" and SOURCES[request.source].package == "transformers"
    return replace(request, activations=OFFLOAD) if there else None


def _with_optimizer_on_the_host(request: Request, known: ArchitectureCounts) -> Request | None:
    there = find_spec("torchao") and request.dtypes != ("amp-float16",)
    return replace(request, optimizer_offload=True, optimizer_impl=None) if there else None  # torchao chooses the implementation


def _with_compiled_blocks(request: Request, known: ArchitectureCounts) -> Request | None:
    there = find_spec("triton") and installed_version() >= COMPILED_FROM and find_gpu(request.gpu).backend == "cuda"
    if not there or scope_of(request) == BLOCKS:
        return None
    return replace(request, compile=request.compile or DEFAULT, compile_scope=BLOCKS)


def _without_graphs(request: Request, known: ArchitectureCounts) -> Request | None:
    return replace(request, compile=DEFAULT) if request.compile == REDUCE_OVERHEAD else None


def _with_budget(request: Request, known: ArchitectureCounts) -> Request | None:
    keeps_more = request.budget is None or request.budget > LOW_BUDGET
    return replace(request, budget=LOW_BUDGET) if request.compile is not None and keeps_more else None


def _with_head(request: Request, known: ArchitectureCounts) -> Request | None:
    return replace(request, train="head") if request.train == "all" and not request.is_of_pipeline else None


def _without_training(request: Request, known: ArchitectureCounts) -> Request:
    plain = replace(Request(source=request.source), **SOURCES[request.source].defaults)
    trained = (
        *("optimizer", "optimizer_impl", "checkpointing", "train", "accumulate", "outputs", "new"),
        *("budget", *RECIPE_KEYS),
    )
    adapters = ("adapter", "adapter_rank", "adapter_alpha", "adapter_targets", "adapter_dropout", "modules_to_save")
    return replace(request, mode="inference", **{name: getattr(plain, name) for name in (*trained, *adapters, *PARALLEL_KEYS)})


def _half_sequence(request: Request, known: ArchitectureCounts) -> Request | None:
    length = known.sequence_length
    if length is None or length < 2 or known.image_size is not None:
        return None
    return replace(request, sequence_length=length // 2)


def _half_new(request: Request, known: ArchitectureCounts) -> Request | None:
    generates = MODES[request.mode].generates or request.objective == GRPO
    return replace(request, new=request.new // 2) if generates and request.new >= 2 else None


def _without_reference(request: Request, known: ArchitectureCounts) -> Request | None:
    """Return the question without the frozen reference model."""
    if reference_of(request.objective, request.train, request.reference) != MODEL:
        return None
    return replace(request, reference=NONE if request.objective == GRPO else PRECOMPUTED)


def _cost_of_reference(request: Request, known: ArchitectureCounts) -> str:
    return "nothing keeps the model close to its start" if request.objective == GRPO else "a pass over the data beforehand"


def _half_image(request: Request, known: ArchitectureCounts) -> Request | None:
    if known.image_size is None or known.sequence_length is not None or request.is_pipeline:
        return None
    height, width = known.image_size
    return replace(request, image_size=(height // 2, width // 2))


def _of_small_batches(request: Request, known: ArchitectureCounts) -> str:
    normed = MODES[request.mode].trains and any("BatchNorm" in module.class_name for module in known.census.modules)
    return f"more, smaller kernels{'; batch norm sees the small batches' if normed else ''}"


def _batch_title(request: Request) -> str:
    (batch,) = request.batches
    mode = MODES[request.mode]
    if mode.generates:
        return f"{pluralize(batch, 'sequence')} at once"
    return f"Batches of {batch}, accumulated" if mode.trains else f"Batches of {batch}"


def _of_weights(lost: str, trained: str) -> Callable[[Request, ArchitectureCounts], str]:
    """Return the text of the cost of 16-bit weights: `trained` if they are trained, else `lost`."""
    return lambda request, known: trained if MODES[request.mode].trains else lost


def row_of(
    key: str, group: str, price: int, title: str | Callable, cost: str | Callable, code: str | Callable, change: Change
) -> Lever:
    """Return a lever with texts that are equal for all questions, or functions of one."""
    return Lever(
        key=key,
        group=group,
        price=price,
        title=title if callable(title) else lambda request: title,
        cost=cost if callable(cost) else lambda request, known: cost,
        code=code if callable(code) else lambda request: code,
        change=change,
    )


LEVERS = (
    row_of(
        "fused", "implementation", 1, "Fused optimizer step", "nothing; it is faster",
        lever_code.fused, _training(_fused),
    ),
    row_of(
        "sdpa", "attention", 1, "SDPA instead of eager attention", "nothing; it is faster",
        'model.set_attn_implementation("sdpa")',
        lambda request, known: replace(request, attention="sdpa") if request.attention == "eager" else None,
    ),
    row_of(
        "outputs", "outputs", 1, "Outputs freed before the backward pass", "nothing",
        "loss = loss_fn(model(inputs), targets)  # no variable keeps the outputs\nloss.backward()",
        lambda request, known: replace(request, outputs=FREED) if request.outputs == KEPT else None,
    ),
    row_of(
        "expandable", "segments", 1, "Expandable segments", "nothing on most systems",
        lever_code.expandable, lambda request, known: replace(request, expandable_segments=True),
    ),
    row_of(
        "static", "cache", 2, "A static KV cache", "memory for every token from the start, also if generations end early",
        'model.generate(..., cache_implementation="static", disable_compile=True)',
        lambda request, known: replace(request, cache="static") if MODES[request.mode].generates else None,
    ),
    row_of(
        "in-backward", "batch", 2, "The optimizer's step in the backward pass", "no gradient clipping, and no accumulation",
        lever_code.in_backward, _training(_in_backward),
    ),
    row_of(
        "loss", "loss", 2, "A loss that computes logits in chunks", "more, smaller kernels",
        lever_code.chunked_loss, _with_loss(TORCH if installed_version() >= (2, 15) else f"{CHUNKED}:8"),
    ),
    row_of(
        "loss-liger", "loss", 2, "Liger's fused loss, which computes logits in chunks", "needs liger-kernel",
        "from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss\n"
        "hidden, head = model.base_model(input_ids).last_hidden_state, model.get_output_embeddings()\n"
        "loss = LigerForCausalLMLoss(hidden, head.weight, labels, hidden.shape[-1])", _with_loss("liger"),
    ),
    row_of(
        "liger", "liger", 2, "Liger's norms, rotary embeddings and feed-forward layers", "needs liger-kernel",
        "from liger_kernel.transformers import _apply_liger_kernel_to_instance\n"
        "_apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False)  # use_liger_kernel=True of TRL's trainers",
        lambda request, known: replace(request, liger=True) if known.has_liger else None,
    ),
    row_of(
        "fla", "fla", 1, "flash-linear-attention's kernels for linear attention", "needs flash-linear-attention; it is faster",
        "import fla  # pip install flash-linear-attention: transformers' models use it where it is installed",
        lambda request, known: replace(request, fla=True) if known.has_linear_attention else None,
    ),
    # last of its group, which all changes together have: it goes with offloaded activations
    row_of(
        "loss-trl", "loss", 2, "TRL's loss, which computes logits in chunks", "needs trl; its trainer uses it by default",
        "from trl import SFTTrainer\nSFTTrainer(model, train_dataset=dataset).train()", _with_loss(TRL),
    ),
    row_of(
        "reference", "reference", 2, "No frozen reference model", _cost_of_reference,
        lever_code.without_reference, _training(_without_reference),
    ),
    row_of(
        "cached", "objective", 2, lambda request: f"Cached gradients, {cached_texts(request.objective):,} texts at once",
        "a second forward pass", lever_code.cached_gradients, _training(_with_cached_gradients),
    ),
    row_of(
        "activations", "activations", 2, "Activations offloaded to the host", "copies in both directions; needs trl",
        "from trl.models.activation_offloading import get_act_offloading_ctx_manager\n"
        "offloaded = get_act_offloading_ctx_manager(model)\n"
        "with offloaded:\n    loss = loss_fn(model(inputs), targets)\n    loss.backward()",
        _training(_with_offloading),
    ),
    row_of(
        "batch", "batch", 2, _batch_title, _of_small_batches, lever_code.accumulate, _with_batch,
    ),
    row_of(
        "checkpointing", "checkpointing", 2, "Activation checkpointing", "a second forward pass",
        lever_code.checkpoint, _training(lambda request, known: replace(request, checkpointing=True)),
    ),
    row_of(
        COMPILED, "compile", 2, "Compile the blocks", "time for compilation, again for other shapes; needs triton",
        "for block in blocks: block.compile()  # model.model.layers, model.transformer.h, ...", _training(_with_compiled_blocks),
    ),
    row_of(
        "graphs", "compile", 2, "No CUDA graphs", "time to launch each kernel",
        'model = torch.compile(model)  # without mode="reduce-overhead"', _without_graphs,
    ),
    row_of(
        "budget", "budget", 2, lambda request: f"An activation memory budget of {request.budget:g}",
        "the backward pass computes more again", lever_code.budget, _training(_with_budget),
    ),
    row_of(
        "amp-bfloat16", "dtype", 3, "Autocast to bfloat16", "precision of activations; weights stay float32",
        lever_code.autocast("bfloat16"), _with_dtype("amp-bfloat16"),
    ),
    row_of(
        "amp-float16", "dtype", 3, "Autocast to float16", "precision and range of activations; needs a gradient scaler",
        lever_code.autocast("float16"), _with_dtype("amp-float16"),
    ),
    row_of(
        "float16", "dtype", 4, "Weights in float16",
        _of_weights("precision and range of weights", "precision and range of weights; may overflow in training"),
        lever_code.cast("float16"), _with_dtype("float16"),
    ),
    row_of(
        "bfloat16", "dtype", 4, "Weights in bfloat16",
        _of_weights("precision of weights", "precision of weights, gradients and optimizer state"),
        lever_code.cast("bfloat16"), _with_dtype("bfloat16"),
    ),
    row_of(
        "int8", "weights", 3, "Weights in 8 bits (LLM.int8())", "precision of weights; needs bitsandbytes",
        lever_code.quantized("int8"), _with_weights("int8"),
    ),
    row_of(
        "nf4-dq", "weights", 4, "Weights in 4 bits (NF4)", "more precision of weights; needs bitsandbytes",
        lever_code.quantized("nf4-dq"), _with_weights("nf4-dq"),
    ),
    row_of(
        "optimizer-host", "optimizer", 2, "The optimizer's state and its step on the host", "a slower step; needs torchao",
        "from torchao.optim import CPUOffloadOptimizer\n"
        "optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW)  # or your optimizer",
        _training(_with_optimizer_on_the_host),
    ),
    row_of(
        "adamw-8bit", "optimizer", 3, "AdamW with its state in 8 bits", "precision of the optimizer's state; needs bitsandbytes",
        "import bitsandbytes\noptimizer = bitsandbytes.optim.AdamW8bit(model.parameters())",
        _training(_with_library("adamw-8bit")),
    ),
    row_of(
        "paged-adamw-8bit", "optimizer", 3, "Paged AdamW with its state in 8 bits",
        "precision of the optimizer's state, which moves between host and device; needs bitsandbytes",
        "import bitsandbytes\noptimizer = bitsandbytes.optim.PagedAdamW8bit(model.parameters())",
        _training(_with_library("paged-adamw-8bit")),
    ),
    row_of(
        "adafactor", "optimizer", 4, "Adafactor", "trains otherwise: tune the learning rate anew",
        "optimizer = torch.optim.Adafactor(model.parameters())", _training(_with_optimizer("adafactor")),
    ),
    row_of(
        "sgd", "optimizer", 4, "SGD without momentum", "trains otherwise: tune the learning rate anew",
        "optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)", _training(_with_optimizer("sgd")),
    ),
    row_of(
        "seq", "size", 5, lambda request: f"Sequences of {request.sequence_length:,} tokens", "half the context",
        lever_code.sequence, _half_sequence,
    ),
    row_of(
        "new", "tokens", 5, lambda request: pluralize(request.new, "new token"), "half as many tokens",
        lever_code.new_tokens, _half_new,
    ),
    row_of(
        "logits", "mode", 5, "Logits of only the last token", "no logits of the tokens before it",
        "outputs = model.generate(inputs, max_new_tokens=1)  # reads the prompt as model(inputs, logits_to_keep=1) does",
        _last_logits,
    ),
    row_of(
        "image", "size", 5, lambda request: "Images of {} × {}".format(*(request.image_size or (0, 0))), "half the resolution",
        lever_code.image, _half_image,
    ),
    row_of(
        "lora", "train", 5, "Only a LoRA adapter", "the weights themselves learn nothing",
        lever_code.lora, _training(_with_lora),
    ),
    row_of(
        "qlora", "train", 5, "A LoRA adapter on 4-bit weights (QLoRA)",
        "the weights themselves learn nothing, and lose precision; needs bitsandbytes",
        lever_code.quantized_lora, _training(_with_quantized_lora),
    ),
    row_of(
        "head", "train", 5, "The head alone", "the backbone learns nothing",
        "model.requires_grad_(False)\nhead.requires_grad_(True)  # model.lm_head, model.classifier, model.fc, ...",
        _training(_with_head),
    ),
    row_of(
        "inference", "mode", 5, "Inference only", "nothing is trained",
        "model.eval()\nwith torch.inference_mode(): output = model(inputs)",
        _training(_without_training),
    ),
)  # fmt: skip
"""In the order in which they are shown."""

OTHER_WORK = (
    "lora",
    "qlora",
    "head",
    "inference",
)  # levers that change the trained part, or train nothing: they do not make the same work fit
ADAPTERS = (
    "lora",
    "qlora",
)  # trained instead if nothing makes the same work fit, in the order of the search
