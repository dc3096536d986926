"""Queries with compile=default over the null driver: PyTorch's own figures of each phase, as JSON.

python -m tests.null_driver.compiled_queries GPU FILE [NAME…]

records what FILE lacks of `QUERIES`, each in a process of its own. With `--one GPU NAME` it prints the figures of one query.
A row is [phase, allocated at its end, most allocated, reserved at its end], in bytes.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.catalogue.hardware import HARDWARE
from sizer.device.trial.materialize import allocate_parameters, initialize_parameters, prepare
from sizer.device.trial.rank import take_part
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tracing.compiled.inductor import without_function_modes
from sizer.tracing.compiled.install import budgeted, module_compiled
from sizer.tracing.steps import Steps
from sizer.tracing.trace import repeatable
from tests.null_driver.build import null_environment
from tests.null_driver.compiled import environment, nothing_compiled_or_timed
from tests.null_driver.emptied import empty_the_allocator
from tests.null_driver.ranks import answers
from tests.null_driver.values import KnownValues

ROOT = Path(__file__).parent.parent.parent
RECORDED = Path(__file__).parent / "compiled_queries.json"
GPU = "h100-80gb"
CUDA = torch.device("cuda")

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 1024,
}  # fmt: skip
MODELS = {
    "resnet18": "arch=torchvision:resnet18&batch=8",
    "vit_b_16": "arch=torchvision:vit_b_16&batch=4",
    "gpt2": "arch=hf:gpt2&seq=256&batch=4",
    "bert": "arch=hf:bert-base-uncased&seq=128&batch=4",
    "llama": f"arch=config:{encode_config(json.dumps(_LLAMA))}&seq=256&batch=2",
}
OTHER_ADAPTERS = ("pissa", "olora", "loha", "lokr", "miss", "beft", "p-tuning")
_SCOPE_OR_BUDGET = ("&compile_scope=model", "&budget=0.5")
# MODEL, then the other keys of the query.
QUERIES = (
    *(f"resnet18 dtype={dtype}" for dtype in ("float32", "bfloat16", "amp-bfloat16")),
    "resnet18 dtype=float32&mode=inference",
    *(f"vit_b_16 dtype=amp-bfloat16{more}" for more in ("", "&budget=0.5", "&budget=0.2", "&mode=inference")),
    "vit_b_16 dtype=bfloat16&compile_scope=blocks",
    *(f"gpt2 dtype={dtype}" for dtype in ("float32", "bfloat16", "amp-bfloat16", "amp-float16")),
    *(f"gpt2 dtype=bfloat16&budget={budget}" for budget in ("0.5", "0.2")),
    *(f"gpt2 dtype=bfloat16&compile_scope=model{more}" for more in ("", "&budget=0.5", "&budget=0.2")),
    "gpt2 dtype=bfloat16&mode=inference",
    "bert dtype=float16&optimizer=sgd",
    *(f"llama dtype={dtype}" for dtype in ("float32", "bfloat16", "amp-bfloat16")),
    *(f"llama dtype=bfloat16&budget={budget}" for budget in ("0.5", "0.2")),
    "llama dtype=bfloat16&compile_scope=model",
    "llama dtype=bfloat16&mode=inference",
    "llama dtype=bfloat16&mode=inference&compile_scope=model",
    *(f"gpt2 dtype={dtype}&checkpointing=1" for dtype in ("float32", "bfloat16", "amp-bfloat16", "amp-float16")),
    *(f"{model} dtype=bfloat16&checkpointing=1{more}" for model in ("gpt2", "llama") for more in _SCOPE_OR_BUDGET),
    *(f"{model} dtype=bfloat16&checkpointing=1" for model in ("bert", "llama")),
    *(f"vit_b_16 dtype=amp-bfloat16&checkpointing=1{more}" for more in ("", "&compile_scope=blocks")),
    *(f"{model} dtype=bfloat16&train=adapter" for model in ("gpt2", "bert", "llama")),
    *(f"llama dtype=amp-bfloat16&train=adapter{more}" for more in ("", "&checkpointing=1", "&compile_scope=model")),
    *(f"llama dtype=bfloat16&train=adapter{more}" for more in (*_SCOPE_OR_BUDGET, "&checkpointing=1")),
    *(f"llama dtype=bfloat16&train=adapter&{more}" for more in ("adapter_dropout=0.1", "targets=attention")),
    *(f"llama dtype=bfloat16&train=adapter&adapter={name}" for name in ("dora", "ia3", "prompt", "oft")),
    *(f"{model} dtype=bfloat16&train=head" for model in ("resnet18", "llama")),
    *(f"{model} dtype=bfloat16&accumulate=4" for model in ("gpt2", "bert", "llama")),
    *(f"llama dtype=bfloat16&accumulate={more}" for more in ("2&compile_scope=model", "3&checkpointing=1", "3&train=adapter")),
    *(f"resnet18 dtype={dtype}&accumulate=2" for dtype in ("float32", "amp-float16")),
    *(f"{keys}&compile=reduce-overhead" for keys in (
        *(f"resnet18 dtype={keys}" for keys in ("float32", "amp-bfloat16", "bfloat16&train=head", "float32&mode=inference")),
        *(f"gpt2 dtype={keys}" for keys in ("bfloat16", "amp-float16", "bfloat16&compile_scope=model", "bfloat16&mode=inference")),
        *(f"llama dtype={keys}" for keys in ("bfloat16", "bfloat16&budget=0.5", "amp-bfloat16&compile_scope=model")),
        *(f"llama dtype=bfloat16&{more}" for more in ("checkpointing=1", "train=adapter", "train=adapter&adapter_dropout=0.1")),
        "llama dtype=bfloat16&mode=inference", "vit_b_16 dtype=amp-bfloat16", "bert dtype=float16&optimizer=sgd",
    )),
    *(f"llama dtype=bfloat16&train=adapter&adapter={name}" for name in OTHER_ADAPTERS),
    *(f"llama dtype=bfloat16&train=adapter&weights={more}" for more in (
        "nf4", "int8", "nf4&compile_scope=model", "nf4-dq&checkpointing=1", "nf4&compile=reduce-overhead",
        "nf4&parallel=ddp&ranks=8",
    )),
    *(f"llama dtype=bfloat16&mode=inference&weights={weights}" for weights in ("nf4", "int8")),
    *(f"{keys}&parallel=ddp&ranks=8" for keys in (
        "resnet18 dtype=float32", "gpt2 dtype=bfloat16", "llama dtype=bfloat16", "llama dtype=amp-bfloat16",
    )),
    *(f"llama dtype=bfloat16&parallel=ddp&ranks=8&{more}" for more in (
        "compile_scope=model", "accumulate=2", "train=adapter", "compile=reduce-overhead",
    )),
    "llama dtype=bfloat16&parallel=ddp&ranks=2&cp=2",
    *(f"llama dtype={dtype}&parallel=fsdp&ranks=8" for dtype in ("bfloat16", "amp-bfloat16")),
    *(f"llama dtype=bfloat16&parallel=fsdp&ranks=8&{more}" for more in (
        "compile_scope=model", "checkpointing=1", "accumulate=2", "mode=inference", "offload=1",
    )),
    *(f"llama dtype=bfloat16&{more}" for more in (
        "parallel=hsdp&ranks=4&replicate=2", "parallel=fsdp&ranks=4&tp=2", "parallel=zero1&ranks=8", "tp=2&optimizer_impl=loop",
    )),
)  # fmt: skip


def query_of(name: str, gpu: str = GPU) -> str:
    """Return the query of one of QUERIES."""
    model, _, keys = name.partition(" ")
    return f"{MODELS[model]}&{keys}{'' if 'compile=' in keys else '&compile=default'}&gpu={gpu}"


def figures(query: str) -> list[list[Any]]:
    """Return a row for each phase of a query's one cell."""
    request = parse_query(query)
    blueprint, work, (batch,) = make_blueprint(request), work_of(request, *request.dtypes), request.batches
    module, bring = prepare(blueprint, work.dtype, checkpointing=request.checkpointing)
    torch._dynamo.callback_handler.register_end_callback(lambda told: gc.collect())  # as tests.null_driver.compiled
    empty_the_allocator()
    plan = work.plan
    if plan is not None:
        dist.init_process_group(
            "fake", rank=plan.rank or 0, world_size=plan.world, store=FakeStore(), pg_options=answers()
        )
        module, bring = take_part(module, bring, plan, work.dtype, CUDA)
    if blueprint.load_quantized is None and (plan is None or not plan.splits):
        allocate_parameters(module)
    rows: list[list[Any]] = []

    def read(phase: str) -> None:
        gc.collect()  # Dynamo leaves cycles around tensors; when Python collects them depends on what ran before
        rows.append(
            [phase, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()]
        )
        torch.cuda.reset_peak_memory_stats()

    with (
        repeatable(),
        nothing_compiled_or_timed(),
        budgeted(work.budget),
        nullcontext() if request.source == "torchvision" else KnownValues(),  # as tests.null_driver.record
    ):
        module = bring(module, CUDA)
        read("load")
        if plan is None:
            initialize_parameters(module)
        example = blueprint.example(batch, work.trains)
        with module_compiled(module, work.compile_scope, work.compile_mode) as called, without_modes_in(called, module):
            for phase in Steps(blueprint, called, example, work, device=CUDA).run():
                read(phase)
    return rows


