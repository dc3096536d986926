"""Compare with published peaks over activation memory budgets: `python -m tests.benchmarks.bench_budgets [SCALE BACKEND]`.

The measurements are those of github.com/siddddd17/ackaudit, which PyTorch's issue 197838 reports: transformers' Llama of 4 × scale
layers on 128 × scale tokens, batch 2, torch 2.14 on a GTX 1650. The estimates follow the rules of 2.14 for a T4, a GPU of the same
compute capability, with the compiler of the installed PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.bench_outside import PUBLISHED
from tests.benchmarks.tables import read_table, replace_rows
from tests.tracing.compiled_steps import figures_of

RUNS = PUBLISHED / "budgets.csv"
GPU, RULES = "t4", "2.14"


class SummedLlama(nn.Module):
    """Llama whose loss is the sum of its last hidden states."""

    def __init__(self, scale: int) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=4 * scale, num_attention_heads=8,
            num_key_value_heads=8, vocab_size=1000, use_cache=False,
        )  # fmt: skip
        self.model = LlamaModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).last_hidden_state.sum()


def setup_of(run: Mapping[str, str]) -> Callable[[], Callable[[], Any]]:
    """Return the setup of a run: forward and backward pass, without optimizer. The cache is emptied after the first pass."""

    def setup() -> Callable[[], Any]:
        scale, backend, done = int(run["scale"]), run["backend"], [False]
        if run["budget"]:
            torch._functorch.config.activation_memory_budget = float(run["budget"])
        model = SummedLlama(scale).to("cuda")
        ids = torch.zeros(2, 128 * scale, dtype=torch.long).to("cuda")
        called = model if backend == "eager" else torch.compile(model, backend=backend, dynamic=False)

        def step() -> None:
            called(ids).backward()
            model.zero_grad(set_to_none=False)
            if not done[0]:
                torch.cuda.empty_cache()
                done[0] = True

        return step

    return setup


def estimate(run: Mapping[str, str]) -> int:
    """Return the peak of allocated bytes of a pass after the first."""
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=config.activation_memory_budget):
        *_, (peak, _, _) = figures_of(setup_of(run), gpu=GPU, torch=RULES)
    return peak


def error_of(run: Mapping[str, str]) -> float:
    """Return the error of a run's estimate in percent, against the nearer of two runs if there are two."""
    published = [int(run[name]) for name in ("peak_bytes", "another_run_bytes") if run[name]]
    return min((100 * (int(run["estimated_bytes"]) / peak - 1) for peak in published), key=abs)


def table() -> Iterator[str]:
    """Yield the rows of the documentation."""
    runs = read_table(RUNS)
    largest = max(abs(error_of(run)) for run in runs if run["scale"] == "8")
    smaller = max(abs(error_of(run)) for run in runs if run["scale"] != "8")
    yield f"The largest difference is {largest:.2f} % with 32 layers, and {smaller:.2f} % with fewer."
    yield ""
    yield "| layers, tokens | code | budget | published, bytes | difference | |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        scale, error = int(run["scale"]), f"{error_of(run):+.3f} %".replace("-", "\N{MINUS SIGN}")
        difference = f"{int(run['estimated_bytes']) - int(run['peak_bytes']):+,}".replace("-", "\N{MINUS SIGN}")
        sizes = f"{4 * scale}, 2 × {128 * scale:,}"
        yield f"| {sizes} | {run['backend']} | {run['budget']} | {int(run['peak_bytes']):,} | {difference} | {error} |"


def main() -> None:
    """Estimate the runs, or those of a scale and a backend, and write the estimates to the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_budgets")
    parser.add_argument("only", nargs="*", metavar="SCALE BACKEND")
    only = parser.parse_args().only
    runs = [run for run in read_table(RUNS) if not only or [run["scale"], run["backend"]] == only]
    for run in runs:
        torch._dynamo.reset()
        done = run | {"estimated_bytes": str(estimate(run))}
        replace_rows(RUNS, [done], key=("scale", "backend", "budget"))
        print(*done.values(), f"{error_of(done):+.4f} %", flush=True)


if __name__ == "__main__":
    main()
