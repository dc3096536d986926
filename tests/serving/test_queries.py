"""Questions with mode=serve: what is refused, and the whole way to a report."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

import sizer
from sizer.__main__ import main
from sizer.base.errors import RequestError
from sizer.catalogue.modes import SERVER_FIELDS
from sizer.query.text import format_query, parse_query
from sizer.report.report import Report
from sizer.serving.launch import read_launch
from sizer.serving.startup import read_startup
from sizer.serving.words import graphs_line, headline, sum_line
from tests.serving.test_startup import LOG

QWEN = "arch=hf:qwen3-8b&mode=serve&gpu=a100-40gb"
SMALL = "arch=hf:smollm2-135m&mode=serve&gpu=t4"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("batch=8", r"batch: given '8' without mode=training or mode=inference or mode=generate"),
        ("seq=8", r"seq: given '8' without mode=training"),
        ("parallel=ddp", r"parallel: given 'ddp' without mode=training"),
        ("dtype=float32", r"dtype: given 'float32' without mode=training"),
        ("util=0", r"util: given '0', allowed numbers above 0 and up to 1"),
        ("util=1.5", r"util: given '1.5', allowed numbers above 0 and up to 1"),
        ("engine_version=0.8.5", r"engine_version: given '0.8.5', older than the supported versions of vLLM, allowed 0.9.0 to"),
        ("engine_version=9", r"engine_version: given '9', allowed a version such as 0.11.2"),
        ("weights=int8", r"weights: given 'int8' with engine=vllm, .*; ask for weights=w8a8, a server's INT8"),
        ("weights=nf4", r"weights: given 'nf4' with engine=vllm"),
        ("used=37GiB", r"used: given 37.00 GiB with gpu=a100-40gb, allowed less than the server's share of the device's 39.38"),
        ("engine=llama.cpp&kv=fp8", r"kv: given 'fp8' with engine=llama.cpp, allowed auto, f32, q8_0"),
        ("engine=sglang&kv_bytes=1GiB", r"kv_bytes: given '1GiB' without engine=vllm"),
        ("engine=llama.cpp&prefix_caching=1", r"prefix_caching: given '1' without engine=vllm or sglang"),
        ("prefix_caching=yes", r"prefix_caching: given 'yes', allowed auto, 0, 1"),
        ("kv=int4", r"kv: given 'int4', allowed auto, fp8"),
        ("engine=transformers", r"engine: given 'transformers', .*; ask for mode=generate"),
        ("want=8", r"want: given '8', allowed requests x tokens"),
        ("max_model_len=0", r"max_model_len: given '0', allowed tokens from 1"),
    ],
)
def test_bad_input_is_refused_by_name(more: str, message: str):
    used = "&util=0.9" if "used" in more else ""
    with pytest.raises(RequestError, match=message):
        parse_query(f"{QWEN}&{more}{used}")


def test_a_config_without_a_length_has_vllms_own():
    assert sizer.estimate("arch=hf:bloom-560m&mode=serve&gpu=l4").serve.flags["max_model_len"] == 2048
    assert sizer.estimate("arch=hf:bloom-560m&mode=serve&gpu=l4&engine=sglang").serve.flags["max_model_len"] == 2048
    with pytest.raises(RequestError, match=r"max_model_len: given '?0'?, allowed tokens: the config names no length"):
        sizer.estimate("arch=hf:bloom-560m&mode=serve&gpu=l4&engine=llama.cpp")


@pytest.mark.parametrize("preset", ["segformer-b0-ade", "vit-base-patch16-224", "bert-base-uncased", "t5-small"])
def test_models_without_a_decoder_are_refused(preset: str):
    with pytest.raises(RequestError, match=r"mode: given 'serve' with a model of type [a-z0-9]+, allowed serve with a decoder"):
        sizer.estimate(f"arch=hf:{preset}&mode=serve&gpu=l4")


def test_deepseek_v4_is_planned_for_vllm_alone():
    question = "arch=hf:deepseek-v4-flash&mode=serve&gpu=b200"
    asked = f"{question}&tp=8&ep=1&engine_version=0.25.0&util=0.95&max_num_batched_tokens=8192&max_num_seqs=256"
    served = sizer.estimate(asked).serve
    # a published log: 19.82 GiB on each of eight ranks (wtdcode/vllm-backport/issues/41)
    assert served.weights_bytes / 2**30 == pytest.approx(19.82, rel=0.006)
    assert "--enable-expert-parallel --kv-cache-dtype fp8 --block-size 256" in served.command
    refusals = (
        ("engine=sglang", r"engine: given sglang with a model of type deepseek_v4, allowed vllm"),
        ("engine=llama.cpp", r"engine: given llama.cpp with a model of type deepseek_v4, allowed vllm"),
        ("tp=8&dcp=8", r"allowed 1 for a model with sliding windows or chunks"),
        ("engine_version=0.19.0", r"engine_version: given 0.19.0, allowed 0.20.0 and later"),
    )
    for keys, words in refusals:
        with pytest.raises(RequestError, match=words):
            sizer.estimate(f"{question}&{keys}")


def test_ministral_3_is_served_in_the_8_bits_of_its_checkpoint():
    # huggingface/transformers/pull/42715: FP8 except the vision tower, the projector and the head; the embedding has 16 bits
    served = sizer.estimate("arch=hf:ministral-3-3b-instruct-2512&mode=serve&gpu=l4&max_model_len=8k").serve
    assert served.flags["quantization"] == "fp8"
    assert 4.3 < served.weights_bytes / 2**30 < 4.5


def test_a_stage_without_a_cache_does_not_bound_the_others():
    served = sizer.estimate("arch=hf:gemma-4-e2b-it&mode=serve&gpu=l4&pp=2&max_model_len=4k").serve
    assert served.kv_tokens > 0 and served.starts is not False


def test_servers_keys_need_the_mode():
    for more in ("util=0.9", "want=1x1k", "engine=sglang", "weights=awq", "max_model_len=auto"):
        with pytest.raises(RequestError, match=r"without mode=serve"):
            parse_query(f"arch=hf:qwen3-8b&{more}")


def test_a_device_without_cuda_has_one_engine():
    with pytest.raises(RequestError, match=r"gpu: given 'm2-ultra-64gb' with engine=vllm"):
        parse_query("arch=hf:qwen3-8b&mode=serve&gpu=m2-ultra-64gb")
    assert parse_query("arch=hf:qwen3-8b&mode=serve&gpu=m2-ultra-64gb&engine=llama.cpp").engine == "llama.cpp"


def test_values_are_read_as_people_write_them():
    asked = parse_query(f"{QWEN}&engine_version=v0.11.2.post1&max_model_len=8k&want=8×32K&used=2 GiB&kv_bytes=1.5GiB&tp=2")
    assert (asked.engine_version, asked.max_model_len, asked.want, asked.used) == ("0.11.2", 8192, (8, 32_768), 2**31)
    assert (asked.parallel, asked.tp, asked.kv_bytes) == ("none", 2, 3 * 2**29)
    assert format_query(asked).endswith("&tp=2&engine_version=0.11.2&max_model_len=8192&kv_bytes=1536MiB&used=2GiB&want=8x32768")


def test_the_example_of_a_server(capsys):
    report = sizer.estimate(f"{QWEN}&engine_version=0.9.2&max_model_len=40960")
    served = report.serve
    # the log: 136,080 tokens, 18.69 GiB
    assert headline(served).startswith("Starts. 3.3 requests of 40,960 tokens at once; 136,368 KV tokens (worst case")
    assert sum_line(served, served.flags["vocabulary"]) == (
        "35.44 GiB budget = 15.27 weights + 1.40 profile (sampler: 256 × 151,936 logits) + 0.05 outside PyTorch "
        "+ 18.73 KV cache"
    )
    assert graphs_line(served) == "CUDA graphs: 0.9 GiB, captured after the cache, outside the budget in this version"
    assert (report.estimates, report.max_batch, report.failures) == ((), (), {})
    assert served.blocks * 16 == served.kv_tokens
    data = json.loads(report.to_json())
    assert Report.from_dict(data) == report
    assert data["serve"]["starts"] is True
    assert data["serve"]["command"].startswith("vllm serve Qwen/Qwen3-8B --max-model-len 40960 ")
    assert data["request"]["engine_version"] == "0.9.2"


def test_ranks_of_decode_context_parallel_share_the_tokens_of_a_request():
    base = "arch=hf:deepseek-v3&mode=serve&gpu=h200&tp=8&weights=fp8&max_model_len=8k&engine_version=0.11.2"
    alone, shared = (sizer.estimate(f"{base}&dcp={degree}").serve for degree in (1, 8))
    assert (shared.blocks, shared.kv_cache_bytes) == (alone.blocks, alone.kv_cache_bytes)
    assert shared.kv_tokens == 8 * alone.kv_tokens
    assert shared.requests_at_once == pytest.approx(8 * alone.requests_at_once, rel=1e-3)
    assert shared.command.endswith("--tensor-parallel-size 8 --decode-context-parallel-size 8")
    assert read_launch("vllm serve deepseek-ai/DeepSeek-V3 -tp 8 -dcp 8").items["dcp"] == "8"
    log = "INFO non-default args: {'model': 'a/b', 'decode_context_parallel_size': 8}\nGPU KV cache size: 1 tokens vllm"
    assert read_startup(log).query() == "mode=serve&dcp=8"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("arch=hf:qwen3-8b&tp=8&dcp=2", "dcp: given 2 with tp=8, allowed a divisor of tp, at most tp divided by the model's 8 key"),
        ("arch=hf:deepseek-v3&tp=8&dcp=3", "dcp: given 3 with tp=8, allowed a divisor of tp, at most tp; ask for dcp=8"),
        ("arch=hf:gemma-3-4b&tp=8&dcp=2", "dcp: given 2 with tp=8, allowed 1 for a model with sliding windows"),
        ("arch=hf:qwen3-8b&tp=16&dcp=2&engine_version=0.11.0", "allowed 1 before 0.11.1, the first release that has it for this"),
        ("arch=hf:qwen3-8b&engine=sglang&dcp=2", "dcp: given '2' without engine=vllm"),
    ],
)
def test_decode_context_parallel_is_refused_where_vllm_does(query: str, said: str):
    with pytest.raises(RequestError, match=re.escape(said)):
        sizer.estimate(f"{query}&mode=serve&gpu=h200")


def test_weights_on_the_host_leave_room_for_the_cache():
    plain, offloading = (sizer.estimate(f"{SMALL}{more}").serve for more in ("", "&cpu_offload_gb=0.1"))
    assert plain.weights_bytes - offloading.weights_bytes == offloading.offloaded_bytes >= 0.1 * 2**30
    assert offloading.kv_cache_bytes - plain.kv_cache_bytes == offloading.offloaded_bytes
    assert " more on the host) + " in sum_line(offloading) and offloading.command.endswith(" --cpu-offload-gb 0.1")
    log = read_startup("INFO non-default args: {'model': 'a/b', 'cpu_offload_gb': 12.0}\nGPU KV cache size: 1 tokens vllm")
    assert log.query() == "mode=serve&cpu_offload_gb=12"
    assert read_launch("vllm serve Qwen/Qwen3-8B --cpu-offload-gb 4").items["cpu_offload_gb"] == "4"
    with pytest.raises(RequestError, match=r"cpu_offload_gb: given '-1', allowed GiB from 0 to 4,096"):
        parse_query(f"{SMALL}&cpu_offload_gb=-1")


def test_other_modes_do_not_echo_a_servers_flags():
    report = sizer.estimate("arch=hf:smollm2-135m&mode=inference&dtype=bfloat16&batch=1&seq=8")
    assert not set(SERVER_FIELDS) & set(report.request)
    assert report.serve is None


def test_ranks_must_divide_the_heads_and_lengths_the_config():
    with pytest.raises(RequestError, match=r"tp: given 2, allowed a divisor of the model's 9 attention heads; ask for tp=1"):
        sizer.estimate(f"{SMALL}&tp=2")
    with pytest.raises(RequestError, match=r"max_model_len: given 16,384, allowed at most the config's 8,192"):
        sizer.estimate(f"{SMALL}&max_model_len=16k")
    with pytest.raises(RequestError, match=r"mode: given 'serve' with a model of type bert"):
        sizer.estimate("arch=hf:bert-base-uncased&mode=serve")


def test_sglang_and_llama_cpp_answer_too():
    sglang = sizer.estimate(f"{SMALL}&engine=sglang").serve
    assert sglang.command.startswith("python -m sglang.launch_server --model-path HuggingFaceTB/SmolLM2-135M ")
    assert sglang.kv_tokens > 0
    llama = sizer.estimate(f"{SMALL}&engine=llama.cpp&max_num_seqs=2&max_model_len=4k").serve
    # 30 layers of 3 key heads of 64: 2 * 192 * 2 bytes a token; 8,192 cells
    assert llama.kv_cache_bytes == 30 * 768 * 8192
    assert llama.requests_at_once == 2.0


def test_a_server_that_does_not_start_fails_the_report():
    report = sizer.estimate(f"{SMALL}&util=0.01")
    assert report.serve.starts is False
    assert not report.all_fit
    assert report.serve.message
    wanting = sizer.estimate(f"{SMALL}&want=60000x1k")
    assert (wanting.serve.starts, wanting.all_fit) == (True, False)


def test_other_commands_refuse_a_server():
    from sizer.decision.limits import limits

    with pytest.raises(RequestError, match=r"mode: given 'serve', allowed the commands `estimate`"):
        list(limits(parse_query(SMALL)))


@pytest.fixture
def startup(capsys, tmp_path):
    """Run the command `startup` on a text, in this process; return its lines."""

    def run(text: str, *arguments: str) -> list[str]:
        (tmp_path / "log").write_text(text)
        job = lambda query: SimpleNamespace(result=lambda timeout: sizer.estimate(query))  # noqa: E731
        client = SimpleNamespace(submit=job, close=lambda: None)
        status = main(["startup", *arguments, "--log", str(tmp_path / "log")], make_client=lambda: client)
        captured = capsys.readouterr()
        assert status == (2 if captured.err else 0)
        return (captured.err or captured.out).splitlines()

    return run


def test_a_log_needs_no_query_if_it_names_model_and_device(startup):
    said = startup(f"{LOG}device_name=NVIDIA_A100-SXM4-40GB.json\n")
    assert said[0] == "The log: vllm"
    assert any(line.startswith("The question: arch=hf:qwen3-8b&gpu=a100-40gb&mode=serve&engine_version=0.9.2") for line in said)
    assert not any("write " in line for line in said)


def test_a_log_says_what_is_missing(startup):
    assert "  device: not in the log, what depends on it is not compared; write gpu=" in startup(LOG)
    unknown = LOG.replace("Qwen/Qwen3-8B", "/models")
    (line,) = startup(unknown)
    assert line.startswith("sizer: the log's model is not known: given the log names the folder '/models'; write arch=")
    assert any("gpu=l4&mode=serve" in line for line in startup(unknown, "qwen3-8b&gpu=l4"))


def test_a_log_without_its_device_gets_no_plan_of_another(startup):
    said = startup(LOG)
    assert not any(line.startswith(("The plan", "With this machine", "  other than")) for line in said)
    assert any("own constants" in line for line in startup(LOG, "gpu=a100-40gb"))


def test_a_log_in_the_place_of_the_query_is_refused(capsys, tmp_path):
    (tmp_path / "server.log").write_text(LOG)
    assert main(["startup", str(tmp_path / "server.log")], make_client=lambda: None) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sizer: the query is a file: given ") and "write --log " in line


def test_a_command_is_planned(startup):
    said = startup("vllm serve Qwen/Qwen3-8B --max-model-len 8K --enable-lora --lora-extra-vocab-size 512", "gpu=l4")
    assert said[:5] == [
        "The command: vLLM",
        "  model Qwen/Qwen3-8B → arch=hf:qwen3-8b",
        "  --max-model-len 8K → max_model_len=8192",
        "  --enable-lora → max_loras=1",
        "  not counted: --lora-extra-vocab-size 512: the slots of adapters reduce the cache: fewer tokens than planned",
    ]
    assert "The question: arch=hf:qwen3-8b&mode=serve&max_model_len=8192&max_loras=1&gpu=l4" in said
    assert json.loads("\n".join(startup("vllm serve Qwen/Qwen3-8B", "--json")[:1]))["engine"] == "vllm"
    for command, message in (
        ("vllm serve /models", "the command's model is not known: given the folder '/models'"),
        ("vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 1.5", "util: given '1.5'"),
        ("vllm serve Qwen/Qwen3-8B --tensor-parallel-size 3", "tp: given "),
    ):
        (line,) = startup(command, "gpu=l4")
        assert message in line
