"""The script runs without Sizer, and what it measures on the CPU is what the estimate says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.decision.cells import Cells
from sizer.decision.peak import peak, script
from sizer.decision.script import write_script
from sizer.decision.script_text import value_code
from sizer.device.trial.trial import one_thread
from sizer.query.text import parse_query
from sizer.report.peak import PeakReport
from tests.architecture.tiny_configs import TINY
from tests.distributed.test_gloo import traced
from tests.tracing.cpu_truth import tape_bytes
from tests.tracing.models import LLAMA

HAIR = 0.0001  # of the peak: numbers that autograd saves and oneDNN's buffers (tests/tracing/test_cpu_truth_models.py)

SMALL_GPT2 = encode_config('{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000}')
SMALL_BERT = encode_config(
    '{"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}'
)
TINY_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 64}
TINY_LLAMA |= {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
RUN = {
    "CNN": "arch=torchvision:resnet18&image=64&dtype=float32&batch=4&optimizer=sgd-momentum",
    "checkpointed CNN": "arch=torchvision:densenet121&image=64&dtype=float32&batch=2&checkpointing=1&optimizer=sgd",
    "language model": f"arch=config:{SMALL_GPT2}&seq=64&dtype=float32&batch=4",
    "mixed precision": f"arch=config:{SMALL_GPT2}&seq=64&dtype=amp-bfloat16&batch=4&attention=eager&checkpointing=1",
    "masked words": f"arch=config:{SMALL_BERT}&head=BertForMaskedLM&seq=64&dtype=bfloat16&batch=4&optimizer=muon",
    "ViT": "arch=torchvision:vit_b_32&dtype=bfloat16&batch=2&optimizer_impl=fused",
    **(
        {"timm": "arch=timm:vit_tiny_patch16_224&image=160&dtype=float32&batch=2&checkpointing=1"}
        if find_spec("timm")
        else {}
    ),
    "detection": "arch=torchvision:ssdlite320_mobilenet_v3_large&dtype=float32&batch=2&optimizer=sgd",
    **(
        {
            "LoRA": f"arch=config:{SMALL_GPT2}&seq=64&dtype=bfloat16&batch=4&train=adapter&targets=attention&checkpointing=1",
            "DoRA": f"arch=config:{SMALL_GPT2}&seq=64&dtype=float32&batch=4&train=adapter&adapter=dora&r=4&accumulate=3",
            "adapted CNN": "arch=torchvision:densenet121&image=64&dtype=float32&batch=2&checkpointing=1"
            "&train=adapter&targets=conv1",
        }
        if find_spec("peft")
        else {}
    ),
    **(
        {
            "QLoRA": f"arch=config:{SMALL_GPT2}&seq=64&dtype=bfloat16&batch=4&train=adapter&weights=nf4-dq&checkpointing=1",
            "quantized inference": f"arch=config:{SMALL_GPT2}&seq=64&mode=inference&dtype=float32&batch=4&weights=int8",
            "quantized generation": f"arch=config:{SMALL_GPT2}&seq=64&mode=generate&new=8&dtype=bfloat16&batch=16&weights=nf4",
        }
        if find_spec("peft") and find_spec("bitsandbytes")
        else {}
    ),
    "head": "arch=torchvision:resnet18&image=64&dtype=float32&batch=4&train=head",
    "without tower": f"arch=config:{encode_config(json.dumps(TINY['llava']))}&seq=32&dtype=float32&batch=2&train=without-tower",
    "accumulated": f"arch=config:{SMALL_GPT2}&seq=64&dtype=float32&batch=4&accumulate=4",
    "generation": f"arch=config:{SMALL_GPT2}&seq=64&mode=generate&new=8&dtype=bfloat16&batch=4",
    "inference": f"arch=config:{SMALL_GPT2}&seq=64&mode=inference&dtype=bfloat16&batch=4",
}

SOME = ("CNN", "language model", "LoRA", "generation")


def script_of(query: str) -> PeakReport:
    with one_thread():  # as in a job of the app
        *_, found = peak(parse_query(f"{query}&gpu=cpu"))
    return found


# Imports what the scripts do, then runs each in a process of its own that has asked PyTorch for nothing yet.
RUN_EACH = """
import contextlib, os, runpy, sys, traceback
import torch, torchvision, transformers
for path in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.argv = [path]
        with open(f"{path}.out", "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                runpy.run_path(path, run_name="__main__")
            except Exception:
                traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[PeakReport, str]]:
    """By name, what the question of a script was answered with and what the script printed, away from Sizer."""
    folder = tmp_path_factory.mktemp("scripts")
    asked = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "written" in item.fixturenames
    }
    found = {name: script_of(RUN[name]) for name in RUN if name in asked}
    paths = [folder / f"{number}.py" for number in range(len(found))]
    for path, report in zip(paths, found.values(), strict=True):
        path.write_text(report.script, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", RUN_EACH, *map(str, paths)]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=300)
    printed = [Path(f"{path}.out").read_text(encoding="utf-8") for path in paths]
    return dict(zip(found, zip(found.values(), printed, strict=True), strict=True))


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUN]
)
def test_it_measures_what_was_estimated(written: dict[str, tuple[PeakReport, str]], name: str):
    found, printed = written[name]
    assert not found.no_script
    measured = re.search(r"^allocated at the peak: ([\d,]+) bytes", printed, re.MULTILINE)
    assert measured, printed
    assert int(measured[1].replace(",", "")) == pytest.approx(found.allocated_bytes, rel=HAIR)
    beside = re.search(r"^allocated at the peak: .*, estimated ([\d,]+) bytes \(([+-][\d.]+) %\)", printed, re.MULTILINE)
    assert beside, printed
    assert int(beside[1].replace(",", "")) == found.allocated_bytes
    assert abs(float(beside[2])) <= 100 * HAIR


