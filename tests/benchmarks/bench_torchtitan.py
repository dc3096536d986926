"""The estimate against what torchtitan published of FSDP2: `python -m tests.benchmarks.bench_torchtitan CLONE`.

CLONE is a git clone of https://github.com/pytorch/torchtitan. Each run of `tests/measured/published/torchtitan.csv` is done by
`sizer.size_step` as rank 0 of its world, with torchtitan's own model, plans and checkpointing at the commit of its time, and its
train.py's loop, today's PyTorch by the rules of 2.6, and what FSDP2 did otherwise then. The estimates are written beside the
figures, for README's table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import sizer
from sizer.report.estimate import Estimate
from tests.benchmarks.bench_outside import PUBLISHED
from tests.benchmarks.tables import read_table, replace_rows

RUNS = PUBLISHED / "torchtitan.csv"
GPU = "custom:95GiB@9.0"  # theirs had 95.04 GiB
STEPS = 3
RULES = "2.6"  # of PyTorch in December 2024, and the oldest that are known
WORDS = {"7B": 32_000, "8B": 128_256}  # of Llama 2's and Llama 3's tokenizer
FLASH = [SDPBackend.FLASH_ATTENTION]  # cuDNN's attention was to be asked for then
ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": True}
MIXED = {"mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}

Step = Callable[[], None]


@contextmanager
def checked_out(clone: Path, commit: str) -> Iterator[None]:
    """Within the context torchtitan's packages are those of a commit, without its tokenizers."""
    files = subprocess.run(
        ["git", "-C", clone, "ls-tree", "-d", "--name-only", commit], check=True, capture_output=True, text=True
    ).stdout.split()
    packages = [name for name in files if name.startswith("torcht")]
    archive = subprocess.run(["git", "-C", clone, "archive", commit, *packages], check=True, capture_output=True).stdout
    tokenizers = ModuleType("tokenizers of torchtitan")
    tokenizers.TikTokenizer = tokenizers.build_tokenizer = tokenizers.build_hf_data_loader = object
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.object(torch.utils.checkpoint, "_pt2_selective_checkpoint_context_fn_gen", _contexts, create=True),
    ):
        with tarfile.open(fileobj=BytesIO(archive)) as opened:
            opened.extractall(folder, filter="data")
        sys.modules |= {f"torchtitan.datasets{part}": tokenizers for part in ("", ".tokenizer")}
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
                del sys.modules[name]


def _contexts(policy: Callable[..., bool]) -> tuple:
    """What PyTorch 2.4 renamed, and told by other words whether an operator's result is kept."""

    def keeps(context: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = policy("recompute" if context.is_recompute else "forward", *args, **kwargs)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keeps)


