"""Startup logs of servers that others have published, and what the plan says in their place: `serving.csv` beside other runs.

    python -m tests.serving.logs              # every row with its errors in percent
    python -m tests.serving.logs --record     # and write them beside the logs, for docs/serving.md
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from sizer.architecture.loading import resolve_weights
from sizer.base.units import GIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import ENGINES
from sizer.estimating.model import COUNTED_IN, Model
from sizer.estimating.scopes import served_module
from sizer.estimating.server_model import read_architecture
from sizer.estimating.server_profile import trace_profile
from sizer.estimating.server_report import processors_of
from sizer.estimating.store import EmptyStore
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.serving.architecture import Architecture
from sizer.serving.cache import plan_cache
from sizer.serving.flags import Flags, resolve_flags
from sizer.serving.layout import weights_bytes
from sizer.serving.plan import Plan, make_plan
from sizer.serving.sglang import Pool, band_of, plan_pool, resolve_sglang
from sizer.tracing.device import Device
from tests.serving.log_table import ROWS, read_cells

ENGINES_SCORED = ("vllm", "sglang")
UNKNOWN_GPU = "a10"  # stands for a card that a log does not name: such a row tests weights and plan alone


@dataclass(frozen=True, slots=True)
class Row:
    """One log: its cells as text."""

    cells: dict[str, str]

    def number(self, name: str) -> float | None:
        return float(self.cells[name]) if self.cells[name] else None

    def integer(self, name: str) -> int | None:
        return int(self.cells[name]) if self.cells[name] else None

    @property
    def name(self) -> str:
        """The model and the version."""
        return f"{self.cells['model']} {self.cells['engine']} {self.cells['version']}"

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(map(int, self.cells["version"].split(".")))

    @property
    def is_known(self) -> bool:
        """Whether a query may ask for the version."""
        return ENGINES[self.cells["engine"]].oldest <= self.release


def read_rows(engine: str = "vllm") -> list[Row]:
    """Return the logs of an engine."""
    return [Row(cells) for cells in read_cells() if cells["engine"] == engine]


@cache
def architecture_of(preset: str) -> Architecture:
    """Return a preset's architecture as a server sees it."""
    request = served_module(parse_query(f"arch=hf:{preset}&mode=serve"))
    gpu = find_gpu(request.gpu)
    loaded = resolve_weights(request, gpu, None)
    device = Device(gpu.backend, gpu.capability)
    model = Model(request, loaded, device, config=None, store=EmptyStore(), progress=lambda text: None)
    return read_architecture(model.module(COUNTED_IN), preset, find_preset(preset).config)


def request_of(row: Row) -> Request:
    """Return the question that a log answers. Its version may be one that a query refuses."""
    cells, layout = row.cells, row.cells["layout"]
    request = parse_query(f"arch=hf:{cells['preset']}&mode=serve&engine={cells['engine']}")
    own = layout in ("fp8", "nvfp4")
    weights = {"weights": layout} if layout == "fp8" else {"weights": "checkpoint" if layout else "full"}
    return replace(
        request,
        **weights,
        server_weights=layout if layout and not own else None,
        gpu=cells["gpu"] or UNKNOWN_GPU,
        engine_version=cells["version"] if row.is_known else None,
        tp=int(cells["tp"]),
        util=row.number("util"),
        max_model_len=row.integer("max_model_len"),
        max_num_seqs=row.integer("max_num_seqs"),
        max_num_batched_tokens=row.integer("max_num_batched_tokens"),
        kv=cells["kv"],
        enforce_eager=cells["eager"] == "1",
        api="offline" if cells["offline"] == "1" else "server",
        sampler=cells["sampler"] or "auto",
        prefix_caching=cells["prefix"] or "auto",
        inputs=cells["inputs"] or None,
    )


def _facts(row: Row) -> tuple[Architecture, Gpu]:
    architecture, gpu = architecture_of(row.cells["preset"]), find_gpu(row.cells["gpu"] or UNKNOWN_GPU)
    architecture = architecture.reading_text() if row.cells["inputs"] == "text" else architecture
    longest = max(architecture.positions, row.integer("max_model_len") or 0)  # checkpoints of one preset differ in it
    rows = architecture.rotary_rows if row.integer("positions") is None else (row.integer("positions"),)
    return replace(architecture, positions=longest, rotary_rows=rows), gpu


def flags_of(row: Row) -> Flags:
    """Return vLLM's flags of a log."""
    architecture, gpu = _facts(row)
    if row.cells["layout"] == "nvfp4":
        architecture = replace(architecture, quantization="nvfp4")  # of the checkpoint: no value of `weights`
    flags = resolve_flags(request_of(row), architecture, gpu, processors_of(gpu))
    return replace(
        flags,
        release=flags.release if row.is_known else (0, 9, 0),
        marlin=row.cells["marlin"] == "1",
        block=row.integer("block") or 16,
    )


