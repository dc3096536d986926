"""llama.cpp's startup logs: published ones against the plan, and texts as they are pasted.

    python -m tests.serving.test_llama_log    # writes the errors beside the logs, for docs/serving.md
"""

from __future__ import annotations

import csv
from functools import cache

import pytest

import sizer
from sizer.base.errors import RequestError
from sizer.base.units import MIB
from sizer.catalogue.serving import FEW_OUTPUTS
from sizer.serving.launch import with_command
from sizer.serving.llama_cpp import Layout
from sizer.serving.startup import compare, is_startup, read_startup
from tests.serving.log_table import LLAMA_LOGS, read_llama_logs
from tests.serving.logs import architecture_of, middle
from tests.serving.test_llama_cpp import flags

PARTS = {"weights_off": "weights_mib", "cache_off": "cache_mib", "compute_off": "compute_mib"}


def build_of(version: str) -> int:
    """Return a build with the rules of a log's version, or of its month if it names no build."""
    return int(version[1:]) if version.startswith("b") else FEW_OUTPUTS if version >= "2026-06" else FEW_OUTPUTS - 1


@cache
def errors_of(number: int) -> dict[str, float | None]:
    """Return the errors of a log in percent, None for a part that it does not have."""
    row = read_llama_logs()[number]
    layout = Layout(architecture_of(row["preset"]))
    asked = flags(
        layout,
        file_type=row["file_type"],
        kv=row["kv"],
        max_model_len=int(row["max_model_len"] or 4096),
        slots=int(row["slots"]),
        micro_batch=int(row["micro_batch"]),
        layers=int(row["layers"]),
        build=build_of(row["version"]),
        flash=row["flash"] == "1",
    )
    parts = layout.parts(asked)
    planned = {"weights_off": parts.weights, "cache_off": parts.cells, "compute_off": parts.compute}
    logged = {name: float(row[column]) if row[column] else 0.0 for name, column in PARTS.items()}
    return {name: 100 * (size / MIB / logged[name] - 1) if logged[name] else None for name, size in planned.items()}


def all_errors(name: str, *, flash: bool = False) -> list[float]:
    """Return the errors of a part over all logs, of those with flash attention alone if asked for."""
    rows = read_llama_logs()
    found = (errors_of(number)[name] for number, row in enumerate(rows) if not flash or row["flash"] == "1")
    return [one for one in found if one is not None]


def test_weights_and_cells_are_those_of_published_logs():
    assert len(all_errors("weights_off")) >= 10
    assert middle(all_errors("weights_off"))[0] <= 0.01
    assert middle(all_errors("cache_off"))[0] <= 0.01
    for number, row in enumerate(read_llama_logs()):
        off = [errors_of(number)[name] for name in ("weights_off", "cache_off")]
        assert all(one is None or abs(one) <= 0.02 for one in off) or row["reason"], row["model"]


def test_compute_buffers_with_flash_attention_are_near_those_of_published_logs():
    found = all_errors("compute_off", flash=True)
    assert len(found) >= 5
    typical, worst = middle(found)
    assert (typical, worst) <= (1.0, 7.0)


def _shown(number: int) -> dict[str, str]:
    """Return the errors of a log as text."""
    return {name: "" if off is None else f"{round(off, 2) + 0.0:.2f}" for name, off in errors_of(number).items()}


def test_the_recorded_errors_of_llama_cpp_are_todays():
    for number, row in enumerate(read_llama_logs()):
        assert _shown(number).items() <= row.items(), row["model"]
        assert row["source"].startswith(("https://", "file: "))