def test_it_imports_nothing_of_ours():
    tree = ast.parse(script_of(RUN["language model"]).script)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"json", "sys", "tempfile", "torch", "transformers"}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("optimizer=adam&optimizer_impl=foreach", "torch.optim.Adam(parameters, foreach=True)"),
        (
            "optimizer=sgd-momentum&optimizer_impl=loop",
            "torch.optim.SGD(parameters, lr=0.001, momentum=0.9, foreach=False)",
        ),
        ("dtype=amp-float16", "scaler.scale(loss).backward()"),
        ("attention=eager", 'config._attn_implementation = "eager"'),
        ("checkpointing=1", "model.gradient_checkpointing_enable()"),
    ],
)
def test_it_does_what_was_asked(keys: str, line: str):
    dtype = "" if keys.startswith("dtype") else "&dtype=float32"
    assert line in script_of(f"arch=config:{SMALL_GPT2}&seq=8&batch=1{dtype}&{keys}").script


def test_a_model_that_nothing_steps_has_no_optimizer():
    assert "torch.optim" not in script_of(f"arch=config:{SMALL_GPT2}&seq=8&batch=1&dtype=float32&optimizer=none").script


def test_a_script_of_inference_is_printed_alone():
    assert "model(*args, **kwargs)" in script(parse_query("arch=torchvision:resnet18&mode=inference&dtype=float32&batch=1"))


def test_what_cannot_be_written_is_said():
    config = encode_config('{"model_type": "sam2_video"}')
    request = parse_query(f"arch=config:{config}&mode=inference&dtype=float32&batch=1&gpu=cpu")
    with pytest.raises(BuildError, match=r"a model that takes objects of transformers' own"):
        write_script(request, Cells(request).tracer(request))


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        ("weights=fp8", "weights=fp8"),
        ("weights=checkpoint", "weights=checkpoint"),
    ],
)
def test_weights_that_no_plain_program_makes_are_refused(keys: str, given: str):
    pytest.importorskip("bitsandbytes")
    held = {"load_in_4bit": True, "quant_method": "bitsandbytes"} if keys == "weights=checkpoint" else None
    config = {**TINY_LLAMA, **({"quantization_config": held} if held else {})}
    request = parse_query(
        f"arch=config:{encode_config(json.dumps(config))}&seq=8&mode=inference&dtype=bfloat16&batch=1&gpu=h100-80gb&{keys}"
    )
    with pytest.raises(BuildError, match=f"weights that are quantized so: given {given}, allowed nf4, nf4-dq, fp4, int8"):
        write_script(request, Cells(request).tracer(request))


VALUES = {
    "pixels": torch.rand(2, 3, 8, 8),
    "half": torch.rand(2, 64, dtype=torch.bfloat16),
    "few": torch.tensor([[0.5, 2.0]]),
    "mask": torch.ones(4, 32, dtype=torch.int64),
    "bytes": torch.zeros(4, 32, dtype=torch.uint8),
    "flags": torch.rand(4, 32) < 0.5,
    "words": torch.randint(100, 900, (2, 100)),
    "hidden": torch.where(torch.arange(70) % 7 == 0, torch.randint(100, 900, (2, 70)), -100),
    "image": torch.cat(
        [torch.randint(100, 900, (2, 20)), torch.full((2, 40), 77), torch.randint(100, 900, (2, 20))], dim=1
    ),
}


