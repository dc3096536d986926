"""The classic placement mistakes in words: what it is, where, why it matters, what to do. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from sizer.placement.report import Finding

MIXED_DEVICES = "weights on several devices"
UNREGISTERED = "parameter that is not registered"
INPUT_DEVICE = "input on another device"
INPUT_DTYPE = "input of another dtype"
MIXED_DTYPES = "two dtypes in one operation"
MADE_ELSEWHERE = "tensor made on another device"
LEFT_BEHIND = "attribute that .to() leaves behind"
COPIED = "attribute copied in every forward pass"
HARD_CODED = "device named in the code"
DROPPED = "result of .to() dropped"


def weights_on_several_devices(paths: list[str], total: int, others: Iterable[str], weights_device: str) -> Finding:
    """Parameters and buffers (`paths`, of `total`) that are not on `weights_device`, where most are."""
    return Finding(
        problem=MIXED_DEVICES,
        breaks=True,
        what=f"{len(paths)} of {total} parameters and buffers are on {', '.join(sorted(others))}, the others on {weights_device}",
        where=join(paths),
        why="an operator takes its tensors from one device; parts on several work only where forward moves what passes between",
        todo=f'call module.to("{weights_device}") once everything is built, or move the activations between the parts',
    )


def unregistered_parameters(paths: list[str]) -> Finding:
    """Parameters that no registered module holds."""
    return Finding(
        problem=UNREGISTERED,
        breaks=False,
        what=f"{len(paths)} of the model's parameters belong to no registered module",
        where=join(paths),
        why="module.parameters() does not give them to the optimizer, .to() does not move them, state_dict() drops them",
        todo="keep modules in nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList, not in plain lists and dicts",
    )


def input_on_another_device(name: str, device: str, weights_device: str, operator: str, where: str) -> Finding:
    """An input that an operator meets together with weights on another device."""
    variable = "x" if name.startswith("input ") else name
    return Finding(
        problem=INPUT_DEVICE,
        breaks=True,
        what=f"{name} is on {device}, the weights are on {weights_device}",
        where=where,
        why=f"{operator} takes its tensors from one device",
        todo=f'{variable} = {variable}.to("{weights_device}") before the call: for a tensor .to() returns another tensor',
    )


def input_of_another_dtype(names: str, given: str, weights: str, operator: str, where: str) -> Finding:
    """Floating-point inputs that reach a matrix product or convolution in another dtype than the weights'."""
    return Finding(
        problem=INPUT_DTYPE,
        breaks=True,
        what=f"{names}: {given}, but the weights are {weights}",
        where=where,
        why=f"{operator} takes tensors of one dtype",
        todo=f"cast the inputs with .to(torch.{weights}), or keep float32 weights and run under torch.autocast",
    )


def two_dtypes(given: str, weights: str, operator: str, where: str) -> Finding:
    """A matrix product or convolution of two dtypes, neither of them an input's."""
    return Finding(
        problem=MIXED_DTYPES,
        breaks=True,
        what=f"{operator} gets tensors of {given} and of {weights}",
        where=where,
        why="matrix products and convolutions take tensors of one dtype",
        todo=f"make the odd one with dtype=x.dtype, or cast it with .to(torch.{weights})",
    )


def made_elsewhere(tensor: str, operator: str, made: str, used: str) -> Finding:
    """A tensor that the forward pass makes on the CPU and uses with the model's own."""
    place = "there" if made == used else f"at {used}"
    return Finding(
        problem=MADE_ELSEWHERE,
        breaks=True,
        what=f"{tensor} is made on the CPU, and {operator} uses it with the model's own tensors {place}",
        where=made,
        why="without device= a tensor is made on the CPU, whatever device the module is on",
        todo="make it with device=x.device of a tensor that is there already, or once in __init__ as a buffer",
    )


def left_behind(path: str, operator: str, where: str) -> Finding:
    """An attribute that is neither parameter nor buffer, and that an operator uses with the model's own tensors."""
    return Finding(
        problem=LEFT_BEHIND,
        breaks=True,
        what=f"{path} is neither parameter nor buffer, and {operator} uses it with the model's own tensors",
        where=where,
        why=".to(device) moves parameters and buffers alone; the attribute stays where it was made",
        todo="register it in __init__: self.register_buffer(name, tensor, persistent=False)",
    )


def copied_every_time(path: str, where: str) -> Finding:
    """An attribute that the forward pass itself moves to the device each time."""
    return Finding(
        problem=COPIED,
        breaks=False,
        what=f"{path} is neither parameter nor buffer, and is copied to the device where it is used",
        where=where,
        why=".to(device) leaves it on the CPU, so that every pass copies it again and waits for the copy",
        todo="register it in __init__: self.register_buffer(name, tensor, persistent=False)",
    )


def device_in_the_code(device: str, weights_device: str, where: str) -> Finding:
    """A device that the forward pass asks for by name, and that is not the weights'."""
    return Finding(
        problem=HARD_CODED,
        breaks=True,
        what=f"the code names {device}, the weights are on {weights_device}",
        where=where,
        why="it works only on a machine with that device, and only while the module is on it",
        todo="take the device of a tensor that is there: x.device, next(self.parameters()).device",
    )


def dropped_result(method: str, where: str) -> Finding:
    """A call such as `x.to(device)` as a statement."""
    return Finding(
        problem=DROPPED,
        breaks=False,
        what=f"the result of .{method}() is dropped",
        where=where,
        why="for a tensor it returns another tensor and changes nothing in place; only for a module it works in place",
        todo=f"assign it: x = x.{method}(...)",
    )


def join(names: Iterable[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{', '.join(listed[:most])}{more}"
