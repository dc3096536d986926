"""A process that has answered other questions before gives the same answers."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from sizer.architecture import peft_adapters
from sizer.base.config_json import encode_config
from sizer.estimating.estimator import estimate
from sizer.processes.environment import own_environment
from sizer.query.text import parse_query
from sizer.service.settings import MERGE, PUBLIC_VARIABLE, WARM, preloaded

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
TINY_LLAMA = encode_config(json.dumps({"model_type": "llama", **SIZES}))
ANSWER = """
import json, sys
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.service.preload import preload
preload(("torch", *sys.argv[2:]))
report = estimate(parse_query(sys.argv[1])).to_dict()
print(json.dumps(report, sort_keys=True))
"""


def answer(query: str, *preloaded_before: str) -> dict:
    command = [sys.executable, "-c", ANSWER, query, *preloaded_before]
    done = subprocess.run(command, env=own_environment(), check=True, capture_output=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "query",
    [
        "arch=torchvision:shufflenet_v2_x0_5&dtype=float32,amp-float16&batch=1,2&image=64",
        pytest.param("arch=hf:gpt2&dtype=bfloat16&batch=1,2&seq=32&train=adapter", marks=pytest.mark.exhaustive),
    ],
)
def test_answers_are_the_same_after_others(query: str) -> None:
    assert answer(query, WARM) == answer(query)


def test_adapters_find_the_table_of_conversions_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping

    def build() -> None:
        raise AssertionError("this takes a tenth of a second for each question")

    peft_adapters.prepare()
    monkeypatch.setattr(conversion_mapping, "_build_checkpoint_conversion_mapping", build)
    estimate(parse_query(f"arch=config:{TINY_LLAMA}&dtype=bfloat16&batch=1&seq=8&train=adapter"))


MERGED = """
import os
from pathlib import Path
from sizer.service.preload import merge_pages

def huge_bytes():
    (line,) = (line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("AnonHugePages"))
    return 1024 * int(line.split()[1])

data = os.urandom(2**25)
copy, before = bytearray(data), huge_bytes()
merge_pages()
source, sink = os.pipe()
if os.fork() == 0:
    copy[7] ^= 255
    os.write(sink, bytes([copy[7] == data[7] ^ 255]))
    os._exit(0)
print(os.read(source, 1) == bytes([1]), copy == data, huge_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages as Linux has them")
def test_merged_pages_hold_what_they_held_and_a_fork_has_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", MERGED], check=True, capture_output=True, text=True, timeout=60)
    written, equal, gained = done.stdout.split()
    assert (written, equal) == ("True", "True")
    if tuple(map(int, platform.release().split(".")[:2])) >= (6, 1):
        assert int(gained) >= 2**25


def test_a_server_for_strangers_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PUBLIC_VARIABLE, raising=False)
    assert not {WARM, MERGE} & {*preloaded()}
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    assert preloaded()[-2:] == (WARM, MERGE)
