"""Training of a part of a module: its head, all except its towers, or an adapter; and notes about it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sizer.architecture.peft_adapters import adapted_layers, add_adapter, base_of, is_adapted
from sizer.architecture.quantization import elements_of
from sizer.base.errors import BuildError
from sizer.base.units import format_bytes
from sizer.catalogue.adapters import ADAPTERS, WITHOUT_TOWER
from sizer.catalogue.optimizers import BITSANDBYTES, OPTIMIZERS, PAGED_FROM
from sizer.catalogue.recipes import is_made_by_trl
from sizer.query.request import Request

# torchvision's and timm's own names of classifiers, the last first (torchvision/models/*.py, 0.29).
_HEADS = ("heads", "head", "classifier", "fc")
_MODALITIES = ("image", "video", "audio")
MANY = 8  # names in one sentence


def limit_training(module: nn.Module, request: Request) -> nn.Module:
    """Limit a module's training to the requested part: the head, all but towers, or an adapter, which wraps the module.

    Raises BuildError if the module has no head or no tower, or PEFT refuses it.
    """
    if request.train == "adapter":
        return add_adapter(module, request)
    freeze_towers(module) if request.train == WITHOUT_TOWER else freeze_backbone(module)
    return module


def freeze_backbone(module: nn.Module) -> None:
    """Freeze all parameters except the head's. Raises BuildError if the module has no head."""
    head = {id(p) for part in head_of(module) for p in part.parameters() if p.requires_grad}
    if not head:
        raise BuildError(
            f"{type(module).__name__} has no separate head to train",
            given="train=head",
            todo="choose a class with a task's head (head=), or train all of it",
        )
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in head)


def freeze_towers(module: nn.Module) -> None:
    """Freeze the encoders of pictures and sound. Raises BuildError if the module has none, or nothing else."""
    towers = towers_of(module)
    for tower in towers.values():
        tower.requires_grad_(False)
    if not towers or not any(p.requires_grad for p in module.parameters()):
        raise BuildError(
            f"{type(module).__name__} has no vision or audio tower in addition to the trained part",
            given=f"train={WITHOUT_TOWER}",
            todo="choose a model of several modalities, or train all of it",
        )


def towers_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the encoders of pictures, videos and sound by their path in the module, as transformers' `get_encoder` finds them."""
    if not hasattr(module, "get_encoder"):
        return {}
    found = {id(tower) for modality in _MODALITIES if (tower := module.get_encoder(modality=modality)) is not module}
    return {path: part for path, part in module.named_modules() if id(part) in found}


def head_of(module: nn.Module) -> list[nn.Module]:
    """Return the parts of a module that belong to its task; empty if there are none.

    These are the parts outside of transformers' `base_model` or of a backbone, else the output embeddings, else the classifier
    by timm's `get_classifier()` or by torchvision's names.
    """
    if hasattr(module, "base_model"):
        if module.base_model is not module:
            return list(_outside(module, module.base_model))
        output = module.get_output_embeddings()
        return [] if output is None else [output]
    if hasattr(module, "get_classifier"):
        found = module.get_classifier()
        return list(found) if isinstance(found, tuple) else [found]
    if isinstance(backbone := getattr(module, "backbone", None), nn.Module):
        return list(_outside(module, backbone))
    return [getattr(module, name) for name in _HEADS if hasattr(module, name)][:1]


