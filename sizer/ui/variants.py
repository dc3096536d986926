"""A comparison from variants: the question of the page, and the same question with one change, named in words."""

from __future__ import annotations

from dataclasses import dataclass

import streamlit as st

from sizer.base.errors import RequestError
from sizer.catalogue.modes import MODES
from sizer.query.request import Request
from sizer.query.several import MOST
from sizer.query.text import format_query, parse_query
from sizer.ui import compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One change of a question: its words, and the keys of the query with their values."""

    title: str
    items: tuple[tuple[str, str], ...]


VARIANTS = (
    Variant(title="+ checkpointing", items=(("checkpointing", "1"),)),
    Variant(title="bfloat16", items=(("dtype", "bfloat16"),)),
    Variant(title="autocast to bfloat16", items=(("dtype", "amp-bfloat16"),)),
    Variant(title="LoRA", items=(("train", "adapter"),)),
    Variant(title="QLoRA", items=(("train", "adapter"), ("weights", "nf4-dq"))),
    Variant(title="AdamW in 8 bits", items=(("optimizer", "adamw-8bit"),)),
    Variant(title="SGD", items=(("optimizer", "sgd"),)),
    Variant(title="fused optimizer", items=(("optimizer_impl", "fused"),)),
    Variant(title="weights in 4 bits", items=(("weights", "nf4-dq"),)),
    Variant(title="weights in 8 bits", items=(("weights", "int8"),)),
    Variant(title="expandable segments", items=(("expandable", "1"),)),
    Variant(title="eager attention", items=(("attention", "eager"),)),
    Variant(title="inference", items=(("mode", "inference"),)),
)


def with_variant(request: Request, variant: Variant) -> Request | None:
    """Return the question with a change; None if it has it already or refuses it."""
    changes, mode = dict(variant.items), MODES[request.mode]
    if changes.keys() & {*mode.unused} or ("train" in changes and not mode.trains):
        return None  # such keys change nothing there
    left = {"focus", *changes} if "dtype" in changes else set(changes)
    items = [item for item in format_query(request).split("&") if item.partition("=")[0] not in left]
    items += [f"{key}={value}" for key, value in changes.items()]
    try:
        changed = parse_query("&".join(items))
    except RequestError:
        return None
    return None if format_query(changed) == format_query(request) else changed


def offer_variants(request: Request) -> None:
    """Show the menu of changes that this question takes; each opens the comparison with and without it."""
    known = st.session_state.get(compared.QUESTIONS, [])
    with st.popover("+ variant", help="Compare this question with one change."):
        for variant in VARIANTS:
            if (changed := with_variant(request, variant)) is None:
                continue
            if st.button(variant.title, key=f"variant {variant.title}", type="tertiary"):
                _compare(known, request, changed)


def _compare(known: list[str], request: Request, changed: Request) -> None:
    """Go to the comparison: to those that are compared already if this question is one of them and there is room."""
    query, other = format_query(request), format_query(changed)
    texts = known if query in known and len(known) < MOST else [query]
    st.session_state[compared.QUESTIONS] = texts if other in texts else [*texts, other]
    st.switch_page(compared.PAGE, query_params=compared.address_of(st.session_state[compared.QUESTIONS]))


def titles(requests: list[Request]) -> list[str]:
    """Return a title for each question in words, empty for one that is no variant of the first by a single change."""
    first = requests[0]
    found = {format_query(changed): row.title for row in VARIANTS if (changed := with_variant(first, row)) is not None}
    return ["as asked", *(found.get(format_query(request), "") for request in requests[1:])]
