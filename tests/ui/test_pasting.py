"""The box for what people have: configs become the question of the page, messages a diagnosis, snapshots a curve."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from sizer.base.errors import ConfigError
from sizer.pasted.formats import read_config
from sizer.pasted.reading import read_question
from sizer.pasted.snapshot import read_snapshot
from sizer.query.text import parse_query
from sizer.serving.startup import compare, read_startup, refitted
from sizer.ui import pasting
from tests.pasted.test_out_of_memory import NEW
from tests.pasted.test_snapshot import block, event
from tests.serving.test_startup import ERRORS, LOG, OTHER_SERVERS, SGLANG
from tests.ui.clients import ScriptedClient, ScriptedJob
from tests.ui.conftest import install, markup, texts
from tests.ui.reports import report_for
from tests.ui.test_page import address_of
from tests.ui.test_serving import server_report

QLORA = """
base_model: meta-llama/Llama-3.1-8B
adapter: qlora
lora_r: 32
sequence_len: 4096
micro_batch_size: 2
optimizer: paged_adamw_8bit
bf16: auto
sample_packing: true
learning_rate: 1e-4
"""
SNAPSHOT = {
    "device_traces": [[event("alloc", 2**30), event("alloc", 2**29)]],
    "segments": [{"device": 0, "total_size": 2**31, "blocks": [block(2**30), block(2**29)]}],
}


def test_a_config_becomes_the_question_on_the_device_of_the_page(client, open_page):
    page = open_page(arch="torchvision:resnet18", gpu="rtx-4090", batch="2", dtype="float32")
    page.text_area(key=pasting.TEXT).set_value(QLORA).run()
    asked = client.requests[-1]
    assert (asked.source, asked.name, asked.gpu) == ("hf", "llama-3.1-8b", "rtx-4090")
    assert (asked.train, asked.adapter_rank, asked.weights, asked.optimizer) == ("adapter", 32, "nf4-dq", "paged-adamw-8bit")
    assert (asked.sequence_length, asked.batches, asked.dtypes) == (4096, (2,), ("bfloat16",))
    assert "**Read as a config of Axolotl**" in markup(page)
    shown = texts(page)
    assert "sequence_len: 4096 → seq=4096" in shown
    assert any(text.startswith("sample_packing: ") for text in shown)
    page.button(key="pasted_close").click().run()
    assert "**Read as a config of Axolotl**" not in markup(page)
    assert client.requests[-1] == asked, "the question stays"


def test_a_config_without_a_model_keeps_that_of_the_page(client, open_page):
    page = open_page(arch="hf:gpt2", batch="1", dtype="float32", seq="128")
    page.text_area(key=pasting.TEXT).set_value('{"per_device_train_batch_size": 4, "bf16": true}').run()
    asked = client.requests[-1]
    assert (asked.name, asked.batches, asked.dtypes, asked.sequence_length) == ("gpt2", (4,), ("amp-bfloat16",), 128)


def test_a_message_becomes_a_diagnosis_beside_the_estimate(client, open_page):
    page = open_page(arch="torchvision:resnet18", batch="2", dtype="float32")
    page.text_area(key=pasting.TEXT).set_value(NEW).run()
    shown = texts(page)
    assert any(line.startswith("The failed request was for 2.00 GiB") for line in shown)
    assert any(line.startswith("float32 at batch 2 allocates ") for line in shown)
    assert len(client.requests) >= 1 and client.requests[-1].name == "resnet18"


def test_what_is_not_understood_is_refused(client, open_page):
    page = open_page(arch="torchvision:resnet18", batch="2", dtype="float32")
    page.text_area(key=pasting.TEXT).set_value("[not, a, **config**]").run()
    assert "No question was found in this text." in [error.value for error in page.error]
    page.text_area(key=pasting.TEXT).set_value("").run()
    assert not page.error


def test_a_snapshot_is_read_by_a_job_and_compared(client, open_page, monkeypatch):
    given = []

    def submit(data: bytes) -> ScriptedJob:
        given.append(data)
        return ScriptedJob(lambda: read_snapshot(SNAPSHOT))

    monkeypatch.setattr(client, "submit_pasted_snapshot", submit, raising=False)
    page = open_page(arch="torchvision:resnet18", batch="2", dtype="float32")
    page.session_state[pasting.SNAPSHOT] = pickle.dumps(SNAPSHOT)
    page.run()
    assert given == [pickle.dumps(SNAPSHOT)]
    assert "**Memory snapshot**, device 0, 2 events" in markup(page)
    assert "1.00 GiB  train.py:7 step" in texts(page)
    page.run()
    assert len(given) == 1, "it is read once"


def test_a_snapshot_that_is_refused_says_why(client, open_page, monkeypatch):
    def refuse() -> None:
        raise ConfigError("this pickle has more than plain values", given="opcode GLOBAL at byte 2")

    monkeypatch.setattr(client, "submit_pasted_snapshot", lambda data: ScriptedJob(refuse), raising=False)
    page = open_page(arch="torchvision:resnet18", batch="2", dtype="float32")
    page.session_state[pasting.SNAPSHOT] = b"x"
    page.run()
    assert "Given: opcode GLOBAL at byte 2" in texts(page)


def test_no_difference_is_minus_zero():
    snapshot = read_snapshot(SNAPSHOT)
    row = report_for(parse_query("arch=torchvision:resnet18&dtype=float32&batch=2")).estimates[0]
    row = replace(row, peak_allocated_bytes=snapshot.peak_allocated_bytes - 1)
    assert pasting.snapshot_frame(snapshot, row)["Estimate against snapshot"][0] == "+0.0%"


def test_the_peaks_stand_beside_those_of_the_estimate():
    report = report_for(parse_query("arch=torchvision:resnet18&dtype=float32&batch=2"))
    frame = pasting.snapshot_frame(read_snapshot(SNAPSHOT), report.estimates[0])
    assert list(frame["Snapshot"]) == ["1.50 GiB", "2.00 GiB"]
    assert frame.shape == (2, 4)
    chart = pasting.snapshot_chart(read_snapshot(SNAPSHOT), report.estimates[0])
    assert len(chart["layer"]) == 2


def test_an_address_begins_with_its_model():
    found = pasting.address_of(read_config(QLORA), {"gpu": "t4", "batch": "9"})
    assert next(iter(found)) == "arch"
    assert (found["gpu"], found["batch"]) == ("t4", "2")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("train resnet50 on a t4", ("float32,amp-float16", "1,8,32,128")),
        ("resnet50", ("float32,amp-bfloat16", "1,8,32,128")),
        ("mistral 7b lora batch 4 on a 4090", ("bfloat16", "4")),
        ("serve qwen3 8b on an l4", (None, None)),
    ],
)
def test_a_question_in_words_has_the_sizes_of_the_page(text, sizes):
    found = pasting.address_of(read_question(text, None), {})
    assert (found.get("dtype"), found.get("batch")) == sizes


def server_or_step(request):
    return server_report(request) if request.mode == "serve" else report_for(request)


def test_a_servers_log_becomes_the_question_with_its_differences(monkeypatch, open_page):
    client = install(monkeypatch, ScriptedClient(server_or_step))
    page = open_page(arch="torchvision:resnet18", gpu="a100-40gb", batch="2", dtype="float32")
    page.text_area(key=pasting.TEXT).set_value(LOG).run()
    asked = client.requests[-1]
    assert (asked.mode, asked.name, asked.gpu, asked.engine_version) == ("serve", "qwen3-8b", "a100-40gb", "0.9.2")
    assert (asked.max_model_len, asked.max_num_seqs, asked.max_num_batched_tokens, asked.util) == (40_960, 64, 2048, 0.85)
    assert page.text_input(key="serve_max_num_seqs").value == "64"
    assert "**Read as a startup log of vLLM 0.9.2**" in markup(page)
    shown = texts(page)
    for line in compare(read_startup(LOG), server_report(asked).serve):
        assert line in shown
    page.button(key="pasted_refit").click().run()
    constants = refitted(read_startup(LOG), server_report(asked).serve)
    assert constants and {key: page.query_params[key] for key in constants} == constants
    assert client.requests[-1].graphs == int(2.24 * 2**30)
    page.text_area(key=pasting.TEXT).set_value(SGLANG).run()
    asked = client.requests[-1]
    assert (asked.engine, asked.name, asked.util, asked.engine_version) == ("sglang", "qwen3-0.6b", 0.8, None)


def test_a_command_of_a_server_becomes_the_question(monkeypatch, open_page):
    client = install(monkeypatch, ScriptedClient(server_or_step))
    page = open_page(arch="torchvision:resnet18", gpu="l4", batch="2", dtype="float32")
    command = "vllm serve Qwen/Qwen3-8B \\\n  --max-model-len 8192 -tp 2 \\\n  --enable-lora -sc '{}' --port 8000"
    page.text_area(key=pasting.TEXT).set_value(command).run()
    asked = client.requests[-1]
    assert (asked.mode, asked.name, asked.gpu, asked.max_model_len, asked.tp) == ("serve", "qwen3-8b", "l4", 8192, 2)
    assert asked.max_loras == 1
    assert "**Read as a command of vLLM**" in markup(page)
    draft = "--speculative-config {}: a draft model reduces the cache: fewer tokens than planned"
    assert {"--max-model-len 8192 → max_model_len=8192", "--enable-lora → max_loras=1", draft} <= set(texts(page))
    page.text_area(key=pasting.TEXT).set_value("vllm serve /models --mem-fraction-static 0.8").run()
    assert any("--gpu-memory-utilization" in line for line in texts(page))
    assert client.requests[-1] == asked
    page.text_area(key=pasting.TEXT).set_value("vllm serve /models -tp 4").run()
    assert (client.requests[-1].name, client.requests[-1].tp) == ("qwen3-8b", 4)
    assert any("is not a repository: the model of the form is kept" in line for line in texts(page))


def test_a_models_config_becomes_the_question_on_the_device_at_hand(client, open_page):
    page = open_page(arch="torchvision:resnet18", gpu="l4", batch="2", dtype="float32")
    page.text_area(key=pasting.TEXT).set_value('{"model_type": "gpt2", "n_layer": 2}').run()
    asked = client.requests[-1]
    assert (asked.source, asked.gpu, asked.config) == ("config", "l4", '{"model_type":"gpt2","n_layer":2}')
    assert "**Read as a model's config.json**" in markup(page)


def test_a_log_that_names_its_device_is_planned_on_it(monkeypatch, open_page):
    client = install(monkeypatch, ScriptedClient(server_or_step))
    page = open_page(arch="hf:qwen3-8b", mode="serve", gpu="l4")
    page.text_area(key=pasting.TEXT).set_value(f"{LOG}device_name=NVIDIA_H200.json\n'enable_lora': True speculative_config=a").run()
    assert (client.requests[-1].gpu, client.requests[-1].max_loras) == ("h200", 1)
    assert "not counted: speculative decoding: a draft model and its cache" in texts(page)


def test_an_error_of_a_server_keeps_the_model_and_is_named(monkeypatch, open_page):
    client = install(monkeypatch, ScriptedClient(server_or_step))
    page = open_page(arch="hf:qwen3-8b", mode="serve", gpu="l4")
    page.text_area(key=pasting.TEXT).set_value(ERRORS["the server's share of the memory was not free"]).run()
    shown = texts(page)
    assert "The error: the server's share of the memory was not free." in shown
    assert "The log names no repository: the model of the form is kept." in shown
    assert any(line.startswith("free when the server starts: 21.07 GiB in the log, 21.64 are its share") for line in shown)
    assert (client.requests[-1].name, client.requests[-1].gpu, client.requests[-1].util) == ("qwen3-8b", "l4", 0.92)


def test_a_log_of_another_server_is_refused_by_name(client, open_page):
    page = open_page(arch="hf:gpt2", batch="1", dtype="float32", seq="128")
    before = address_of(page)
    page.text_area(key=pasting.TEXT).set_value(OTHER_SERVERS["Ollama"]).run()
    assert "this is a log of Ollama" in texts(page)
    assert address_of(page) == before


def test_a_log_of_a_version_without_rules_is_refused_in_its_key(monkeypatch, open_page):
    client = install(monkeypatch, ScriptedClient(server_or_step))
    page = open_page(arch="hf:qwen3-8b", mode="serve", gpu="l4")
    page.text_area(key=pasting.TEXT).set_value(LOG.replace("v0.9.2", "v0.8.5")).run()
    assert client.requests[-1].engine_version is None
    assert any("engine_version" in line and "older than the supported versions of vLLM" in line for line in texts(page))