def _outside(module: nn.Module, inner: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module that do not contain `inner`, and those of the children that do."""
    for child in module.children():
        if child is inner:
            continue
        if any(part is inner for part in child.modules()):
            yield from _outside(child, inner)
        else:
            yield child


def describe_training(module: nn.Module, request: Request) -> tuple[str, ...]:
    """Return sentences on the trained part of a module: which part, its size, and further trained parts."""
    parameters = list(module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    share = f"{trained:,} of {sum(map(elements_of, parameters)):,} parameters are trained, the rest are frozen."
    if request.train == "head":
        return (f"Only the head trains: {share}", *_tied(module))
    if request.train == WITHOUT_TOWER:
        return (f"All but {', '.join(towers_of(module))} trains: {share}",)
    row = ADAPTERS[request.adapter]
    if row.learns_prompt:
        return (f"{row.title} with {request.adapter_rank} virtual tokens: {share}", *_prepared(module, request))
    layers = adapted_layers(module)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    names = f"{', '.join(kinds[:MANY])}{', …' if len(kinds) > MANY else ''}"
    rank = f", rank {request.adapter_rank}" if "r" in row.arguments else ""
    whole = "".join(_trained_whole(module, request.modules_to_save))
    injected = request.is_of_pipeline and not is_adapted(module)
    held = "the question's dtype, in float32 for float16" if injected else "float32"
    text = f"{row.title}{rank}, on {len(layers)} layers ({names}), in {held}: {share}{whole}"
    return (text, *_prepared(module, request))


def describe_pages(module: nn.Module, request: Request) -> tuple[str, ...]:
    """Return a sentence on the memory of a paged optimizer outside of PyTorch's allocator; none for other optimizers."""
    row = OPTIMIZERS[request.optimizer]
    paged = sum(p.numel() for p in module.parameters() if p.requires_grad and p.numel() >= PAGED_FROM)
    if not paged * row.paged_bytes:
        return ()
    size = format_bytes(paged * row.paged_bytes)
    return (
        f"{size} of the optimizer's state are in managed memory on the host, and the device fetches them in its step: "
        "they are not part of the allocated bytes.",
    )


def uncounted_of(request: Request) -> tuple[str, ...]:
    """Return the memory that an estimate of a request's training leaves out."""
    row = OPTIMIZERS[request.optimizer]
    if not row.compiled:
        return ()
    return (
        f"temporary memory of the compiled step of {row.package}'s {row.class_name}: it is not compiled on meta",
    )


def _trained_whole(module: nn.Module, asked: tuple[str, ...]) -> Iterator[str]:
    """Yield sentences on parts of which PEFT trains a copy in addition to the adapter: the requested ones, or a classifier."""
    copies = (name.partition(".modules_to_save.") for name, _ in module.named_parameters())
    found = dict.fromkeys(path for path, is_copy, _ in copies if is_copy)
    of_task = dict.fromkeys(path.rpartition(".")[2] for path in found if not path.endswith(asked))
    if saved := dict.fromkeys(path.rpartition(".")[2] for path in found if path.endswith(asked)):
        yield f" A copy of {', '.join(saved)} is fully trained, in addition to the frozen original."
    if of_task:
        yield f" {', '.join(of_task)} trains whole, as PEFT has it for this task."


def _tied(module: nn.Module) -> tuple[str, ...]:
    heads = {id(p) for part in head_of(module) for p in part.parameters()}
    inside = (name for name, p in module.named_parameters() if id(p) in heads)  # the first name of each
    other = {name for part in head_of(module) for name, child in module.named_modules() if child is part}
    tied = [name for name in inside if not name.startswith(tuple(other))]
    return (f"The head is tied to {', '.join(tied)}, which is also trained.",) if tied else ()


def _prepared(module: nn.Module, request: Request) -> tuple[str, ...]:
    quantized = getattr(base_of(module), "quantization_method", None) == BITSANDBYTES
    if quantized and is_made_by_trl(request.objective, request.loss):
        cast = "TRL's trainers cast the adapter to bfloat16 if weights are quantized, and do not prepare other parameters."
        return (cast, *_checkpointed(module, request))
    return _checkpointed(module, request)


def _checkpointed(module: nn.Module, request: Request) -> tuple[str, ...]:
    if not request.checkpointing or not hasattr(base_of(module), "enable_input_require_grads"):
        return ()
    return (
        "Checkpointing is not reentrant, transformers' default; PEFT makes the embeddings' output require a gradient.",
    )
