"""The text of a script, with gaps: its head, the work by mode, how it is measured, its end on one device, and example inputs.

Example inputs are random tensors of their shapes, with the values that a model's control flow reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.base.errors import BuildError

HEAD = '''\
"""{title}

Written by Sizer for {query}

    {command}
"""

import json
import {arguments}
import tempfile

{imports}

{device}
dtype = torch.{weights}


def build_model():
{build}    return model


def make_batch():
    args = {args}
    kwargs = {kwargs}
    targets = {targets}
    return args, kwargs, targets


'''
TRAINING = """\
def loss_of(model, args, kwargs, targets):
{loss}

def work():
{model}{optimizers}    with torch.device(device):
        batch = make_batch()
    start()
    for _ in range(2):
{step}


"""
INFERENCE = """\
def work():
    model = build_model(){placed}.eval()
    with torch.device(device):
        args, kwargs, _ = make_batch()
    start()
    for _ in range(2):
{step}


"""
GENERATION = """\
def work():
    model = build_model(){placed}.eval()
    with torch.device(device):
        _, kwargs, _ = make_batch()
    model.generation_config = GenerationConfig({options})
    start()
    with {context}:
        model.generate(**kwargs, generation_config=model.generation_config)


"""
TAIL = """\
def start():
    with torch.profiler.record_function("start"):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()


def measure():
    if device.startswith("cuda"):
        work()
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    if device == "mps":
        work()
        return {"driver": torch.mps.driver_allocated_memory()}
    torch.set_num_threads(1)  # as the estimate has it: with more, the CPU's kernels hold buffers for each
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.load(open(file.name, encoding="utf-8"))["traceEvents"]
    began = next(event["ts"] for event in events if event["name"] == "start")
    memory = [event for event in events if event["name"] == "[memory]" and event["ts"] >= began]
    return {"allocated": max(event["args"]["Total Allocated"] for event in memory)}


"""
MAIN_BESIDE = """\
ESTIMATED = {figures}  # bytes on the {gpu}


if __name__ == "__main__":
    for name, size in measure().items():
        estimate = ESTIMATED.get(name)
        beside = f", estimated {{estimate:,}} bytes ({{100 * (estimate - size) / size:+.2f}} %)" if estimate and size else ""
        print(f"{{name}} at the peak: {{size:,}} bytes ({{size / 2**30:.2f}} GiB){{beside}}")
"""
MAIN = """\
if __name__ == "__main__":
    for name, size in measure().items():
        print(f"{name} at the peak: {size:,} bytes ({size / 2**30:.2f} GiB)")
"""


LITERAL = 64  # elements of a tensor that is written out
RUN = 8  # from this many equal tokens in a row on, they have a meaning: placeholders of an image


def value_code(value: object, *, cast: bool = False) -> str:
    """Return an expression that makes a value anew; with `cast` floating-point tensors get the `dtype` of the script.

    Raises BuildError if random values would not do, or for a library's own objects.
    """
    if isinstance(value, Tensor):
        code = _tensor_code(value)
        return f"{code}.to(dtype)" if cast and value.is_floating_point() else code
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {value_code(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return _items_code(value, cast)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise BuildError("no script can be written for these inputs", given=type(value).__name__)


def _items_code(items: list | tuple, cast: bool) -> str:
    codes = [value_code(item, cast=cast) for item in items]
    if isinstance(items, list) and len(codes) > 1 and len(set(codes)) == 1:
        return f"[{codes[0]} for _ in range({len(codes)})]"
    return f"[{', '.join(codes)}]" if isinstance(items, list) else f"({''.join(f'{code}, ' for code in codes)})"


def _tensor_code(tensor: Tensor) -> str:
    shape, dtype = _shape(tensor), "" if tensor.dtype in (torch.float32, torch.int64) else f", dtype={tensor.dtype}"
    if tensor.is_floating_point():
        if tensor.numel() <= LITERAL:
            return f"torch.tensor({tensor.tolist()}{dtype})"
        return f"torch.rand({shape}{dtype})"
    low, high = (int(tensor.min()), int(tensor.max())) if tensor.numel() else (0, 0)
    if low == high:
        filled = {0: "zeros", 1: "ones"}.get(low)
        made = f"torch.{filled}({shape}" if filled else f"torch.full({shape}, {low}"
        return f"{made}, dtype={tensor.dtype})"
    if tensor.numel() <= LITERAL:
        return f"torch.tensor({tensor.tolist()}{dtype})"
    if tensor.dim() == 2 and torch.equal(tensor[:1], torch.arange(tensor.shape[1])[None]) and tensor.shape[0] == 1:
        return f"torch.arange({tensor.shape[1]})[None]"
    if tensor.dtype == torch.bool:
        return f"torch.rand({shape}) < 0.5"
    return _integers_code(tensor, low, high, shape, dtype)


def _integers_code(tensor: Tensor, low: int, high: int, shape: str, dtype: str) -> str:
    """Return random integers of the same range; positions hidden from the loss and runs of one token are kept."""
    if low < 0:
        every = _every(tensor, low)
        kept = tensor[tensor != low]
        bounds = f"{int(kept.min())}, {int(kept.max()) + 1}"
        return f"torch.where(torch.arange({tensor.shape[-1]}) % {every} == 0, torch.randint({bounds}, {shape}{dtype}), {low})"
    runs = _runs(tensor.reshape(-1, tensor.shape[-1])[0].tolist())
    for token in {token for _, _, token in runs}:  # which no random token may be
        low, high = (token + 1, high) if token - low < high - token else (low, token - 1)
    if low > high:
        raise BuildError("no script can be written for these inputs", given="tokens of several meanings")
    code = f"torch.randint({low}, {high + 1}, {shape}{dtype})"
    for begin, end, token in runs:
        places = f"(torch.arange({tensor.shape[-1]}) >= {begin}) & (torch.arange({tensor.shape[-1]}) < {end})"
        code = f"{code}.masked_fill({places}, {token})"
    return code


def _every(tensor: Tensor, hidden: int) -> int:
    """Return the step of the visible places along the last dimension. Raises BuildError if they are not evenly spaced."""
    seen = (tensor != hidden).reshape(-1, tensor.shape[-1])
    places = seen[0].nonzero().flatten().tolist()
    step = places[1] - places[0] if len(places) > 1 else tensor.shape[-1]
    if not (seen == (torch.arange(tensor.shape[-1]) % step == 0)).all():
        raise BuildError("no script can be written for these inputs", given="labels hidden here and there")
    return step


def _runs(row: list[int]) -> list[tuple[int, int, int]]:
    """Begin, end and token of every run of RUN equal tokens or more."""
    found, begin = [], 0
    for end in range(1, len(row) + 1):
        if end == len(row) or row[end] != row[begin]:
            if end - begin >= RUN:
                found.append((begin, end, row[begin]))
            begin = end
    return found


def _shape(tensor: Tensor) -> str:
    return repr(tuple(tensor.shape))
