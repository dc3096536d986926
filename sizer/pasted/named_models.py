"""Python code that builds a model by its name: torchvision's, timm's, or an encoder of sentence-transformers. It is never run.

Only the model and the usual calls around it are read: the batch, the optimizer, autocast. `sizer run` runs the code itself.
"""

from __future__ import annotations

import re
from itertools import islice

from sizer.catalogue.sources import arch_of, resolve
from sizer.pasted import lines
from sizer.pasted.inference import Call, calls_in
from sizer.pasted.plain_text import MAX_BYTES
from sizer.pasted.question import Draft, Question

_VISION = re.compile(r"(?m)^[ \t]*(?:from|import)[^\n]{0,80}\btorchvision\b")
_TIMM, _ENCODER = r"timm\.create_model|create_model", r"SentenceTransformer"
_NAMED = r"(?:torchvision\.)?(?:models\.)?(?:detection\.|segmentation\.|video\.|quantization\.)?[a-z][a-z0-9_]{3,63}"
_TRAINS = re.compile(r"\boptim\.[A-Z]|\.backward\(|\.step\(\)|\.fit\(|Trainer\(")
_AUTOCAST = re.compile(r"\bautocast\(|precision=[\"'](?:bf)?16-mixed|GradScaler\(")
_OPTIMIZER = r"(?:torch\.)?optim\.[A-Z]\w{1,32}"
_CAST = re.compile(
    r"\.half\(\)|\.bfloat16\(\)|dtype[\"']?[:=]\s?torch\.b?float16|\.to\([^()\n]{0,40}torch\.b?float16"
)
MAX_CANDIDATES = 200


def read_named_model(text: str) -> Question | None:
    """Return the question of code that builds a model by its name; None for another text."""
    if len(text) > MAX_BYTES or (found := _model_in(text)) is None:
        return None
    title, arch, made = found
    draft = Draft(title=f"code of {title}")
    draft.take(f"{made.name}({made.first or ''})", arch=arch)
    trains = _TRAINS.search(text)
    if trains is not None:
        draft.take(trains[0].strip(".("), mode="training")
    else:
        draft.assume("the code computes no gradients", mode="inference")
    for name in ("num_classes", "nb_classes"):
        if isinstance(classes := made.given.get(name), int) and classes > 0:
            draft.take(f"{name}={classes}", classes=classes)
        elif name in made.unread:
            draft.unmatched.append(f"{name}: its value is not in the text")
    _take_sizes(draft, text)
    if trains is not None:
        _take_optimizer(draft, text)
    _take_precision(draft, text, trains is not None)
    if title != "sentence-transformers":
        draft.assume("the model alone is counted: `sizer run -- SCRIPT.py` runs the code itself")
    return draft.whole(kind="code")


def _model_in(text: str) -> tuple[str, str, Call] | None:
    """Return the package of the first model in code, its architecture, and the call that builds it."""
    for call in calls_in(text, _ENCODER):
        if isinstance(call.first, str) and (arch := arch_of(call.first) or arch_of(f"sentence-transformers/{call.first}")):
            return "sentence-transformers", arch, call
    if "timm" in text:
        for call in calls_in(text, _TIMM):
            name = call.first or call.given.get("model_name")
            if isinstance(name, str) and re.fullmatch(r"[\w.]{2,96}", name):
                return "timm", f"timm:{name}", call
    if _VISION.search(text):
        for call in islice(calls_in(text, _NAMED), MAX_CANDIDATES):
            name = call.name.rpartition(".")[2]
            if resolve("torchvision", name) == name:
                return "torchvision", f"torchvision:{name}", call
    return None


def _take_sizes(draft: Draft, text: str) -> None:
    """Note the batch of the loader, of an encoder's call or of a random input, and the size of the latter."""
    loader = next((call for call in calls_in(text, r"(?:[\w.]{1,64}\.)?(?:DataLoader|encode)") if "batch_size" in call.given), None)
    if loader is not None and isinstance(batch := loader.given["batch_size"], int) and batch > 0:
        draft.take(f"batch_size={batch}", batch=batch)
    shapes = re.finditer(r"torch\.(?:randn|rand|zeros|ones|empty)\(\(?\s*([0-9]{1,5}),\s*3,\s*([0-9]{2,4}),\s*([0-9]{2,4})\b", text)
    for found in islice(shapes, 1):
        if "batch" not in draft.items:
            draft.take(found[0], batch=found[1])
        if draft.items["arch"].partition(":")[0] in ("torchvision", "timm"):
            draft.take(found[0], image=f"{found[2]}x{found[3]}")
    draft.assume("the code does not say how many", batch=1)


def _take_optimizer(draft: Draft, text: str) -> None:
    """Note the optimizer."""
    for call in islice(calls_in(text, _OPTIMIZER), 1):
        name = call.name.rpartition(".")[2]
        if name == "SGD":
            plain = call.given.get("momentum", 0) == 0  # None is a value that is not in the text, such as args.momentum
            draft.take("optimizer: SGD", optimizer="sgd" if plain else "sgd-momentum")
        elif not lines.optimizer(draft, "optimizer", name):
            draft.unmatched.append(f"optimizer: {name}")
    draft.assume("the code names no optimizer that is counted", optimizer="adamw")


def _take_precision(draft: Draft, text: str, trains: bool) -> None:
    """Note the dtype: autocast, or the dtype to which the model is cast."""
    half = "bfloat16" if re.search(r"\bbfloat16\b|bf16", text) else "float16"
    if (mixed := _AUTOCAST.search(text)) is not None:
        draft.take(mixed[0].strip("("), dtype=f"amp-{half}")
    elif (cast := _CAST.search(text)) is not None:
        draft.take(cast[0], dtype=half)
    else:
        draft.assume("the code casts nothing" if trains else "the code does not cast the model", dtype="float32")
    if re.search(r"torch\.compile\(", text):
        draft.take("torch.compile", compile="default")
