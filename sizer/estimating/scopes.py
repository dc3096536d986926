"""Scopes of cached results: the inputs of a result, so that a server knows which questions may share it.

A job server derives a question's scopes from its query alone. A job may write results only under its own scopes. Code that one
question runs can therefore never answer a question with other choices.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from sizer.catalogue.modes import MODES
from sizer.catalogue.recipes import GRPO
from sizer.query.keys import KEYS, MODULE, TRACE, Key
from sizer.query.request import Request
from sizer.report.loop_decisions import TRACED_PASSES

DIGEST_LENGTH = 32  # characters


def reduce_request(request: Request) -> Request:
    """Return the request with the fewest passes and ranks that have its tapes.

    From the second pass on all passes are equal. A rank of DDP, or of a group of HSDP, has the same memory for any number of
    them (tests/distributed/test_alike.py).
    """
    rolls_out = request.objective == GRPO  # the completions of all passes at once
    passes = request.accumulate if rolls_out else min(request.accumulate, TRACED_PASSES)
    fewest: dict[str, Any] = {"accumulate": passes, "replicate": min(request.replicate, 2)}
    if request.parallel == "ddp":
        ranks, rank = min(request.ranks, 2), None
        if request.rank is not None and request.cp > 1:
            rank = request.rank % request.cp
        elif request.rank is not None and request.pp > 1:
            rank = request.rank // request.ranks * ranks  # of the same stage
        fewest |= {"ranks": ranks, "rank": rank}
    elif request.parallel == "hsdp" and request.rank is not None:
        fewest["rank"] = request.rank % (request.world // request.replicate)
    return replace(request, **fewest)


def served_module(request: Request) -> Request:
    """Return the request for the module of a server's plan: the same architecture, unquantized."""
    same = {name: getattr(request, name) for name in ("source", "name", "revision", "config", "head", "gpu", "torch")}
    return Request(**same, mode="inference", weights="full", dtypes=("bfloat16",), batches=(1,))


def choices_of(request: Request) -> str:
    """Return the choices that decide an architecture's counts and tapes, except the dtype and the device's rules."""
    items = [f"{name}={key.write(request)}" for name, key in KEYS.items() if _is_traced(name, key, request)]
    return "&".join(items)


def _is_traced(name: str, key: Key, request: Request) -> bool:
    return name != "arch" and key.affects in (MODULE, TRACE) and not key.is_default(request)


def module_choices_of(request: Request) -> str:
    """Return the choices that decide the module of a request."""
    if MODES[request.mode].serves:
        return f"served {module_choices_of(served_module(request))}"
    return "&".join(f"{name}={key.write(request)}" for name, key in KEYS.items() if key.affects == MODULE)


def work_scope_of(request: Request) -> str:
    """Return the scope of a request's counts, tapes and replays."""
    return f"work {choices_of(reduce_request(request))}"


def module_scope_of(request: Request) -> str:
    """Return the scope of results that depend on a request's module alone."""
    return f"module {module_choices_of(request)}"


def digest_scope(scope: str) -> str:
    """Return a digest of a scope, DIGEST_LENGTH hexadecimal digits."""
    return hashlib.sha256(scope.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_LENGTH]
