"""Real processes that train together over gloo, against the trace of each of their ranks by the CPU's rules."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace

import pytest

from sizer.allocator.timeline import running_bytes
from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.device.record.recording import Measured
from sizer.device.trial.trial import one_thread
from sizer.estimating.work import work_of
from sizer.processes.environment import own_environment
from sizer.processes.process import python_command
from sizer.query.text import parse_query
from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.tracing.cpu_truth import tape_bytes
from tests.tracing.models import GPT2, LLAMA, VIT

HAIR = 0.001  # of the peak, as in tests/tracing/test_cpu_truth.py
NUMBER = 8  # bytes of a Python number that autograd saved


def arch(config: dict, **others: object) -> str:
    return f"arch=config:{encode_config(json.dumps(config | others))}&dtype=float32&batch=2"


# Four key heads, so that 4 ranks have one each
NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
LLAMA_OF_TWO = f"{arch(LLAMA, **NARROW, num_hidden_layers=2)}&seq=32"
GPT2_OF_TWO = f"{arch(GPT2, n_layer=2, n_embd=64, n_head=4, vocab_size=999, bos_token_id=0, eos_token_id=0)}&seq=32"
# The class's place is one row, of which no rank but the first has a part
VIT_OF_TWO = f"{arch(VIT, num_hidden_layers=2, hidden_size=48, intermediate_size=96, num_attention_heads=4)}&image=64"
OF_TWO = {
    "ddp": "arch=torchvision:resnet18&image=32&dtype=float32&batch=2&parallel=ddp&ranks=2",
    "zero1": f"{GPT2_OF_TWO}&parallel=zero1&ranks=2",
    "fsdp": f"{VIT_OF_TWO}&parallel=fsdp&ranks=2",
    "sequence and loss parallel": f"{LLAMA_OF_TWO}&parallel=tp&tp=2&sp=1&lp=1",
    "pipeline": f"{LLAMA_OF_TWO}&parallel=pp&pp=2",
}
OF_FOUR = {
    "hsdp": f"{VIT_OF_TWO}&parallel=hsdp&ranks=2&replicate=2",
    "tensor parallel within fsdp": f"{LLAMA_OF_TWO}&parallel=fsdp&ranks=2&tp=2",
}


def measured(world: int, queries: Mapping[str, str]) -> dict[str, list[Measured]]:
    """What each rank measured of each query, in processes of their own."""
    command = python_command("tests.distributed.gloo", str(world), json.dumps(list(queries.values())))
    ended = subprocess.run(command, env=own_environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    ranks = [[Measured.from_dict(one) for one in rank] for rank in json.loads(ended.stdout.splitlines()[-1])]
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(queries)}


def traced(query: str, rank: int) -> Tape:
    request = replace(parse_query(query), rank=rank)
    (dtype,), (batch,), blueprint = request.dtypes, request.batches, make_blueprint(request)
    with one_thread():
        module = build(blueprint, checkpointing=request.checkpointing)
        return trace(blueprint, module, work_of(request, dtype), batch=batch, device=Device("cpu"))


def check(query: str, rank: int, one: Measured) -> None:
    """Bytes alive after each phase are the same on a rank, and the most of them nearly."""
    assert one.measurement.failure is None and one.measurement.out_of_memory is None, one.measurement
    tape = traced(query, rank)
    alive, peaks = tape_bytes(tape)
    numbers = {phase: number_bytes(one.recording, phase) - number_bytes(tape, phase) for phase in alive}
    found = {reading.phase: reading for reading in one.measurement.phases}
    assert alive == {phase: read.allocated_bytes - numbers[phase] for phase, read in found.items()}
    for phase, read in found.items():
        assert abs(peaks[phase] - read.peak_allocated_bytes) <= HAIR * read.peak_allocated_bytes, phase


def number_bytes(tape: Tape, phase: str) -> int:
    """Bytes of the numbers alive at the end of a phase: PyTorch wraps each in a tensor that no dispatch mode sees."""
    levels = running_bytes(tape.order, [size if size == NUMBER else 0 for size in tape.sizes])
    return levels[next(end for end, name in tape.marks if name == phase)]


@pytest.fixture(scope="module")
def of_two() -> dict[str, list[Measured]]:
    return measured(2, OF_TWO)


@pytest.fixture(scope="module")
def of_four() -> dict[str, list[Measured]]:
    return measured(4, OF_FOUR)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("way", OF_TWO)
def test_each_of_two_processes_holds_what_its_trace_says(of_two, way: str, rank: int) -> None:
    check(OF_TWO[way], rank, of_two[way][rank])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # as in tests/null_driver/test_ranks.py
@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("way", OF_FOUR)
def test_so_does_each_of_four(of_four, way: str, rank: int) -> None:
    check(OF_FOUR[way], rank, of_four[way][rank])


def test_ranks_need_not_hold_the_same(of_two) -> None:
    first, second = (one.measurement.tensors.optimizer_bytes for one in of_two["zero1"])
    assert first != second
    first, second = (one.measurement.tensors for one in of_two["fsdp"])
    assert first.weights_bytes == second.weights_bytes, "shards are made up to one size"
    assert first.optimizer_bytes > second.optimizer_bytes, "but the optimizer has no state for that"