@pytest.mark.parametrize("tensor", VALUES.values(), ids=VALUES)
def test_values_have_the_shape_the_dtype_and_the_meaning_of_the_example(tensor: torch.Tensor):
    made = eval(value_code(tensor), {"torch": torch})
    assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
    if not tensor.is_floating_point() and tensor.dtype != torch.bool:
        assert tensor.min() <= made.min()
        assert made.max() <= tensor.max()
        for token in (77, -100):
            assert torch.equal(made == token, tensor == token)


def test_nested_values_and_the_dtype_of_the_work():
    value = {"images": [torch.rand(3, 8, 8)] * 2, "size": (8, None), "name": "x"}
    assert (
        value_code(value) == "{'images': [torch.rand((3, 8, 8)) for _ in range(2)], 'size': (8, None, ), 'name': 'x'}"
    )
    assert value_code([torch.rand(3, 8, 8)], cast=True) == "[torch.rand((3, 8, 8)).to(dtype)]"


def test_values_without_meaning_are_refused():
    with pytest.raises(BuildError, match=r"no script can be written for these inputs"):
        value_code(object())
    with pytest.raises(BuildError, match=r"labels hidden here and there"):
        value_code(torch.where(torch.rand(4, 90) < 0.5, 3, -100))


def test_it_imports_the_package_of_its_optimizer():
    pytest.importorskip("bitsandbytes")
    *_, found = peak(parse_query(f"{RUN['language model']}&optimizer=lion&gpu=rtx-4090"))
    imported = [node.names[0].name for node in ast.walk(ast.parse(found.script)) if isinstance(node, ast.Import)]
    assert "bitsandbytes.optim" in imported
    assert "bitsandbytes.optim.Lion32bit(parameters)" in found.script


# Four key heads, so that 2 ranks have two each
SMALL_LLAMA = encode_config(json.dumps(LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 2, "hidden_size": 64}))
OF_LLAMA = f"arch=config:{SMALL_LLAMA}&seq=128&dtype=float32&batch=2"
RANKS = {
    "DDP": "arch=torchvision:resnet18&image=32&dtype=float32&batch=2&parallel=ddp&ranks=2&accumulate=2",
    "ZeRO-1": f"arch=config:{SMALL_GPT2}&seq=8&dtype=amp-float16&batch=1&parallel=zero1&ranks=4&optimizer=muon",
    "FSDP2": "arch=torchvision:resnet18&image=32&dtype=float32&batch=2&parallel=fsdp&ranks=2",
    "HSDP": f"arch=config:{SMALL_GPT2}&seq=8&dtype=amp-bfloat16&batch=1&parallel=hsdp&ranks=8&replicate=4&reshard=0",
    "tensor": f"{OF_LLAMA}&parallel=fsdp&ranks=4&tp=2&lp=1",
    "pipeline": f"{OF_LLAMA}&pp=2",
    "stages": f"{OF_LLAMA.replace('float32', 'amp-bfloat16')}&parallel=ddp&ranks=2&pp=2&schedule=interleaved",
    "sharded stages": f"{OF_LLAMA.replace('float32', 'amp-bfloat16')}&parallel=fsdp&ranks=8&pp=2&schedule=gpipe",
    "sequence": f"{OF_LLAMA}&parallel=tp&tp=2&sp=1&lp=1&accumulate=2",
}


