"""Startup logs and errors as they are pasted."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from sizer.base.errors import RequestError
from sizer.base.units import GIB
from sizer.query.text import parse_query
from sizer.serving.launch import read_launch
from sizer.serving.startup import compare, explain, is_startup, read_startup, refitted
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
    "graphs ran out of memory": "Exception: Capture CUDA graph failed: CUDA out of memory. Tried to allocate 2.00 GiB.",
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
    older = read_startup(
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in "
        "KV cache (29520). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
    )
    assert (older.engine, older.number("longest"), older.failure) == ("vllm", 29_520, log.failure)
    assert (older.query(), log.query()) == ("mode=serve&max_model_len=131072", "mode=serve&max_model_len=40960")
    free = read_startup(ERRORS["the server's share of the memory was not free"])
    assert [free.number(name) for name in ("free_gib", "total_gib", "util")] == [21.07, 23.52, 0.92]


def test_constants_of_a_machine_give_the_cache_of_its_log():
    vllm, served = read_startup(LOG), answer(max_num_seqs=64)
    logged = {"weights_gib": served.weights_bytes / GIB, "cache_gib": served.kv_cache_bytes / GIB - 0.4}
    log = replace(vllm, figures=vllm.figures | logged)
    constants = refitted(log, served)
    assert constants == {"graphs": "2.24GiB", "outside": f"{served.outside_torch_bytes / GIB + 0.4:.2f}GiB"}
    keys = "&".join(f"{key}={value}" for key, value in constants.items())
    asked = parse_query(f"arch=hf:qwen3-8b&gpu=a100-40gb&mode=serve&{keys}")
    again = answer(max_num_seqs=64, outside_bytes=asked.outside, graphs_bytes=asked.graphs)
    assert again.kv_cache_bytes / GIB == pytest.approx(log.number("cache_gib"), abs=0.005)
    assert again.graphs_bytes == asked.graphs == int(2.24 * GIB)
    assert refitted(read_startup(SGLANG), replace(served, engine="sglang")) == {}
    assert refitted(read_startup(ERRORS["no memory for the cache"]), served) == {}


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
    assert [line.partition(":")[0] for line in lines] == ["weights", "other than weights and cache", "KV tokens"]
    assert "(+0.00)" in lines[0] and "(+0.0 %)" in lines[2]
    less = compare(read_startup(LOG), served)
    assert "another quantization" in less[0]
    held = same.replace(f"{served.kv_cache_bytes / gib:.2f}", f"{served.kv_cache_bytes / gib - 2:.2f}")
    assert "another max_num_seqs" in compare(read_startup(held), served)[1]


def test_the_tokens_have_a_cause_if_the_bytes_are_those_of_the_plan():
    served, gib = answer(), 2**30
    text = LOG.replace("18.69", f"{served.kv_cache_bytes / gib:.2f}").replace("136,080", f"{2 * served.kv_tokens:,}")
    assert compare(read_startup(text), served)[2].endswith("(-50.0 %): another dtype of keys and values, another block size, or a "
    "layout that is not known")


def test_an_error_alone_has_lines_of_its_own():
    served, gib = answer(), 2**30
    said = compare(read_startup(ERRORS["one request of the longest length does not fit"]), served)
    planned = served.kv_cache_bytes / gib
    way = "0.81 GiB more, a shorter max_model_len, or kv=fp8, which halves what attention needs"
    assert said == [
        f"cache: one request of the longest length needs 5.62 GiB, 4.81 are left: {way}",
        f"KV cache: 4.81 GiB in the log, {planned:.2f} planned ({planned - 4.81:+.2f})",
        f"longest request: 35,040 in the log, {served.longest:,} planned ({100 * (served.longest / 35_040 - 1):+.1f} %)",
    ]
    (free, device) = compare(read_startup(ERRORS["the server's share of the memory was not free"]), served)
    assert device == "memory of the device: 23.52 GiB in the log, 24.00 planned (+0.48): another device than that of the question"
    assert free.startswith("free when the server starts: 21.07 GiB in the log, 21.64 are its share: another program uses memory")
    (warm,) = compare(read_startup(ERRORS["the sampler ran out of memory"]), served)
    assert warm.startswith(f"profile run: {served.profile_peak_bytes / gib:.2f} GiB planned, for 256 requests: warming up needs it")
    assert read_startup(ERRORS["the sampler ran out of memory"]).query() == "mode=serve&max_num_seqs=256"
    assert compare(read_startup(ERRORS["no memory for the cache"]), served) == []


OTHER_SERVERS = {
    "Ollama": 'time=2025-01-01 level=INFO source=server.go:376 msg="starting llama server"\nllama_model_loader: loaded meta data',
    "Text Generation Inference": "2024-05-01 INFO text_generation_launcher: Args { model_id: ... }",
    "TensorRT-LLM": "[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache",
    "LMDeploy": "2024-05-01 10:00:00,000 - lmdeploy - INFO - turbomind model",
}


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_a_log_of_another_server_is_refused_by_name(name: str):
    assert is_startup(OTHER_SERVERS[name])
    with pytest.raises(RequestError, match=rf"this is a log of {name}: given [0-9]+ characters, allowed the startup log or"):
        read_startup(OTHER_SERVERS[name])


def test_a_log_of_llama_cpp_without_sizes_is_refused():
    with pytest.raises(RequestError, match=r"log of vLLM, SGLang or llama\.cpp: given .* without the size of weights"):
        read_startup("llama_model_loader: loaded meta data with 26 key-value pairs\nllama_kv_cache: size = 512.00 MiB")


def test_any_text_is_read_or_refused():
    rng = random.Random(0)
    whole = LOG + FREE + SGLANG + "".join(ERRORS.values()) + "'kv_cache_memory_bytes': 1" + "9" * 400
    for _ in range(500):
        parts = [whole[(start := rng.randrange(len(whole))) : start + rng.randrange(200)] for _ in range(rng.randrange(1, 9))]
        text = "".join(parts).translate({ord(rng.choice("0123456789=().")): rng.choice(("", ".", ",", "9" * 50))})
        with suppress(RequestError):
            log = read_startup(text)
            assert isinstance(log.query() + "".join([*log.missing(()), *log.remarks(), str(log.gpu), str(log.arch)]), str)
        with suppress(RequestError):
            read_launch(f"vllm serve {text}" if rng.random() < 0.5 else f"lmsysorg/sglang {text}")


def test_a_startup_log_is_told_from_other_texts():
    assert all(map(is_startup, (LOG, SGLANG, *ERRORS.values())))
    # a traceback that goes through vLLM's files is a message of PyTorch's, as is an error of a training script
    trace = 'File "/site-packages/vllm/worker.py", line 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.'
    for other in ("", "model_name_or_path: vllm/model\nuse_vllm: true", trace, '{"train_batch_size": 8}'):
        assert not is_startup(other)


FREE = (
    "INFO [gpu_worker.py:391] Free memory on device (78.66/79.19 GiB) on startup. Desired GPU memory utilization is (0.9, 71.27 "
    "GiB). Actual usage is 14.08 GiB for weight, 1.97 GiB for peak activation, 0.07 GiB for non-torch memory, and 0.67 GiB for "
    "CUDAGraph memory.\n"
)


def test_the_memory_that_was_free_is_no_error():
    log = read_startup(LOG.replace("'gpu_memory_utilization': 0.85", "'x': 1") + FREE)
    assert (log.failure, log.number("util"), log.number("total_gib")) == ("", 0.9, 79.19)
    assert (log.number("profile_gib"), log.number("outside_gib")) == (1.97, 0.07)


def test_the_peak_of_the_profile_run_has_a_line_if_the_log_says_it():
    served = answer()
    (line,) = [line for line in compare(read_startup(LOG + FREE), served) if "profile" in line and "1.97" in line]
    planned = served.profile_peak_bytes / 2**30
    assert line == f"of it the profile run's peak: 1.97 GiB in the log, {planned:.2f} planned ({planned - 1.97:+.2f})"


DEVICES = {
    "configs/E=512,N=256,device_name=NVIDIA_H200.json for MoE layer": "h200",
    "configs/E=256,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8.json": "dgx-spark",
    "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.": "dgx-spark",
    "GPU 0: NVIDIA A100-SXM4-80GB": "a100-80gb",
    "|   0  NVIDIA GeForce RTX 5090        On  |   00000000:01:00.0  On |": "rtx-5090",
    "Free memory on device (44.0/44.40 GiB) on startup. Desired": None,  # an L40S, an L40, and others have as much
    "Free memory on device (136.0/139.80 GiB) on startup. Desired": "h200",
    "GPU 0: NVIDIA Titan of Tomorrow": None,
}


@pytest.mark.parametrize("text", DEVICES)
def test_the_device_is_read_if_the_log_says_it(text: str):
    log = read_startup(LOG + text + "\n")
    assert log.gpu == DEVICES[text]
    missing = [line for line in log.missing(()) if line.startswith("device: ")]
    assert len(missing) == (DEVICES[text] is None)
    assert log.missing(("arch", "gpu", "engine_version")) == []


def test_what_neither_log_nor_query_says_is_named():
    named = "Resolved architecture: Qwen3NextForCausalLM\nnon-default args: {'model': '/models'}\n"
    log = read_startup(f"{named}GPU KV cache size: 1 tokens")
    assert log.missing(()) == [
        "model: the log names the folder '/models', of class Qwen3NextForCausalLM; write arch=",
        "device: not in the log, what depends on it is not compared; write gpu=",
        "version: not in the log; the newest known of vLLM is taken",
    ]


UNCOUNTED = {
    "speculative_config=SpeculativeConfig(method='suffix', model=None, num_spec_tokens=24)": "speculative decoding",
    "ServerArgs(model_path='a', lora_paths=['b'])": "LoRA adapters",
    "ServerArgs(enable_lora=True, max_lora_rank=None)": "LoRA adapters",
    "cpu_offload_gb=4, offload_group_size=-1": "offloaded to the CPU",
    "'limit_mm_per_prompt': {'image': 0}": "limits of images",
    "'offload_group_size': 8": "offloaded to the CPU",
    "quantization=compressed-tensors, ": "config.json alone",
    "'kv_cache_dtype': 'turboquant'": "kv_cache_dtype=turboquant",
}


@pytest.mark.parametrize("text", UNCOUNTED)
def test_what_is_not_counted_is_said(text: str):
    (line,) = read_startup(f"{text}\nGPU KV cache size: 1 tokens").remarks()
    assert UNCOUNTED[text] in line
    quiet = "speculative_config=None 'cpu_offload_gb': 0 decode_context_parallel_size=1 quantization=None kv_cache_dtype=auto"
    assert read_startup(f"{quiet}\nGPU KV cache size: 1 tokens").remarks() == []


def test_sglangs_flags_are_read_from_its_arguments():
    args = (
        "server_args=ServerArgs(model_path='/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/4', "
        "kv_cache_dtype='fp8_e4m3', quantization='fp8', tp_size=4, pp_size=2, dp_size=1, max_running_requests=64, "
        "max_total_tokens=None, "
        "chunked_prefill_size=8192, mem_fraction_static=0.83, disable_cuda_graph=True, speculative_algorithm=None)\n"
        "max_total_num_tokens=9, chunked_prefill_size=8192, max_running_requests=2048, context_len=40960"
    )
    log = read_startup(args)
    assert (log.arch, log.remarks()) == ("hf:qwen3-8b", [])
    assert log.query() == (
        "mode=serve&engine=sglang&tp=4&pp=2&max_model_len=40960&max_num_seqs=64&max_num_batched_tokens=8192&util=0.83&kv=fp8"
        "&enforce_eager=1&weights=fp8"
    )
    assert read_startup(args.replace("max_running_requests=64", "max_running_requests=None")).number("max_num_seqs") is None


def test_sglangs_arguments_are_a_dict_from_0_5_19_on():
    # entrypoints/engine.py, logger.info(f"server_args={server_args.resolved_dict()}")
    said = "'tp_size': 2, 'context_length': 262144, 'mem_fraction_static': 0.85, 'kv_cache_dtype': 'fp8_e4m3', 'page_size': 64"
    more = "'max_total_tokens': 1048576, 'max_mamba_cache_size': None, 'mamba_ssm_dtype': 'bfloat16', 'swa_full_tokens_ratio': 0.8"
    drafts = "'speculative_algorithm': 'EAGLE', 'speculative_draft_model_path': None, 'speculative_num_draft_tokens': 4"
    pool = "Mamba Cache is allocated. max_mamba_cache_size: 43\nmax_total_num_tokens=5"
    log = read_startup(f"server_args={{'model_path': 'Qwen/Qwen3.6-27B', {said}, {more}, {drafts}}}\n{pool}")
    assert (log.arch, log.remarks()) == ("hf:qwen3.6-27b", [])
    assert log.query() == (
        "mode=serve&engine=sglang&tp=2&max_model_len=262144&util=0.85&kv=fp8&speculative=mtp:3"
        "&pool=max_total_tokens:1048576,page_size:64,mamba_ssm_dtype:bfloat16"
    )


def test_a_pool_of_states_that_holds_no_request_is_named():
    # kv_cache_configurator.py, resolve_max_num_reqs, 0.5.23: the number is computed, no flag
    error = "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
    log = read_startup(f"{error}max_mamba_cache_size=4, mamba_ratio=5, resulting max_num_reqs=0.")
    assert (log.engine, log.failure) == ("sglang", "not enough memory for the pool of states")
    assert log.query() == "mode=serve&engine=sglang"


def test_prefixes_of_models_with_states_are_cached_if_the_log_says_so():
    hybrid = LOG + "Setting attention block size to 544 tokens to ensure that attention page size is >= mamba page size\n"
    assert "prefix_caching" not in read_startup(hybrid + "enable_prefix_caching=False").query()
    newer = hybrid.replace("v0.9.2", "v0.26.0") + "enable_prefix_caching=False"
    assert read_startup(newer).query().endswith("&prefix_caching=0")
    assert "prefix_caching" not in read_startup(newer.replace("v0.26.0", "v0.8.5")).query()
    assert read_startup(hybrid + "enable_prefix_caching=True").query().endswith("&prefix_caching=1")
    assert "prefix_caching" not in read_startup(LOG + "enable_prefix_caching=True").query()


def test_a_hostile_text_takes_no_longer_than_its_length():
    devices = ("GPU 0: NVIDIA ", "device_name=A", "|   0   A", "]  version", "max_running_requests=1")
    parts = ("LLM engine (v", "Free memory on device", "Load weight end.", "KV Cache is allocated.", "KV    ", "model_path='a")
    began = time.process_time()
    for part in (*devices, *parts):
        text = part * (1_000_000 // len(part))
        is_startup(text)
        with suppress(RequestError):
            read_startup(text)
    assert time.process_time() - began < 30


def test_no_difference_assumes_a_device():
    log = read_startup(LOG)
    lines = compare(log, answer(), on_device=False)
    assert [line.partition(":")[0] for line in lines] == ["weights", "KV tokens"]
    assert "%" not in lines[1]
    free = "device: not in the log (15.16 GiB were free before loading), what depends on it is not compared; write gpu="
    assert free in read_startup(SGLANG).missing({"arch"})


def test_a_cache_beyond_the_device_has_a_cause():
    large = read_startup(LOG.replace("memory: 18.69 GiB", "memory: 151.25 GiB"))
    line = next(line for line in compare(large, answer()) if line.startswith("other than"))
    assert line.endswith("exceed the share of this device: another device, or another util")


EXPLAINED = {
    "max seq len (131072), 20.0 GiB KV cache is needed, which is larger than the available KV cache memory (5.11 GiB).": (
        "cache: one request of the longest length needs 20.00 GiB, 5.11 are left: 14.89 GiB more"
    ),
    "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. max_mamba_cache_size=4, mamba_ratio=5,": (
        "states: 4 fit, a running request takes 5: "
    ),
    "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88.\n"
    "  Raise --mem-fraction-static above 0.912 (minimum viable": (
        "share: the weights take all of it; from --mem-fraction-static 0.912 on"
    ),
}


def test_an_error_without_figures_has_a_way_out():
    for failure in ("no memory for the cache", "not enough memory for the pool"):
        (line,) = explain(read_startup(ERRORS[failure]))
        assert "the whole" in line
    (line,) = explain(read_startup(ERRORS["the server's share of the memory was not free"]))
    assert line.startswith("free when the server starts: 21.07 GiB in the log")
    assert explain(read_startup(LOG)) == []


def test_flags_without_a_program_ask_for_it():
    with pytest.raises(RequestError, match="write the program before its flags"):
        read_startup("--model Qwen/Qwen3-8B --tensor-parallel-size 2")


@pytest.mark.parametrize("text", EXPLAINED)
def test_an_error_is_explained_without_a_model(text: str):
    log = read_startup(f"RuntimeError: {text}")
    assert (log.arch, len(explain(log))) == (None, 1)
    assert explain(log)[0].startswith(EXPLAINED[text])
