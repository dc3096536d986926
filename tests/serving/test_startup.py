"""Startup logs and errors as they are pasted."""

from __future__ import annotations

import pytest

from sizer.errors import RequestError
from sizer.request import parse_query
from sizer.serving.startup import compare, read_startup
from tests.serving.test_plan import answer

LOG = """\
\x1b[32mINFO\x1b[0m 07-12 [core.py:69] Initializing a V1 LLM engine (v0.9.2) with config: model='Qwen/Qwen3-8B', \
dtype=torch.bfloat16, max_seq_len=40960, tensor_parallel_size=1, pipeline_parallel_size=1, \
quantization=None, enforce_eager=False, kv_cache_dtype=auto,
INFO non-default args: {'model': 'Qwen/Qwen3-8B', 'max_num_seqs': 64, 'gpu_memory_utilization': 0.85}
INFO Chunked prefill is enabled with max_num_batched_tokens=2048.
WARNING FlashInfer is not available. Falling back to the PyTorch-native implementation of top-p & top-k sampling.
INFO [gpu_model_runner.py:1801] Model loading took 15.2683 GiB and 3.2 seconds
INFO [gpu_worker.py:232] Available KV cache memory: 18.69 GiB
INFO [kv_cache_utils.py:716] GPU KV cache size: 136,080 tokens
INFO [kv_cache_utils.py:720] Maximum concurrency for 40,960 tokens per request: 3.32x
INFO [gpu_model_runner.py:2326] Graph capturing finished in 21 secs, took 2.24 GiB
"""
SGLANG = """\
[2025-08-08 03:34:30] server_args=ServerArgs(model_path='Qwen/Qwen3-0.6B', mem_fraction_static=0.8, tp_size=1, \
chunked_prefill_size=2048)
[2025-08-08 03:34:37] Load weight begin. avail mem=15.16 GB
[2025-08-08 03:34:38] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=13.91 GB, mem usage=1.25 GB.
[2025-08-08 03:34:38] KV Cache is allocated. #tokens: 104273, K size: 5.57 GB, V size: 5.57 GB
[2025-08-08 03:34:57] max_total_num_tokens=104273, chunked_prefill_size=2048, context_len=40960, available_gpu_mem=1.70 GB
"""
ERRORS = {
    "no memory for the cache": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "one request of the longest length does not fit": "ValueError: To serve at least one request with the models's max seq len "
    "(40960), (5.62 GiB KV cache is needed, which is larger than the available KV cache memory (4.81 GiB). Based on the "
    "available memory, the estimated maximum model length is 35040. Try increasing `gpu_memory_utilization`",
    "the server's share of the memory was not free": "ValueError: Free memory on device (21.07/23.52 GiB) on startup is less than "
    "desired GPU memory utilization (0.92, 21.64 GiB).",
    "the sampler ran out of memory": "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.",
    "not enough memory for the pool": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
}


def test_a_log_of_vllm_is_read_with_its_flags():
    log = read_startup(LOG)
    assert (log.engine, log.failure) == ("vllm", "")
    assert [log.number(name) for name in ("weights_gib", "cache_gib", "kv_tokens", "graphs_gib")] == [15.2683, 18.69, 136_080, 2.24]
    assert log.figures["sampler"] == "FlashInfer is not available"
    assert log.query() == (
        "mode=serve&engine_version=0.9.2&max_model_len=40960&max_num_seqs=64&max_num_batched_tokens=2048&util=0.85"
    )
    asked = parse_query(f"arch=hf:qwen3-8b&gpu=a100-40gb&{log.query()}")
    assert (asked.max_num_seqs, asked.util, asked.tp) == (64, 0.85, 1)


def test_a_log_of_sglang_is_read_with_its_flags():
    log = read_startup(SGLANG)
    assert (log.engine, log.number("kv_tokens"), log.number("weights_gib")) == ("sglang", 104_273, 1.25)
    assert log.query() == "mode=serve&engine=sglang&max_model_len=40960&max_num_batched_tokens=2048&util=0.8"


@pytest.mark.parametrize("failure", ERRORS)
def test_errors_are_read_alone(failure: str):
    assert read_startup(ERRORS[failure]).failure == failure


def test_an_error_has_its_figures():
    log = read_startup(ERRORS["one request of the longest length does not fit"])
    assert [log.number(name) for name in ("needed_gib", "available_gib", "longest")] == [5.62, 4.81, 35_040]
    free = read_startup(ERRORS["the server's share of the memory was not free"])
    assert [free.number(name) for name in ("free_gib", "total_gib", "util")] == [21.07, 23.52, 0.92]


OTHERS = ("", "Traceback: KeyError", "CUDA out of memory. Tried to allocate 2 GiB", "INFO vllm is great", "x" * 4_000_001)


@pytest.mark.parametrize("text", OTHERS, ids=range(len(OTHERS)))
def test_other_texts_are_refused(text: str):
    with pytest.raises(RequestError, match=r"log"):
        read_startup(text)


def test_differences_have_a_cause_if_they_are_large():
    served = answer()
    gib = 2**30
    same = LOG.replace("15.2683", f"{served.weights_bytes / gib:.4f}").replace("18.69", f"{served.kv_cache_bytes / gib:.2f}")
    lines = compare(read_startup(same.replace("136,080", f"{served.kv_tokens:,}")), served)
    assert [line.partition(":")[0] for line in lines] == ["weights", "beside weights and cache", "KV tokens"]
    assert "(+0.00)" in lines[0] and "(+0.0 %)" in lines[2]
    less = compare(read_startup(LOG), served)
    assert "another quantisation" in less[0]
    held = same.replace(f"{served.kv_cache_bytes / gib:.2f}", f"{served.kv_cache_bytes / gib - 2:.2f}")
    assert "another max_num_seqs" in compare(read_startup(held), served)[1]
