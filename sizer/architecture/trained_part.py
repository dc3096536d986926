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

# torchvision's and timm's own names of what tells classes apart, the last first (torchvision/models/*.py, 0.29).
_HEADS = ("heads", "head", "classifier", "fc")
_MODALITIES = ("image", "video", "audio")
MANY = 8  # names in one sentence


def limit_training(module: nn.Module, request: Request) -> nn.Module:
    """The module of which only what a request asks for is trained: the head alone, all but towers, or an adapter, which wraps it.

    Raises BuildError where the module has no head or no tower, or PEFT refuses it.
    """
    if request.train == "adapter":
        return add_adapter(module, request)
    freeze_towers(module) if request.train == WITHOUT_TOWER else freeze_backbone(module)
    return module


def freeze_backbone(module: nn.Module) -> None:
    """Make the head's parameters the only ones that require a gradient. Raises BuildError where the module has no head."""
    head = {id(p) for part in head_of(module) for p in part.parameters() if p.requires_grad}
    if not head:
        raise BuildError(
            f"{type(module).__name__} has no head to be trained alone",
            given="train=head",
            todo="choose a class with a task's head (head=), or train all of it",
        )
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in head)


def freeze_towers(module: nn.Module) -> None:
    """Freeze the encoders of pictures and sound. Raises BuildError where the module has none, or nothing else."""
    towers = towers_of(module)
    for tower in towers.values():
        tower.requires_grad_(False)
    if not towers or not any(p.requires_grad for p in module.parameters()):
        raise BuildError(
            f"{type(module).__name__} has no vision or audio tower beside what is trained",
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
    """The parts of a module that are its task's: what stands outside of transformers' `base_model` or of a backbone, else the
    output embeddings, else what timm's `get_classifier()` returns or torchvision names so; none where there is none."""
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
    """The children of a module that do not hold another one, and those of the children that do."""
    for child in module.children():
        if child is inner:
            continue
        if any(part is inner for part in child.modules()):
            yield from _outside(child, inner)
        else:
            yield child


def describe_training(module: nn.Module, request: Request) -> tuple[str, ...]:
    """Sentences on what of a module is trained: which part, how large it is, what comes along."""
    parameters = list(module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    share = f"{trained:,} of {sum(map(elements_of, parameters)):,} parameters train, the others are frozen."
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
    held = "the question's dtype, in float32 beside float16" if injected else "float32"
    told = f"{row.title}{rank}, on {len(layers)} layers ({names}), in {held}: {share}{whole}"
    return (told, *_prepared(module, request))


def describe_pages(module: nn.Module, request: Request) -> tuple[str, ...]:
    """A sentence on what a paged optimizer keeps outside of PyTorch's allocator; none for any other."""
    row = OPTIMIZERS[request.optimizer]
    paged = sum(p.numel() for p in module.parameters() if p.requires_grad and p.numel() >= PAGED_FROM)
    if not paged * row.paged_bytes:
        return ()
    size = format_bytes(paged * row.paged_bytes)
    return (
        f"{size} of the optimizer's state lie in managed memory, which the host holds and the device fetches where it steps: "
        "they are no part of what is allocated.",
    )


def uncounted_of(request: Request) -> tuple[str, ...]:
    """Return what an estimate of a request's training leaves out."""
    row = OPTIMIZERS[request.optimizer]
    if not row.compiled:
        return ()
    return (
        f"what the compiled step of {row.package}'s {row.class_name} holds beside its states: it is not compiled on meta",
    )


def _trained_whole(module: nn.Module, asked: tuple[str, ...]) -> Iterator[str]:
    """Yield sentences on the parts of which PEFT trains a copy beside the adapter: those that were asked for, a classifier say."""
    copies = (name.partition(".modules_to_save.") for name, _ in module.named_parameters())
    found = dict.fromkeys(path for path, is_copy, _ in copies if is_copy)
    of_task = dict.fromkeys(path.rpartition(".")[2] for path in found if not path.endswith(asked))
    if saved := dict.fromkeys(path.rpartition(".")[2] for path in found if path.endswith(asked)):
        yield f" A copy of {', '.join(saved)} trains as a whole, beside the frozen original."
    if of_task:
        yield f" {', '.join(of_task)} trains whole, as PEFT has it for this task."


def _tied(module: nn.Module) -> tuple[str, ...]:
    heads = {id(p) for part in head_of(module) for p in part.parameters()}
    inside = (name for name, p in module.named_parameters() if id(p) in heads)  # the first name of each
    other = {name for part in head_of(module) for name, child in module.named_modules() if child is part}
    tied = [name for name in inside if not name.startswith(tuple(other))]
    return (f"The head is tied to {', '.join(tied)}, which trains with it.",) if tied else ()


def _prepared(module: nn.Module, request: Request) -> tuple[str, ...]:
    quantized = getattr(base_of(module), "quantization_method", None) == BITSANDBYTES
    if quantized and is_made_by_trl(request.objective, request.loss):
        cast = "TRL's trainers make the adapter bfloat16 beside quantised weights, and do not prepare the others."
        return (cast, *_checkpointed(module, request))
    return _checkpointed(module, request)


def _checkpointed(module: nn.Module, request: Request) -> tuple[str, ...]:
    if not request.checkpointing or not hasattr(base_of(module), "enable_input_require_grads"):
        return ()
    return (
        "Checkpointing is not reentrant, transformers' default; PEFT makes the embeddings' output require a gradient.",
    )
