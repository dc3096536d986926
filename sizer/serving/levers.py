"""Changes that make a server start, or hold the wanted or more requests. Each change needs a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sizer.base.codec import Difference
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.parallel import beside_nccl, nccl_bytes
from sizer.report.served import Lever, Starts
from sizer.serving.architecture import Architecture
from sizer.serving.flags import Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a server's flags: the server's flag, the query keys, the changed fields, and its cost in words."""

    flag: str
    query: str
    fields: Mapping[str, object]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a change. `fits` is true if the server starts and holds the wanted requests."""

    starts: Starts
    fits: Starts
    kv_cache_bytes: int
    requests_at_once: float


FEWER_SEQS, FEWER_TOKENS, MORE_UTIL, LONGEST_SET = 32, 2048, 0.95, 3
SHOWN = 8
AWQ = "an AWQ checkpoint (4 bits)"


def vllm_changes(
    architecture: Architecture, flags: Flags, free_bytes: int, want: tuple[int, int] | None = None, longest: int = 0
) -> Iterator[Change]:
    """Yield each change that is possible for some flags of vLLM on a device with `free_bytes` free.

    `want` is (requests, tokens of each). Changes that would refuse these requests are left out; changes that allow them come
    first. `longest` is the number of tokens of the longest request that surely fits. A shorter max_model_len allows it.
    """
    requests, tokens = want or (0, 0)
    here = -(-requests // flags.dp)
    fewer = max(FEWER_SEQS, here)
    if flags.max_num_seqs != fewer and (flags.max_num_seqs > FEWER_SEQS or flags.max_num_seqs < here):
        yield Change(
            flag=f"--max-num-seqs {fewer}",
            query=f"max_num_seqs={fewer}",
            fields={"max_num_seqs": fewer},
            note=f"at most {fewer} requests run at once",
        )
    if flags.max_model_len < tokens <= architecture.positions:
        yield Change(
            flag=f"--max-model-len {tokens}",
            query=f"max_model_len={tokens}",
            fields={"max_model_len": tokens},
            note="longer requests are allowed",
        )
    if max(tokens, 1) <= longest < flags.max_model_len:
        yield Change(
            flag=f"--max-model-len {longest}",
            query=f"max_model_len={longest}",
            fields={"max_model_len": longest},
            note="longer requests are refused; no memory is freed",
        )
    if flags.max_num_batched_tokens > FEWER_TOKENS:
        yield Change(
            flag=f"--max-num-batched-tokens {FEWER_TOKENS}",
            query=f"max_num_batched_tokens={FEWER_TOKENS}",
            fields={"max_num_batched_tokens": FEWER_TOKENS},
            note="prompts are read in smaller steps",
        )
    if flags.loras > 1:
        yield Change(
            flag="--max-loras 1",
            query="max_loras=1",
            fields={"loras": 1},
            note="requests of only one adapter run at once",
        )
    if flags.loras and not flags.lora_sharded and not flags.ep and flags.tp > 1 and flags.lora_rank % flags.tp == 0:
        yield Change(
            flag="--fully-sharded-loras",
            query="fully_sharded_loras=1",
            fields={"lora_sharded": True},
            note="ranks split both matrices of an adapter",
        )
    if free_bytes < flags.budget_bytes and flags.kv_bytes is None:
        share = max(1, free_bytes * 100 // flags.total_bytes) / 100
        yield Change(
            flag=f"--gpu-memory-utilization {share:g}",
            query=f"util={share:g}",
            fields={"util": share},
            note="the server's share is then free",
        )
    elif flags.util < MORE_UTIL and flags.kv_bytes is None:
        yield Change(
            flag=f"--gpu-memory-utilization {MORE_UTIL}",
            query=f"util={MORE_UTIL}",
            fields={"util": MORE_UTIL},
            note="less memory remains for other programs",
        )
    if not flags.eager and flags.graphs_in_budget:
        yield Change(
            flag="--enforce-eager",
            query="enforce_eager=1",
            fields={"eager": True},
            note="decoding is slower without graphs",
        )
    for change in shared_changes(architecture, flags, "--kv-cache-dtype fp8", "--tensor-parallel-size"):
        if not (flags.lora_sharded and "tp" in change.fields and flags.lora_rank % (flags.tp * 2)):
            yield change


def shared_changes(architecture: Architecture, flags: Any, kv_flag: str, tp_flag: str) -> Iterator[Change]:
    """Yield the changes that vLLM and SGLang both take, under the names of their flags."""
    if flags.kv == "auto":
        yield Change(flag=kv_flag, query="kv=fp8", fields={"kv": "fp8"}, note="keys and values are rounded")
    if architecture.heads % (flags.tp * 2) == 0:
        tp = flags.tp * 2
        note = f"{tp * flags.pp * flags.dp} GPUs"
        yield Change(flag=f"{tp_flag} {tp}", query=f"tp={tp}", fields={"tp": tp}, note=note)
    if flags.layout is None:
        note = "weights are rounded to 8 bits"
        yield Change(flag="--quantization fp8", query="weights=fp8", fields={"layout": "fp8"}, note=note)
        note = "another checkpoint, rounded to 4 bits"
        yield Change(flag=AWQ, query="weights=awq", fields={"layout": "awq"}, note=note)


def gpu_with(gpu: Gpu, flags: Any, other: Any) -> Gpu:
    """Return the GPU with the NCCL memory of `other` in place of that of `flags`: more ranks may need more communicators."""
    before, after = (nccl_bytes("none", one.tp * one.pp, tp=one.tp, pp=one.pp) for one in (flags, other))
    return beside_nccl(gpu, (after[0] - before[0], after[1] - before[1], after[2] - before[2]))


def find_levers(changes: Sequence[Change], flags: Any, planner: Callable[[Any], Outcome]) -> tuple[Lever, ...]:
    """Return the suggested changes, the smallest sets first; sets of equal size are sorted by gain.

    If the server fits, each change is listed separately. If not, the result is the smallest sets of up to three changes that
    make it fit. If no such set keeps the GPUs and the requests, the smallest set that does is added. If no set fits and the
    server starts, the result is each change that gains requests.

    Args:
        changes: The changes that the flags allow.
        flags: The current flags, a dataclass.
        planner: Returns the outcome of a server with given flags.
    """
    before = planner(flags)

    def lever(chosen: tuple[Change, ...]) -> Lever:
        fields = {name: value for change in chosen for name, value in change.fields.items()}
        after = planner(replace(flags, **fields))
        shorter = any(_is_shorter(change, flags) for change in chosen)
        return Lever(
            flags=" ".join(change.flag for change in chosen).replace(f" {AWQ}", f" with {AWQ}"),
            query="&".join(change.query for change in chosen),
            starts=after.starts,
            fits=after.fits,
            kv_cache_bytes=Difference(after.kv_cache_bytes),
            requests_at_once=round(after.requests_at_once, 2),
            gained=0.0 if shorter else round(after.requests_at_once - before.requests_at_once, 2),
            note="; ".join(change.note for change in chosen),
        )

    found: list[Lever] = []
    left = list(changes)
    for size in range(1, LONGEST_SET + 1) if before.fits is not True else ():
        tried = [(chosen, lever(chosen)) for chosen in combinations(left, size) if _is_one(chosen)]
        fitting = [(chosen, one) for chosen, one in tried if one.fits is True]
        found += sorted((one for _, one in fitting), key=lambda one: -one.gained)
        costly = {change.query for chosen, _ in fitting for change in chosen if _costs_more(change, flags)}
        if any(costly.isdisjoint(change.query for change in chosen) for chosen, _ in fitting):
            break
        left = [change for change in left if change.query not in costly]
    if found:
        return tuple(found[:SHOWN])
    return tuple(_sorted(lever((change,)) for change in changes))[:SHOWN] if before.starts is True else ()


def _costs_more(change: Change, flags: Any) -> bool:
    """Return True for a change that needs more GPUs, or refuses requests that were allowed."""
    return "tp" in change.fields or _is_shorter(change, flags)


def _is_shorter(change: Change, flags: Any) -> bool:
    """Return True for a change that only shortens requests, so that the cache holds more of them."""
    length = change.fields.get("max_model_len")
    return isinstance(length, int) and length < flags.max_model_len


def _is_one(chosen: tuple[Change, ...]) -> bool:
    """Return True if no two changes set the same key."""
    keys = [change.query.partition("=")[0] for change in chosen]
    return len(set(keys)) == len(keys)


def _sorted(levers: Iterable[Lever]) -> list[Lever]:
    return sorted((lever for lever in levers if lever.gained > 0), key=lambda lever: -lever.gained)
