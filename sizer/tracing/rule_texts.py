"""Texts of the rules of a kind of device, read from their docstrings. Imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

from sizer.report.explanation import LimitationText, OperatorText, RuleTexts
from sizer.tracing.cuda import convolution, cublas, recurrent
from sizer.tracing.device import Device
from sizer.tracing.device_rules import FAMILIES, rules_for

# Operators with workspaces that only cuDNN determines. Those of convolutions can be queried.
DECIDED_BY_CUDNN = convolution.ALLOCATIONS.keys() | recurrent.BY_CUDNN.keys()
_REST = re.compile(r"\n\s*\n\s*(?:\*Known|Args:|Returns:|Raises:|Yields:)")
_LIMITATIONS = re.compile(r"\*Known limitations\*: (.*)", re.DOTALL)


def read_rule_texts(device: Device) -> RuleTexts:
    """Return the texts of the rules of a device; devices of one kind and version share them."""
    rules = rules_for(device)
    return RuleTexts(
        allocations=tuple(
            OperatorText(
                name=str(operator),
                text=_formula(function.__doc__),
                by_cudnn=operator in DECIDED_BY_CUDNN,
                convolves=operator in convolution.ALLOCATIONS,
            )
            for operator, function in rules.allocations.items()
        ),
        products=() if rules.blas is None else tuple(sorted(map(str, cublas.WORKSPACE_USERS))),
        convolutions=tuple(map(str, convolution.ALLOCATIONS)),
        limitations=tuple(_limitations(device.kind)),
    )


def _limitations(kind: str) -> Iterator[LimitationText]:
    """Yield the limitations in the docstrings of a device's modules and rules, by family of operators."""
    own = f"sizer.tracing.{kind}"
    families = [family for family in FAMILIES[kind] if family.__name__.startswith(own)]
    used = [one for family in families for one in vars(family).values() if isinstance(one, ModuleType)]
    modules = dict.fromkeys([*families, *(one for one in used if one.__name__.startswith(own))])
    for module in modules:
        allocations = vars(module).get("ALLOCATIONS", {})
        for text in dict.fromkeys(one.__doc__ or "" for one in (module, *allocations.values())):
            if found := _LIMITATIONS.search(text):
                named = f"{module.__name__.rpartition('.')[2].replace('_', ' ')}: {_first_paragraph(found[1])}"
                yield LimitationText(text=named, operators=tuple(map(str, allocations)))


def _formula(text: str | None) -> str:
    """Return a docstring without its limitations and its sections."""
    return " ".join(_REST.split(text or "")[0].split())


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())