PART = """\
main: loading model
srv    load_model: loading model '/models/Hermes-3-Llama-3.1-8B.Q4_0.gguf'
llama_prepare_model_devices: using device CUDA0 (NVIDIA GeForce RTX 2060) (0000:2b:00.0) - 5141 MiB free
0.00.1 I print_info: file type   = Q4_0
0.00.1 I print_info: general.name          = Hermes 3 Llama 3.1 8B
0.00.1 I print_info: n_embd                = 4096
0.00.1 I print_info: n_layer               = 32
0.00.1 I print_info: n_head                = 32
0.00.1 I print_info: n_head_kv             = 8
0.00.1 I print_info: n_ff                  = 14336
0.00.1 I print_info: n_vocab               = 128256
load_tensors: offloading output layer to GPU
load_tensors: offloaded 15/33 layers to GPU
load_tensors:   CPU_Mapped model buffer size =  2676.44 MiB
load_tensors:        CUDA0 model buffer size =  2049.43 MiB
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 32768
llama_context: n_batch       = 512
llama_context: n_ubatch      = 512
llama_context: flash_attn    = auto
llama_context: kv_unified    = false
llama_context: n_outputs_max = 1
llama_context:  CUDA_Host  output buffer size =     0.49 MiB
llama_kv_cache:        CPU KV buffer size =  2304.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =  1792.00 MiB
llama_kv_cache: size = 4096.00 MiB ( 32768 cells,  32 layers,  1/1 seqs), K (f16): 2048.00 MiB, V (f16): 2048.00 MiB
sched_reserve: Flash Attention was auto, set to enabled
sched_reserve:      CUDA0 compute buffer size =   248.00 MiB
sched_reserve:  CUDA_Host compute buffer size =    48.01 MiB
"""
OLD = """\
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
llm_load_print_meta: model ftype      = Q4_K - Medium
llama_model_loader: loaded meta data with 20 key-value pairs and 291 tensors from /m/llama-2-7b.Q4_K_M.gguf (version GGUF V2)
llm_load_tensors: offloaded 33/33 layers to GPU
llm_load_tensors:      CUDA0 buffer size =  3820.94 MiB
llm_load_tensors:        CPU buffer size =    70.31 MiB
llama_new_context_with_model: n_ctx      = 4096
llama_new_context_with_model: n_ubatch   = 256
llama_new_context_with_model: flash_attn = 0
llama_kv_cache_init:      CUDA0 KV buffer size =  1088.00 MiB
llama_new_context_with_model: KV self size  = 1088.00 MiB, K (q8_0):  544.00 MiB, V (q8_0):  544.00 MiB
llama_new_context_with_model:      CUDA0 compute buffer size =   164.01 MiB
"""


def test_a_log_of_a_server_becomes_its_question():
    assert is_startup(PART)
    log = read_startup(PART)
    assert (log.engine, log.failure, log.arch, log.gpu) == ("llama.cpp", "", "hf:llama-3.1-8b", "rtx-2060")
    assert log.query() == (
        "mode=serve&engine=llama.cpp&max_model_len=32768&max_num_batched_tokens=512&weights=q4_0&gpu_layers=15"
    )
    assert log.remarks() == []
    sizes = {"weights_gib": 2049.43, "cache_gib": 1792.0, "compute_gib": 248.0}
    assert "host_gib" not in log.figures  # the mapped file contains tensors of the device
    assert {name: log.number(name) * 1024 for name in sizes} == pytest.approx(sizes)
    served = sizer.estimate(f"arch={log.arch}&gpu={log.gpu}&{log.query()}").serve
    lines = compare(log, served)
    assert [line.partition(":")[0] for line in lines] == ["weights", "cells and states", "compute buffer"]
    assert all(line.endswith(("(+0.00)", "(-0.00)")) for line in lines), lines


def test_an_old_log_is_read_with_its_flags():
    log = read_startup(OLD)
    assert (log.arch, log.gpu) == ("hf:llama-2-7b", "rtx-3090")
    assert log.query() == (
        "mode=serve&engine=llama.cpp&engine_version=b9466&max_model_len=4096&max_num_batched_tokens=256&weights=q4_k_m&kv=q8_0"
    )
    assert log.title == "llama.cpp"
    assert "engine_version=b5489" in read_startup(f"build: 5489 (2d38b6e4)\n{OLD}").query()
    (remark,) = log.remarks()
    assert remark.startswith("not counted: attention without -fa, which newer builds refuse with a quantized cache")
    served = sizer.estimate(f"arch={log.arch}&gpu={log.gpu}&{log.query()}").serve
    assert compare(log, served)[1].startswith("weights on the host: 0.07 GiB in the log, 0.07 planned")


def test_a_log_without_flash_attention_is_planned_without_it():
    log = read_startup(OLD.replace("q8_0", "f16").replace("1088.00", "2048.00").replace("544.00", "1024.00"))
    assert log.query().endswith("&weights=q4_k_m&fa=0")
    assert log.remarks() == []
    off, on = (sizer.estimate(f"arch={log.arch}&gpu=rtx-3090&{log.query().replace('fa=0', fa)}").serve for fa in ("fa=0", "fa=1"))
    assert off.kv_cache_bytes == on.kv_cache_bytes == 2048 * MIB
    # the products of 256 tokens with 4,096 cells in 32 heads take 128 MiB: 4 bytes each
    assert off.profile_peak_bytes > 128 * MIB > on.profile_peak_bytes
    assert "-fa off" in off.command