def plan_of(row: Row) -> Plan:
    """Return vLLM's plan in the place of a log."""
    architecture, gpu = _facts(row)
    return make_plan(architecture, flags_of(row), lambda flags: trace_profile(architecture, flags, gpu), gpu)


def pool_of(row: Row) -> Pool:
    """Return SGLang's pool in the place of a log, with the free memory that the log says if it does."""
    architecture, gpu = _facts(row)
    flags = resolve_sglang(request_of(row), architecture, gpu)
    if (free := row.number("available_gib")) is not None:
        flags = replace(flags, used_bytes=plan_pool(architecture, flags, gpu).free_bytes - round(free * GIB))
    return plan_pool(architecture, flags, gpu)


def pools_alone(row: Row) -> tuple[Pool, Pool, Pool]:
    """Return SGLang's pool from the GPU and the flags alone, and the ends of its range."""
    architecture, gpu = _facts(row)
    flags = resolve_sglang(request_of(row), architecture, gpu)
    band, _ = band_of(flags, gpu)
    pool, low, high = (plan_pool(architecture, flags, gpu, change) for change in (0, -band, band))
    return pool, low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far a plan is from a log, in percent; None for what the log does not say.

    `alone` is SGLang's error from the GPU and the flags, `tokens` the one with the log's free memory. `in_band` is of the former.
    """

    row: Row
    weights: float | None = None
    tokens: float | None = None
    alone: float | None = None
    planned: float | None = None
    in_band: bool | None = None


def errors_of(row: Row) -> Errors:
    """Return the errors of one log: weights, KV tokens end to end, and those from the log's own memory of the cache."""
    uses, tokens = row.cells["use"], row.integer("kv_tokens")
    if row.cells["engine"] == "sglang":
        pool, memory = pool_of(row), row.number("kv_gib")
        alone, low, high = pools_alone(row)
        known, free = "k" in uses, row.number("available_gib")
        possible = known and (free is None or free * GIB <= _facts(row)[1].total_bytes)  # else the card was inferred wrongly
        return Errors(
            row=row,
            weights=_off(pool.weights_bytes / GIB, row.number("weights_gib")),
            tokens=_off(pool.tokens, tokens) if known else None,
            alone=_off(alone.tokens, tokens) if possible else None,
            planned=_off(memory * GIB / pool.token_bytes, tokens) if memory else None,
            in_band=low.tokens <= tokens <= high.tokens if possible else None,
        )
    architecture, _ = _facts(row)
    plan, memory = plan_of(row), row.number("kv_gib")
    known = tokens is not None and "k" in uses and row.is_known
    planned = plan_cache(architecture, plan.flags, round(memory * GIB)).kv_tokens if memory and tokens else None
    weights = weights_bytes(architecture, plan.flags) / GIB if "w" in uses else None
    return Errors(
        row=row,
        weights=_off(weights, row.number("weights_gib")),
        tokens=_off(plan.cache.kv_tokens, tokens) if known else None,
        planned=_off(planned, tokens),
        in_band=plan.low.kv_tokens <= tokens <= plan.high.kv_tokens if known else None,
    )


def _off(found: float | None, logged: float | None) -> float | None:
    return None if found is None or not logged else 100 * (found / logged - 1)


def middle(values: list[float | None]) -> tuple[float, float]:
    """Return the median and the largest of absolute errors, in percent."""
    known = [abs(value) for value in values if value is not None]
    return median(known), max(known)


def recorded_errors(one: Errors) -> dict[str, str]:
    """Return the columns of the errors of a log, in percent with two decimals."""
    parts = {"weights_off": one.weights, "tokens_off": one.tokens, "planned_off": one.planned, "alone_off": one.alone}
    inside = {"inside": "" if one.in_band is None else "01"[one.in_band]}
    return {name: "" if value is None else f"{round(value, 2) + 0.0:.2f}" for name, value in parts.items()} | inside


def record() -> None:
    """Write the errors of every log beside its figures."""
    rows = [row.cells | recorded_errors(errors_of(row)) for engine in ENGINES_SCORED for row in read_rows(engine)]
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Print every log with its errors."""
    if "--record" in sys.argv[1:]:
        record()
    for engine in ENGINES_SCORED:
        found = [errors_of(row) for row in read_rows(engine)]
        for one in found:
            parts = (one.weights, one.tokens, one.planned, one.alone)
            shown = " ".join("        " if value is None else f"{value:+7.2f}%" for value in parts)
            print(f"{one.row.name:48} {one.row.cells['gpu']:13} {shown} {'' if one.in_band is None else one.in_band}")
        for name in ("weights", "tokens", "planned", "alone"):
            if values := [getattr(one, name) for one in found if getattr(one, name) is not None]:
                typical, worst = middle(values)
                print(f"{engine} {name}: {len(values)} rows, median {typical:.3f} %, worst {worst:.2f} %")


if __name__ == "__main__":
    main()
