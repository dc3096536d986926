"""What vLLM's versions do differently, a row for each version from which a rule holds. The sources are in `RULES`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sizer.units import GIB, MIB

Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: from which version on a name has a value, and where that was read or measured."""

    name: str
    since: Release
    value: object
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one version of vLLM.

    `util` is gpu_memory_utilization's default. `sampler` is the path of the profile run. `graphs_in_budget` says whether graphs are
    estimated before the cache is sized. `padding` is the ratio of layer counts below which groups of layers are padded.
    `batches_in_flight` is how many steps a sliding window keeps. `tokens_of_requests` says whether the KV tokens in the log are
    those of whole requests. `large_seqs` is max_num_seqs on a large device, `huge_tokens` whether devices from 160 GiB on take more
    tokens. `outside_bytes` and `outside_ranks_bytes` are allocated outside of PyTorch, the latter with more than one rank;
    `graph_bytes` are those of a graph for each layer and captured size. These three are fitted.
    """

    util: float
    sampler: str
    graphs_in_budget: bool
    padding: float
    batches_in_flight: int
    tokens_of_requests: bool
    large_seqs: int
    huge_tokens: bool
    outside_bytes: int
    outside_ranks_bytes: int
    graph_bytes: int


FITTED = "fitted on the startup logs in docs/serving.md"
_FIRST = (0, 9, 0)

RULES: tuple[Rule, ...] = (
    Rule(name="util", since=_FIRST, value=0.9, source="vllm/config/cache.py"),
    Rule(name="util", since=(0, 20, 0), value=0.92, source="vllm/config/cache.py, 0.33"),
    Rule(name="sampler", since=_FIRST, value="sort", source="vllm/v1/sample/ops/topk_topp_sampler.py"),
    Rule(name="sampler", since=(0, 16, 0), value="triton", source="vllm/v1/sample/ops/topk_topp_triton.py"),
    Rule(
        name="sampler",
        since=(0, 22, 0),
        value="flashinfer",
        source="vllm/v1/worker/gpu_model_runner.py, _dummy_sampler_run, 0.33: the Triton path runs after FlashInfer's",
    ),
    Rule(name="graphs_in_budget", since=_FIRST, value=False, source="vllm/v1/worker/gpu_worker.py"),
    Rule(
        name="graphs_in_budget",
        since=(0, 21, 0),
        value=True,
        source="vllm/v1/worker/gpu_worker.py, determine_available_memory, 0.33",
    ),
    Rule(name="padding", since=_FIRST, value=1.0, source="vllm/v1/core/kv_cache_utils.py"),
    Rule(name="padding", since=(0, 12, 0), value=1.5, source="vllm/v1/core/kv_cache_planning.py, 0.33"),
    Rule(name="batches_in_flight", since=_FIRST, value=1, source="vllm/v1/kv_cache_interface.py, SlidingWindowSpec"),
    Rule(name="batches_in_flight", since=(0, 30, 0), value=2, source="vllm/v1/kv_cache_interface.py, 0.33"),
    Rule(name="tokens_of_requests", since=_FIRST, value=False, source="vllm/v1/core/kv_cache_utils.py"),
    Rule(
        name="tokens_of_requests",
        since=(0, 20, 1),
        value=True,
        source="vllm/v1/core/kv_cache_utils.py, get_kv_cache_capacity, 0.33",
    ),
    Rule(name="large_seqs", since=_FIRST, value=1024, source="vllm/engine/arg_utils.py, get_batch_defaults"),
    Rule(name="huge_tokens", since=_FIRST, value=False, source="vllm/engine/arg_utils.py, get_batch_defaults"),
    Rule(name="huge_tokens", since=(0, 30, 0), value=True, source="vllm/engine/arg_utils.py, get_batch_defaults, 0.33"),
    Rule(name="outside_bytes", since=_FIRST, value=GIB // 20, source=FITTED),
    Rule(name="outside_ranks_bytes", since=_FIRST, value=18 * GIB // 10, source=f"{FITTED}: NCCL came after the snapshot"),
    Rule(name="outside_ranks_bytes", since=(0, 10, 0), value=15 * GIB // 100, source=FITTED),
    Rule(name="graph_bytes", since=_FIRST, value=3 * MIB // 10, source=FITTED),
)


def rules_of(release: Release) -> Rules:
    """Return the rules of a version: of each name the newest row that is not newer than the version."""
    found: dict[str, object] = {}
    for rule in sorted(RULES, key=lambda row: row.since):
        if rule.since <= release:
            found[rule.name] = rule.value
    return Rules(**{field.name: found[field.name] for field in fields(Rules)})