def test_a_quantized_cache_needs_flash_attention():
    with pytest.raises(RequestError, match="kv: given q8_0, allowed auto, f32 without flash attention"):
        sizer.estimate("arch=hf:llama-3.2-1b&mode=serve&engine=llama.cpp&gpu=t4&kv=q8_0&fa=0")


def test_the_main_model_is_read_of_a_log_with_others():
    draft = PART.replace("2049.43", "20.43").replace("2676.44", "26.44").replace("248.00", "2.00")
    clip = "alloc_compute_meta:      CUDA0 compute buffer size =   248.10 MiB\nclip_model_loader: has vision encoder\n"
    second = "llama_kv_cache: CUDA0 KV buffer size = 272.00 MiB\nsched_reserve: CUDA0 compute buffer size = 495.00 MiB\n"
    for text in (draft + PART, PART + draft, PART + second + clip):
        log = read_startup(text)
        assert [round(log.number(name) * 1024, 2) for name in ("weights_gib", "compute_gib")] == [2049.43, 248.0]
    assert log.remarks() == ["not counted: the projector of images"]
    assert "not counted: a second model or context, such as a draft" in read_startup(PART + draft).remarks()


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("graph_reserve: failed to allocate compute buffers", "the compute buffer does not fit"),
        ("failed to initialize the context: failed to allocate compute pp buffers", "the compute buffer does not fit"),
        ("failed to initialize the context: failed to allocate buffer for kv cache", "the cache does not fit"),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", "the weights do not fit"),
    ],
)
def test_an_error_names_the_buffer_that_does_not_fit(text, failure):
    asked = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9866.00 MiB on device 0: cudaMalloc failed: out of memory\n"
    log = read_startup(PART + asked + text)
    assert log.failure == failure
    served = sizer.estimate(f"arch={log.arch}&gpu={log.gpu}&{log.query()}").serve
    assert compare(log, served)[-1].startswith("the buffer that did not fit: 9.63 GiB in the log; planned: weights 2.00")
    assert read_startup(asked).failure == "out of memory"


def test_the_fullest_of_several_devices_is_read():
    first = "CUDA0 model buffer size =  2049.43 MiB"
    cuda1 = PART.replace(first, f"{first}\nload_tensors: CUDA1 model buffer size = 9000.00 MiB")
    log = read_startup(cuda1)
    assert (log.figures["pp"], log.number("weights_gib"), log.number("compute_gib")) == (2.0, 9000 / 1024, 0.0)
    assert log.query().endswith("&pp=2")


def test_slots_share_cells_or_split_them():
    four = PART.replace("n_seq_max     = 1", "n_seq_max     = 4")
    assert "max_model_len=8192&max_num_seqs=4" in read_startup(four).query()
    shared = four.replace("kv_unified    = false", "kv_unified    = true")
    assert "max_model_len=32768&max_num_batched" in read_startup(shared).query()


def test_experts_on_the_host_are_read_from_their_lines_or_the_command():
    lines = "".join(f"tensor blk.{one}.ffn_up_exps.weight (99 MiB mxfp4) buffer type overridden to CPU\n" for one in range(7))
    assert read_startup(PART + lines).query().endswith("&cpu_moe=7")
    command = "$ llama-server -m gpt-oss-20b-mxfp4.gguf --n-cpu-moe 9 -c 4096\n"
    log = with_command(read_startup(command + PART), command + PART)
    assert log.query().endswith("&gpu_layers=15&cpu_moe=9")
    assert "max_model_len=32768" in log.query()


def test_a_build_decides_how_many_logits_are_kept():
    question = "arch=hf:qwen3-4b&mode=serve&engine=llama.cpp&gpu=rtx-4060-8gb&weights=q4_k_m&max_model_len=8k"
    new, old = (sizer.estimate(f"{question}{version}").serve for version in ("", "&engine_version=b9466"))
    assert old.engine_version == "b9466"
    assert old.profile_peak_bytes > 3 * new.profile_peak_bytes
    for version, engine in (("0.11.2", "llama.cpp"), ("b99999", "llama.cpp"), ("b9466", "vllm")):
        with pytest.raises(RequestError, match="engine_version"):
            sizer.estimate(f"arch=hf:qwen3-4b&mode=serve&engine={engine}&engine_version={version}")


def record() -> None:
    """Write the errors beside the logs."""
    rows = [row | _shown(number) for number, row in enumerate(read_llama_logs())]
    with LLAMA_LOGS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    record()
