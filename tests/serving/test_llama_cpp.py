"""llama.cpp: files, placement, cells and buffers against llama.cpp itself (tests/measured/llama_cpp)."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import sizer
from sizer.base.errors import RequestError
from sizer.base.units import GIB, MIB
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import FILE_TYPES
from sizer.query.text import format_query, parse_query
from sizer.serving.architecture import Weight
from sizer.serving.gguf import COMPARED, USUAL, projector_bytes
from sizer.serving.llama_cpp import Layout, LlamaFlags
from tests.serving.logs import architecture_of
from tests.serving.models import decoder

FOLDER = Path(__file__).parent.parent / "measured/llama_cpp"
FIRST = ("llama-3.2-1b", "gemma-3-4b", "qwen3-30b-a3b", "gpt-oss-20b", "mamba-130m", "phi-3-mini-4k")  # one of each kind
ALIGNMENT_BYTES = 24_576  # small tensors are rounded up, and tables of rotations may be on both sides


def rows_of(name: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of a table by model."""
    found = defaultdict(list)
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["model"]].append(row)
    return found


FILES, MEMORY, DEVICES = rows_of("files.csv"), rows_of("memory.csv"), rows_of("devices.csv")


def models(rows: dict[str, list[dict[str, str]]]) -> list[object]:
    """Return the models of a table, those beyond FIRST as exhaustive tests."""
    return [pytest.param(one, marks=() if one in FIRST else pytest.mark.exhaustive) for one in rows]


@cache
def layout_of(model: str, *, shares_memory: bool = False) -> Layout:
    """Return the layout of a preset's files."""
    return Layout(architecture_of(model), shares_memory=shares_memory)


COLUMNS = ("max_model_len", "slots", "micro_batch", "layers", "host_experts", "build", "kv", "flash")


def flags_of(layout: Layout, row: dict[str, str]) -> LlamaFlags:
    """Return the flags of a row of the table."""
    return flags(layout, file_type="bf16", kv=row["kv"], flash=row["flash"] == "1", **{key: int(row[key]) for key in COLUMNS[:-2]})


def flags(layout: Layout, **changes: object) -> LlamaFlags:
    """Return flags with all layers on the device."""
    return replace(LlamaFlags(max_model_len=4096, slots=1, file_type="q4_k_m", layers=layout.layers + 1), **changes)


@pytest.mark.parametrize("model", models(FILES))
def test_files_have_the_bytes_of_llama_quantize(model):
    layout = layout_of(model)
    found = {row["file_type"]: sum(layout.sizes(row["file_type"])) for row in FILES[model]}
    assert found == {row["file_type"]: int(row["bytes"]) for row in FILES[model]}
    assert set(found) == set(FILE_TYPES) == set(USUAL)


@pytest.mark.parametrize("model", models(MEMORY))
def test_weights_and_cells_equal_and_buffers_are_near_those_of_llama_fit_params(model):
    layout = layout_of(model)
    for row in MEMORY[model]:
        asked = flags_of(layout, row)
        parts = layout.parts(asked)
        assert parts.compute == int(row["estimated_bytes"]), row
        assert abs(parts.weights - int(row["weights_bytes"])) <= ALIGNMENT_BYTES, row
        assert parts.cells == int(row["cells_bytes"]), row
        off = parts.compute / int(row["compute_bytes"]) - 1
        split = asked.layers <= layout.layers or asked.host_experts
        assert (-0.28 if split else -0.12) < off < (0.22 if split else 0.26), (row, off)


@pytest.mark.parametrize("model", models(DEVICES))
def test_several_devices_have_the_layers_of_llama_fit_params(model):
    layout = layout_of(model)
    for row in DEVICES[model]:
        asked = flags(layout, file_type="bf16", max_model_len=8192, **{key: int(row[key]) for key in ("devices", "layers")})
        parts = layout.parts_of(asked, int(row["device"]))
        assert parts.compute == int(row["estimated_bytes"]), row
        assert abs(parts.weights - int(row["weights_bytes"])) <= 4 * ALIGNMENT_BYTES, row
        assert parts.cells == int(row["cells_bytes"]), row
        off = parts.compute / int(row["compute_bytes"]) - 1
        assert -0.19 < off < 0.22, (row, off)