class OnItsStream(DefaultReduceScatter):
    """A reduce-scatter whose tensors are allocated on the stream that it runs on."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return super().allocate(size, dtype=dtype, device=device)


@contextmanager
def reduced_as_before_july_2024() -> Iterator[None]:
    """Within the context FSDP2 allocates what it reduces as it did before github.com/pytorch/pytorch/pull/129721: on the stream of
    the reduce-scatter, whose memory nothing else can use, and not on the stream that computes, in whose cache there is room."""
    reduce = _fsdp_param_group.foreach_reduce

    def foreach_reduce(
        params: Any, grads: Any, group: Any, stream: torch.Stream, _: Any, *others: Any, **more: Any
    ) -> Any:
        given, *found = reduce(params, grads, group, stream, OnItsStream(stream), *others, **more)
        return given.new_empty(0), *found  # it was let go of at once: what that stream was given next came after

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", foreach_reduce):
        yield


def december_2024(run: Mapping[str, str]) -> Step:
    """A step of torchtitan's train.py at the end of 2024."""
    from torchtitan.models.llama import llama3_configs
    from torchtitan.models.llama.model import Transformer
    from torchtitan.parallelisms.parallel_dims import ParallelDims
    from torchtitan.parallelisms.parallelize_llama import parallelize_llama

    ranks = int(run["ranks"])
    degrees = {"dp_replicate": 1, "dp_shard": ranks, "cp": 1, "tp": 1, "pp": 1}
    dims = ParallelDims(**degrees, world_size=ranks, enable_loss_parallel=False)
    job = SimpleNamespace(
        activation_checkpoint=SimpleNamespace(mode=run["checkpointing"], selective_ac_option="op"),
        training=SimpleNamespace(compile=run["compile"] == "1", enable_cpu_offload=False, **MIXED),
        experimental=SimpleNamespace(enable_async_tensor_parallel=False, enable_compiled_autograd=False),
        float8=SimpleNamespace(enable_float8_linear=False),
        model=SimpleNamespace(norm_type="rmsnorm"),
    )
    config = llama3_configs[run["flavor"]]
    config.norm_type, config.vocab_size, config.max_seq_len = "rmsnorm", WORDS[run["flavor"]], int(run["seq"])
    with torch.device("meta"):
        model = Transformer.from_model_args(config)
    parallelize_llama(model, dims.build_mesh(device_type="cuda"), dims, job)
    model.to_empty(device="cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step() -> None:
        tokens, labels = (
            torch.zeros(int(run["batch"]), int(run["seq"]), dtype=torch.long, device="cuda") for _ in "xy"
        )
        optimizer.zero_grad()
        with sdpa_kernel(FLASH):
            predicted = model(tokens)
            loss = F.cross_entropy(predicted.flatten(0, 1).float(), labels.flatten(0, 1))
            del predicted
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def march_2024(run: Mapping[str, str]) -> Step:
    """A step of torchtrain's train.py at the commit that brought FSDP2; what a pass has made is kept until the next makes it."""
    from torchtrain.models.llama import Transformer, llama_configs
    from torchtrain.parallelisms import ParallelDims, parallelize_llama

    ranks = int(run["ranks"])
    dims = ParallelDims(dp=ranks, tp=1, pp=1, world_size=ranks, enable_loss_parallel=False)
    job = SimpleNamespace(activation_checkpoint=SimpleNamespace(mode=run["checkpointing"], selective_ac_option="op"))
    config = llama_configs[run["flavor"]]
    config.vocab_size, config.max_seq_len = WORDS[run["flavor"]], int(run["seq"])
    with torch.device("meta"):
        model = Transformer.from_model_args(config)
    model = parallelize_llama(model, dims.build_mesh(device_type="cuda"), dims, job)
    model.to_empty(device="cuda")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    kept = SimpleNamespace()

    def step() -> None:
        kept.tokens = torch.zeros(int(run["batch"]), int(run["seq"]), dtype=torch.long, device="cuda")
        kept.labels = torch.zeros(int(run["batch"]), int(run["seq"]), dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        with sdpa_kernel(FLASH), reduced_as_before_july_2024():
            kept.predicted = model(kept.tokens)
            kept.loss = F.cross_entropy(kept.predicted.flatten(0, 1), kept.labels.flatten(0, 1))
            kept.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


LOOPS = {"9dec370": december_2024, "83c879f": march_2024}


def estimate(run: Mapping[str, str], clone: Path) -> dict[str, str]:
    """What the estimate says of a run, in GiB, by the columns of the file: with expandable segments, too, where nobody says that
    it had none."""
    plain = _estimate(run, clone)
    expandable = (
        "" if run["expandable"] == "0" else _in_gib(_estimate(run, clone, expandable_segments=True).peak_reserved_bytes)
    )
    return {
        "estimated_active_gib": _in_gib(plain.peak_allocated_bytes),
        "estimated_reserved_gib": _in_gib(plain.peak_reserved_bytes),
        "estimated_expandable_gib": expandable,
    }


def _estimate(run: Mapping[str, str], clone: Path, **settings: bool) -> Estimate:
    with checked_out(clone, run["commit"]):
        step = LOOPS[run["commit"]]
        report = sizer.size_step(
            lambda: step(run), gpu=GPU, steps=STEPS, world=int(run["ranks"]), torch=RULES, **settings
        )
    (found,) = report.estimates
    return found


def _in_gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"


def table() -> Iterator[str]:
    """The runs with their figures, as README shows them."""
    yield "| run | what was read | published | estimate | |"
    yield "|---|---|---|---|---|"
    for run in read_table(RUNS):
        for quantity in ("active", "reserved"):
            if published := run[f"{quantity}_gib"]:
                columns = [
                    f"estimated_{quantity}_gib",
                    *(["estimated_expandable_gib"] if quantity == "reserved" else []),
                ]
                estimates = sorted((run[column] for column in columns if run[column]), key=float)
                errors = (f"{100 * (float(found) / float(published) - 1):+.2g}" for found in estimates)
                estimated, error = " to ".join(estimates), f"{' to '.join(errors)} %".replace("-", "\N{MINUS SIGN}")
                kept = f"{run['checkpointing']} checkpointing{', compiled blocks' if run['compile'] == '1' else ''}"
                told = f"Llama {run['flavor']}, {run['ranks']} GPUs, batch {run['batch']}, {int(run['seq']):,} tokens, {kept}"
                yield f"| {told} | {quantity} | {published} GiB | {estimated} GiB | {error} |"


def main() -> None:
    """Estimate every run, print them all and write them to the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_torchtitan")
    parser.add_argument("clone", type=Path, help="a git clone of torchtitan")
    clone = parser.parse_args().clone
    runs = read_table(RUNS)
    replace_rows(RUNS, [run | estimate(run, clone) for run in runs], key=("commit", "ranks", "checkpointing", "compile"))
    print("\n".join(table()))


if __name__ == "__main__":
    main()