@pytest.fixture(scope="module")
def of_ranks() -> dict[str, str]:
    with one_thread():
        return {name: script(parse_query(f"{query}&gpu=h100-80gb")) for name, query in RANKS.items()}


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "DDP",
            (
                "    torchrun --nproc-per-node 2 this_file.py",
                "    model = DistributedDataParallel(build_model().to(dtype).to(device).train())",
                "            model.require_backward_grad_sync = number == 1  # as no_sync() does",
            ),
        ),
        ("ZeRO-1", ("ZeroRedundancyOptimizer(matrices, torch.optim.Muon", "scaler = torch.amp.GradScaler(")),
        (
            "FSDP2",
            ("    for name in ['layer1.0', 'layer1.1',", 'options = {"mesh": mesh, "reshard_after_forward": True}'),
        ),
        (
            "HSDP",
            (
                "    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 this_file.py",
                "(4, 8), mesh_dim_names=('replicate', 'shard'))",
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
                '"reshard_after_forward": False',
            ),
        ),
        (
            "tensor",
            (
                "(4, 2), mesh_dim_names=('shard', 'tp'))",
                "        'model.layers.*.self_attn.o_proj': RowwiseParallel(output_layouts=Replicate()),",
                '    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)',
                """    options = {"mesh": mesh['shard'], "reshard_after_forward": True}""",
            ),
        ),
        (
            "pipeline",
            (
                "LAYERS = [range(0, 1), range(1, 2)]  # of each stage",
                "FIRST, LAST = ('model.embed_tokens',), ('model.norm', 'lm_head')",
                "    schedule = Schedule1F1B(stages[0], n_microbatches=2, loss_fn=loss_of)",
            ),
        ),
        (
            "stages",
            (
                "LAYERS = [range(0, 0), range(0, 1), range(1, 2), range(2, 2)]  # of each stage",
                "        with torch.autocast(device.partition(':')[0], dtype=torch.bfloat16):",
                "ScheduleInterleaved1F1B(stages, n_microbatches=2",
                'DistributedDataParallel(stage, process_group=mesh["replicate"].get_group())',
            ),
        ),
        (
            "sharded stages",
            (
                "    torchrun --nnodes 2 --nproc-per-node 8",
                """        options = {"mesh": mesh["shard"], "reshard_after_forward": True}""",
                "            if not isinstance(block := stage.model.get_submodule(name), PipelineIdentityLayer):",
                "ScheduleGPipe(stages[0], n_microbatches=2",
            ),
        ),
        (
            "sequence",
            (
                "        'model.layers.*.mlp': PrepareModuleInput(input_layouts=Shard(dim=1), desired_input_layouts=Replicate()),",
                "'position_ids': torch.arange(128)[None]",
                "            with loss_parallel():",
                "                loss.backward()",
            ),
        ),
    ],
)
def test_of_ranks_it_is_for_torchrun(of_ranks: dict[str, str], name: str, lines: tuple[str, ...]):
    compile(of_ranks[name], name, "exec")
    assert all(line in of_ranks[name] for line in lines), of_ranks[name]
    imported = {node.module for node in ast.walk(ast.parse(of_ranks[name])) if isinstance(node, ast.ImportFrom)}
    assert not any(module.startswith("sizer") for module in imported)


def test_it_prints_the_estimate_beside(of_ranks: dict[str, str]):
    request = parse_query(f"{RANKS['FSDP2']}&gpu=h100-80gb")
    found = Cells(request).estimate(request)
    sizes = f"allocated {found.peak_allocated_bytes:,} bytes, reserved {found.peak_reserved_bytes:,} bytes"
    assert f"Sizer's estimate for {find_gpu('h100-80gb').name}, the rank that needs most: {sizes}" in of_ranks["FSDP2"]


PHI3 = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (PHI3, "parallel=tp&tp=2&optimizer_impl=loop", "by styles that are transformers' own: given Phi3ForCausalLM"),
        (
            LLAMA,
            "parallel=fsdp&ranks=2&cp=2",
            "PyTorch's context parallel has no rule for its attention kernel: given cp=2",
        ),
        (LLAMA, "pp=2&batch=2&tp=2&optimizer_impl=loop", "a pipeline with tensor parallel: given pp=2&tp=2"),
    ],
)
def test_some_of_ranks_have_none(config: dict, keys: str, message: str):
    batch = "" if "batch" in keys else "&batch=1"
    query = f"arch=config:{encode_config(json.dumps(config))}&seq=8&dtype=bfloat16{batch}"
    with pytest.raises(BuildError, match=message):
        script(parse_query(f"{query}&{keys}"))


def test_pytorchs_context_parallel_has_no_rule_for_the_cpus_attention():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh, heads = dist.init_device_mesh("cpu", (2,)), torch.zeros(1, 2, 64, 16)
        kernel = r"_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy"
        shared = context_parallel(mesh, buffers=[torch.zeros(1, 128)], buffer_seq_dims=[1])
        with shared, pytest.raises(NotImplementedError, match=kernel):
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["FSDP2", "sequence", "pipeline"])
def test_torchrun_runs_it_and_each_rank_holds_what_was_estimated(of_ranks: dict[str, str], tmp_path: Path, name: str):
    path = tmp_path / "ranks.py"
    path.write_text(of_ranks[name], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    printed = re.findall(r"^rank (\d): allocated at the peak: ([\d,]+) bytes", ended.stdout, re.MULTILINE)
    assert [rank for rank, _ in printed] == ["0", "1"]
    for rank, size in printed:
        _, peaks = tape_bytes(traced(RANKS[name], int(rank)))
        measured, most = int(size.replace(",", "")), max(peaks.values())
        # what gloo's own thread frees is not seen: some of what it gathered may be counted again and again
        assert most * (1 - HAIR) <= measured <= 2 * most
    assert "Sizer's estimate for" in ended.stdout