def test_layers_copy_the_cache_of_layers_on_another_device():
    layout = layout_of("gemma-4-e4b-it")
    three = flags(layout, file_type="bf16", max_model_len=8192, devices=3)
    # the last device has 13 layers: 3 read 8,192 tokens of 2 x 2 x 512 elements, 10 a window of 1,024 of 2 x 2 x 256, in 2 bytes
    copied = 3 * 8192 * 2 * 2 * 512 * 2 + 10 * 1024 * 2 * 2 * 256 * 2
    assert copied == 121_634_816
    row = next(row for row in DEVICES["gemma-4-e4b-it"] if (row["devices"], row["device"]) == ("3", "2"))
    # four micro-batches are in flight
    assert layout.parts_of(three, 2).compute == 4 * copied + 188_817_920
    assert layout.parts_of(three, 2).compute == pytest.approx(int(row["compute_bytes"]), rel=1e-4)


def test_devices_of_a_server_have_the_weights_of_a_published_log():
    layout = layout_of("deepseek-r1-distill-qwen-32b")
    four = flags(layout, max_model_len=8192, devices=4)
    # "CUDA0 model buffer size = 4844.72 MiB" and those of three more devices, tests/measured/published/llama_cpp_logs.csv
    found = [layout.parts_of(four, number).weights / MIB for number in range(4)]
    assert found == pytest.approx([4844.72, 4366.53, 4366.53, 4930.57], abs=0.01)
    assert layout.parts(four) == layout.parts_of(four, 3)


def test_several_devices_are_asked_for_and_offered():
    question = "arch=hf:llama-3.1-70b&mode=serve&engine=llama.cpp&gpu=rtx-3090&weights=q4_k_m&max_model_len=8k"
    one, two = (sizer.estimate(f"{question}{pp}").serve for pp in ("", "&pp=2"))
    assert (one.starts, two.starts, two.gpus) == (False, True, 2)
    assert "2 devices" in {lever.flags for lever in one.levers}
    assert "the figures are those of the fullest" in two.reasons[0]
    assert one.weights_bytes < 2 * two.weights_bytes < 1.1 * one.weights_bytes
    for other in (f"{question}&pp=81", question.replace("rtx-3090", "m2-ultra-64gb") + "&pp=2"):
        with pytest.raises(RequestError, match="pp"):
            sizer.estimate(other)


def test_types_of_models_that_were_not_compared_are_said():
    configs = (find_preset(model).config for model in FILES)
    assert {config.get("text_config", config)["model_type"].removesuffix("_text") for config in configs} == {
        name.removesuffix("_text") for name in COMPARED
    }
    served = sizer.estimate("arch=hf:opt-125m&mode=serve&engine=llama.cpp&gpu=t4").serve
    assert "of type opt were not compared with llama.cpp" in served.reasons[1]
    assert len(sizer.estimate(f"{ON_A_LAPTOP}&weights=q4_k_m&max_model_len=8k").serve.reasons) == 1


def test_the_projector_of_a_model_is_named_with_its_size():
    # SigLIP's 27 layers of 1,152 with vectors in 32 bits, the projection to 2,560, and 4,096 positions and patches of 14 x 14 in 32
    layer = 2 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * (4 * 1152 + 4304 + 1152 + 4 * 1152)
    embeddings = 4 * (4096 * 1152 + 1152 * 3 * 14**2 + 1152)
    found = projector_bytes(architecture_of("gemma-3-4b"))
    assert found == 27 * layer + embeddings + 4 * 2 * 1152 + 2 * 1152 * 2560 + 4 * 1152
    served = sizer.estimate("arch=hf:gemma-3-4b&mode=serve&engine=llama.cpp&gpu=t4&max_model_len=8k").serve
    assert "--mmproj, also loaded by -hf), 812 MiB in 16 bits" in served.reasons[1]
    assert projector_bytes(architecture_of("llama-3.2-1b")) == 0