@contextmanager
def without_modes_in(called: nn.Module, module: nn.Module) -> Iterator[None]:
    """Within the context compiled code runs without function modes, which Dynamo would trace."""

    def plain(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_function_modes():
                return call(*args, **kwargs)

        return run

    if called is not module:
        called.forward = plain(called.forward)
    for block in module.modules():
        if block._compiled_call_impl is not None:
            block._compiled_call_impl = plain(block._compiled_call_impl)
    yield


def record(gpu: str, file: Path, names: list[str]) -> None:
    """Record what a file lacks."""
    kept = json.loads(file.read_text()) if file.exists() else {"gpu": gpu, "versions": {}, "queries": {}}
    kept["versions"] = {
        name: version(name).split("+")[0] for name in ("torch", "torchvision", "transformers", "triton")
    }
    for name in names or QUERIES:
        if name in kept["queries"]:
            continue
        command = [sys.executable, "-m", "tests.null_driver.compiled_queries", "--one", gpu, name]
        given = {**os.environ, **null_environment(HARDWARE[gpu]), **environment()}
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
        if done.returncode:
            print(name, "FAILED", (done.stderr.strip().splitlines() or ["no reason"])[-1][:300], flush=True)
            continue
        kept["queries"][name] = json.loads(done.stdout.splitlines()[-1])
        print(name, kept["queries"][name], flush=True)
        text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in kept["queries"].items())
        head = f'"gpu": {json.dumps(kept["gpu"])},\n "versions": {json.dumps(kept["versions"])}'
        file.write_text(f'{{{head},\n "queries": {{\n{text}\n}}}}\n')


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        torch.cuda.init()
        print(json.dumps(figures(query_of(sys.argv[3], sys.argv[2]))), flush=True)
        os._exit(0)  # nothing to take down: the device is none
    record(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