def test_a_smaller_type_makes_a_smaller_file():
    layout = layout_of("llama-3.2-1b")
    ordered = ("f32", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k", "iq1_s")
    assert all(sum(layout.sizes(a)) > sum(layout.sizes(b)) for a, b in pairwise(ordered))


def test_rows_that_blocks_do_not_divide_have_a_larger_type():
    model = decoder()
    shaped = (tuple(replace(one, shape=(*one.shape[:-1], size)) for one in model.weights) for size in (96, 33))
    narrow, odd = (Layout(replace(model, hidden=weights[0].shape[-1], weights=weights)) for weights in shaped)
    assert sum(narrow.sizes("q4_k_m")) > sum(narrow.sizes("q4_0"))  # Q5_0 in place of Q4_K, Q8_0 in place of Q6_K
    assert sum(odd.sizes("q4_0")) == sum(odd.sizes("f16"))


def test_empty_matrices_and_no_layers_on_the_device_are_counted():
    model = decoder()
    empty = Layout(replace(model, weights=(*model.weights, Weight(name="model.layers.0.mlp.down_proj.weight", shape=(1024, 0)))))
    assert sum(empty.sizes("q4_k_m")) == sum(Layout(model).sizes("q4_k_m"))
    served = sizer.estimate(f"{ON_A_LAPTOP}&weights=q4_k_m&max_model_len=8k&gpu_layers=0").serve
    assert (served.weights_bytes, served.kv_cache_bytes) == (0, 0)
    assert served.profile_peak_bytes > 0
    assert served.starts is True


def test_layers_and_experts_move_to_the_host_one_by_one():
    layout = layout_of("gpt-oss-20b")
    whole = flags(layout, file_type="mxfp4")
    by_layer = [layout.parts(replace(whole, layers=count)) for count in range(layout.layers + 2)]
    assert all(a.weights < b.weights and a.cells <= b.cells for a, b in pairwise(by_layer))
    assert len({one.weights + one.host_weights for one in by_layer}) == 1
    by_experts = [layout.parts(replace(whole, host_experts=count)) for count in range(layout.layers + 1)]
    assert all(a.weights > b.weights and a.cells == b.cells for a, b in pairwise(by_experts))


def test_a_mac_counts_each_tensor_once():
    tied, shared = layout_of("llama-3.2-1b"), layout_of("llama-3.2-1b", shares_memory=True)
    assert tied.parts(flags(tied)).weights == shared.parts(flags(shared)).weights == sum(tied.sizes("q4_k_m"))
    assert tied.parts(flags(tied)).host_weights > shared.parts(flags(shared)).host_weights == 0


ON_A_LAPTOP = "arch=hf:llama-3.1-8b&mode=serve&engine=llama.cpp&gpu=rtx-4060-8gb"


def test_an_answer_names_the_parts_and_the_command():
    served = sizer.estimate(f"{ON_A_LAPTOP}&weights=q4_k_m&max_model_len=8k&engine_version=b6000").serve
    assert served.starts is True
    # published logs of this file: "CUDA0 model buffer size = 4403.49 MiB", "KV buffer size = 1024.00 MiB",
    # "CUDA0 compute buffer size = 258.50 MiB", "CPU_Mapped model buffer size = 281.81 MiB"
    sizes = (served.weights_bytes, served.kv_cache_bytes, served.profile_peak_bytes, served.offloaded_bytes)
    assert [size / MIB for size in sizes] == pytest.approx([4403.49, 1024, 258.5, 281.81], abs=0.01)
    assert served.command == "llama-server -m meta-llama/Llama-3.1-8B-Q4_K_M.gguf -c 8192 -np 1 -ngl 999"


def test_what_does_not_start_gets_changes_that_start():
    base = f"{ON_A_LAPTOP}&max_model_len=32k"
    served = sizer.estimate(base).serve
    assert served.starts is False
    assert served.message.startswith("allocating 14315.02 MiB on device 0")
    assert {lever.query.partition("=")[0] for lever in served.levers} >= {"weights", "gpu_layers"}
    for lever in served.levers:
        assert sizer.estimate(f"{base}&{lever.query}").serve.starts is True


def test_experts_on_the_host_make_a_large_model_start():
    base = "arch=hf:gpt-oss-20b&mode=serve&engine=llama.cpp&gpu=rtx-4060-8gb&max_model_len=8k"
    served = sizer.estimate(base).serve
    assert served.flags["file_type"] == "mxfp4"  # as in the checkpoint
    lever = next(one for one in served.levers if one.query.startswith("cpu_moe"))
    moved = sizer.estimate(f"{base}&{lever.query}").serve
    assert moved.starts is True
    assert f"--n-cpu-moe {moved.flags['cpu_moe']}" in moved.command
    fewer = sizer.estimate(f"{base}&cpu_moe={moved.flags['cpu_moe'] - 1}").serve
    assert fewer.starts is False


def test_a_cache_of_eight_bits_holds_longer_requests():
    base = f"{ON_A_LAPTOP}&weights=q4_k_m&max_model_len=auto"
    longest = [sizer.estimate(f"{base}&kv={kv}").serve.longest for kv in ("auto", "q8_0", "q4_0")]
    assert longest[0] < longest[1] < longest[2]
    assert longest[1] / longest[0] == pytest.approx(32 / 17, rel=0.05)  # 34 bytes for 32 elements


def test_wanted_requests_have_a_slot_each():
    yes, no = (sizer.estimate(f"{ON_A_LAPTOP}&weights=q4_k_m&want={want}").serve for want in ("2x8k", "8x8k"))
    assert (yes.want.fits, no.want.fits) == (yes.starts, no.starts) == (True, False)
    assert (yes.requests_at_once, yes.flags["max_model_len"]) == (2.0, 8192)
    assert "-c 16384 -np 2" in yes.command
    own = sizer.estimate(f"{ON_A_LAPTOP}&weights=q4_k_m&want=8x8k&max_num_seqs=1&max_model_len=4k").serve
    assert (own.starts, own.want.fits, own.requests_at_once) == (True, False, 1.0)
    assert 3 * GIB < no.want.missing_bytes < 6 * GIB


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("weights=awq", "weights: given 'awq' with engine=llama.cpp, allowed checkpoint, full, or the type of a GGUF file"),
        ("kv=fp8", r"kv: given 'fp8' with engine=llama.cpp, allowed auto, f32, q8_0"),
        ("cpu_moe=2", "cpu_moe: given 2, allowed 0 for a model without experts"),
        ("gpu_layers=-1", r"gpu_layers: given '-1', allowed whole numbers from 0"),
        ("engine=vllm&weights=q4_k_m", "weights: given 'q4_k_m' with engine=vllm, allowed checkpoint, full, awq"),
        ("engine=vllm&kv=q8_0", r"kv: given 'q8_0' with engine=vllm, allowed auto, fp8"),
        ("engine=vllm&gpu_layers=2", "gpu_layers: given '2' without engine=llama.cpp"),
    ],
)
def test_values_of_other_engines_are_refused(more, words):
    base = ON_A_LAPTOP.replace("&engine=llama.cpp", "") if "engine=" in more else ON_A_LAPTOP
    with pytest.raises(RequestError, match=words):
        sizer.estimate(f"{base}&{more}")


def test_queries_of_files_round_trip():
    request = parse_query(f"{ON_A_LAPTOP}&weights=Q5_K_M&kv=q8_0&gpu_layers=0&cpu_moe=0")
    assert (request.server_weights, request.kv, request.gpu_layers) == ("q5_k_m", "q8_0", 0)
    assert parse_query(format_query(request, complete=True)) == request
