from __future__ import annotations

import csv
import importlib
import io
import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from itertools import dropwhile, takewhile
from pathlib import Path
from unittest import mock

import pytest

import sizer
from sizer.__main__ import COMMANDS, main, parse_options
from sizer.base.errors import JobError, RequestError, TimeLimitError
from sizer.base.units import format_bytes
from sizer.commands.arguments import add_query, query_of, question_of
from sizer.commands.decisions import format_devices, format_levers, format_limits, format_ranks
from sizer.commands.report_text import format_explanation, format_report
from sizer.commands.terminal import format_table
from sizer.query.keys import KEYS
from sizer.query.text import format_query, parse_query, query_keys
from sizer.report.phases import PHASE_TITLES
from sizer.report.report import Report
from sizer.service.client import JobClient
from sizer.service.messages import COMPILED, STOPS
from sizer.service.settings import Settings
from sizer.service.tasks import TASKS
from tests.architecture.tiny_configs import LLAMA
from tests.processes.running import TESTS
from tests.ui.decisions import devices_for, levers_for, limits_for, ranks_for, served_devices_for, served_ranks_for
from tests.ui.reports import report_for

QUERY = "arch=torchvision:resnet50&dtype=float32,bfloat16&batch=1,32&gpu=a100-40gb"


@pytest.fixture
def run(capsys):
    """Runs a command with jobs that answer at once; (exit status, stdout, stderr)."""

    def run(*arguments: str, function: str = "tests.service.scripted:report") -> tuple[int, str, str]:
        settings = Settings(function=function, preload=(), max_jobs=1, readable=(TESTS,))
        status = main(arguments, make_client=lambda: JobClient(settings))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


LINK = "\nLink: /?"


def test_every_command_is_listed_once():
    modules = [path.stem for path in (Path(sizer.__file__).parent / "commands").glob("*.py")]
    written = [
        (name, module)
        for module in modules
        for name in getattr(importlib.import_module(f"sizer.commands.{module}"), "COMMANDS", ())
    ]
    assert sorted(written) == sorted((name, module) for name, (module, _) in COMMANDS.items())


# ------------------------------------------------------------------------------------------------------------ estimate


def test_explain_says_how_it_was_computed(run):
    status, out, err = run("estimate", QUERY, "--explain")
    assert (status, err) == (0, "")
    report = report_for(parse_query(QUERY))
    assert out.partition(LINK)[0] == f"{format_report(report)}\n\n{format_explanation(report)}\n"
    lines = out.partition("How this was computed")[2].splitlines()
    assert "Kernels, by the rules of CUDA capability 8.0 in PyTorch 2.15:" in lines
    assert "  batch norm: cuDNN (float32, training), 53 modules; float32" in lines
    assert "  optimizer: foreach (adamw)" in lines, "what every dtype takes names none"
    assert lines.index("Exact:") < lines.index("Modelled or left out:") < lines.index("Allocator:")
    assert out.count("How this was computed") == 1
    assert "How this was computed" not in run("estimate", QUERY)[1]


def test_explain_is_in_the_json_anyway(run):
    assert json.loads(run("estimate", QUERY, "--json")[1])["explanation"]["kernels"][0]["modules"] == 53
    status, out, err = run("estimate", QUERY, "--json", "--explain")
    assert (status, out) == (2, "") and "not allowed with argument" in err


def test_a_report_without_an_explanation_says_so():
    report = replace(report_for(parse_query(QUERY)), explanation=None)
    assert format_explanation(report) == "This report does not say how it was computed."


def test_estimate_prints_the_answer_the_table_and_the_peak(run):
    status, out, err = run("estimate", QUERY)
    assert (status, err) == (0, "")
    report = report_for(parse_query(QUERY))
    assert out.partition(LINK)[0] == format_report(report) + "\n"
    lines = out.splitlines()
    assert lines[0] == "resnet50 (ResNet)"
    assert lines[1] == "25,557,032 parameters (25.56 M), 53,120 buffer elements"
    assert lines[2] == "weights in float32: 102.23 MB (97.49 MiB) to download"
    first, total = report.find("float32", 32), format_bytes(report.gpu.total_bytes)
    needs = (
        f"{format_bytes(first.process_bytes)} for the process ({format_bytes(first.peak_allocated_bytes)} allocated)"
    )
    assert lines[4] == f"Training in float32 at batch 32 needs {needs}; it fits one {report.gpu.name} with {total}."
    start = next(place for place, line in enumerate(lines) if line.startswith("dtype"))
    assert lines[6].startswith("It fits: ")
    table = [line.split() for line in lines[start : start + 5]]
    assert table[0] == ["dtype", "batch", "process", "allocated", "reserved", "verdict"]
    assert [(row[0], row[1], row[-1]) for row in table[1:]] == [
        ("float32", "1", "fits"),
        ("float32", "32", "fits"),
        ("bfloat16", "1", "fits"),
        ("bfloat16", "32", "fits"),
    ]
    assert "In memory at the peak, batch 32:" in lines
    parameters = next(line.split() for line in lines if line.startswith("parameter "))
    both = [format_bytes(report.find(dtype, 32).at_peak["parameter"]).split() for dtype in ("float32", "bfloat16")]
    assert parameters == ["parameter", *both[0], *both[1]]
    for dtype in ("float32", "bfloat16"):
        row = report.find(dtype, 32)
        places = [line for line in lines if line.startswith("peak of ")]
        (place,) = (line for line in places if dtype in line.partition(":")[0].removeprefix("peak of ").split(", "))
        assert place.endswith(f": {row.peak_op} in {row.peak_module} ({row.peak_phase})")
    assert any(line.startswith("  float32: ") for line in lines)
    assert "Note: The loss is cross entropy over 1000 classes." in lines
    assert any(line.startswith("Assumed: ") for line in lines)
    assert any(line.startswith("Not counted: ") for line in lines)


def test_what_is_to_be_read_with_the_figures_follows_the_headline(run):
    status, out, err = run("estimate", f"{QUERY}&torch=2.11")
    assert (status, err) == (0, "")
    blocks = out.split("\n\n")
    assert blocks[1].splitlines()[1] == "Note: the rules are those of PyTorch 2.11."
    assert out.count("the rules are those of PyTorch") == 1
    status, out, err = run("estimate", f"{QUERY}&torch=2.11", "--json")
    printed = json.loads(out)
    assert printed["target"] == {"torch": "2.11"}
    assert printed["cautions"] == ["the rules are those of PyTorch 2.11"]
    assert printed["cautions"][0] in printed["notes"]


@pytest.mark.parametrize(("mode", "told"), [("training", True), ("inference", False)])
def test_how_much_is_trained_is_told_of_what_trains(mode, told):
    report = report_for(parse_query(f"arch=torchvision:resnet50&dtype=float32&batch=32&mode={mode}"))
    frozen = replace(report, model=replace(report.model, trainable_parameters=5))
    assert ("5 of them trainable" in format_report(frozen)) is told


def test_what_the_host_holds_follows_the_headline():
    report = report_for(parse_query("arch=torchvision:resnet50&dtype=float32&batch=32"))
    held = tuple(replace(row, host_bytes=3 * 2**30) for row in report.estimates)
    said = "The host holds 3.00 GiB of offloaded tensors"
    assert f"{said}." in format_report(replace(report, estimates=held)).splitlines()
    ranks = replace(report, estimates=held, request=report.request | {"parallel": "ddp"})
    assert f"{said}, for each rank." in format_report(ranks).splitlines()
    assert said not in format_report(report)


@pytest.mark.parametrize(("asked", "has"), [({}, False), ({"evaluate": "loss"}, True), ({"step": "in_backward"}, True)])
def test_a_training_recipe_has_a_row_for_each_phase(asked, has):
    report = report_for(parse_query("arch=hf:gpt2&dtype=float32&batch=32"))
    report = replace(report, request=report.request | asked)
    lines = format_report(report).splitlines()
    begun = "Peak allocated in each phase, and allocated and reserved at its end, float32:"
    assert (begun in lines) is has
    if has:
        row = report.estimates[0]
        rows = lines[lines.index(begun) + 2 :][: len(row.phases)]
        assert [line.split()[0] for line in rows] == [PHASE_TITLES[use.phase].split()[0] for use in row.phases]
        assert ["(the peak)" in line for line in rows] == [use.phase == row.peak_phase for use in row.phases]
        assert all(line.endswith(format_bytes(use.reserved_bytes)) for line, use in zip(rows, row.phases, strict=True))


def test_estimate_as_json_is_the_report(run):
    status, out, err = run("estimate", QUERY, "--json")
    assert (status, err) == (0, "")
    assert Report.from_dict(json.loads(out)) == report_for(parse_query(QUERY))
    assert out.count("\n") == 1


def test_estimate_as_csv_has_a_row_per_dtype_and_batch(run):
    status, out, _ = run("estimate", QUERY, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0
    assert [(row["dtype"], row["batch"]) for row in rows] == [
        ("float32", "1"),
        ("float32", "32"),
        ("bfloat16", "1"),
        ("bfloat16", "32"),
    ]
    assert rows[0]["weights_bytes"] == "102228128"


def test_config_file_replaces_arch_and_need_not_be_told(run, tmp_path):
    config = {"model_type": "gpt2", "n_embd": 64}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    queries = []
    for query in ("", "?arch=torchvision:resnet50&batch=2", "batch=2"):
        status, out, err = run("estimate", query, "--config", str(tmp_path / "config.json"), "--json")
        assert (status, err) == (0, ""), query
        queries.append(parse_query(json.loads(out)["query"]))
    assert {query.source for query in queries} == {"config"}
    assert {query.config for query in queries} == {'{"model_type":"gpt2","n_embd":64}'}
    assert [len(query.batches) for query in queries] == [8, 1, 1]


ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "r": 32, "lora_alpha": 64}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def test_a_folder_takes_the_place_of_its_config(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type":"gpt2","n_embd":64}')
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    for path in (tmp_path, tmp_path / "config.json"):
        status, out, err = run("estimate", "batch=2", "--config", str(path), "--json")
        assert (status, err) == (0, "")
        config = json.loads(parse_query(json.loads(out)["query"]).config)
        assert config["quantization_config"] == {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quant_algo": "FP8"}
    status, out, err = run("estimate", "batch=2", "--config", str(tmp_path / "hf_quant_config.json"))
    assert status == 2 and "give the folder with --config" in err


def test_an_adapters_folder_asks_for_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    parser = ArgumentParser()
    add_query(parser, "")
    request = parse_query(query_of(parser.parse_args(["batch=2&r=8", "--config", str(tmp_path)])))
    assert (request.source, request.name, request.train) == ("hub", "Qwen/Qwen3-8B", "adapter")
    assert (request.adapter_rank, request.adapter_alpha) == (8, 64)


QLORA = """
base_model: Qwen/Qwen3-8B
adapter: qlora
micro_batch_size: 2
sequence_len: 4096
sample_packing: true
bf16: true
"""


@pytest.mark.parametrize("place", ["QUERY", "--config", "stdin"])
def test_a_training_config_asks_its_question(tmp_path, monkeypatch, capsys, place):
    file = tmp_path / "train.yaml"
    file.write_text(QLORA)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(QLORA.encode())))
    given = {"QUERY": [str(file)], "--config": ["--config", str(file)], "stdin": ["-"]}[place]
    request = parse_query(query_of(parse_options(["estimate", *given, "--batch", "1", "--gpu", "rtx-4090"])))
    err = capsys.readouterr().err
    assert (request.name, request.weights, request.sequence_length, request.gpu) == ("qwen3-8b", "nf4-dq", 4096, "rtx-4090")
    assert request.batches == (1,), "a flag stands above the file"
    assert err.startswith("read as Axolotl: arch=hf:qwen3-8b&") and "not counted: sample_packing" in err
    assert parse_query(question_of(f"{file}&batch=4")).batches == (4,), "as compare reads it"


@pytest.mark.parametrize(
    ("name", "text", "query"),
    [
        ("serve.sh", "vllm serve Qwen/Qwen3-8B --max-model-len 8192", "arch=hf:qwen3-8b&mode=serve&max_model_len=8192"),
        (
            "flux.py",
            'pipe = FluxPipeline.from_pretrained("black-forest-labs/FLUX.1-dev", torch_dtype=torch.bfloat16).to("cuda")',
            "arch=diffusers:flux.1-dev&mode=inference&dtype=bfloat16",
        ),
    ],
)
def test_a_command_or_code_asks_its_question(tmp_path, capsys, name, text, query):
    (tmp_path / name).write_text(text)
    options = parse_options(["estimate", str(tmp_path / name)])
    assert query_of(options) == query == query_of(options), "the file is read once"
    assert capsys.readouterr().err.count("read as") == 1


@pytest.mark.parametrize(
    ("name", "text", "todo"),
    [
        ("train.py", "import torch\nmodel = torch.nn.Linear(2, 2)\n", "sizer run -- "),
        ("server.log", "INFO 09-01 [gpu_worker.py:298] Available KV cache memory: 25.91 GiB\n", "sizer startup --log "),
        ("notes.txt", "ollama run my-own-model", "llama.cpp"),
    ],
)
def test_a_file_of_another_kind_says_what_to_do(run, tmp_path, name, text, todo):
    (tmp_path / name).write_text(text)
    status, out, err = run("estimate", str(tmp_path / name))
    assert (status, out, err.count("\n")) == (2, "", 1) and todo in err


def test_a_file_without_a_model_needs_one(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}')
    with pytest.raises(RequestError, match="the file names no model"):
        query_of(parse_options(["estimate", str(tmp_path / "ds.json")]))
    request = parse_query(query_of(parse_options(["estimate", "hf:gpt2", "--config", str(tmp_path / "ds.json")])))
    assert (request.name, request.parallel, request.batches) == ("gpt2", "fsdp", (3,))


@pytest.mark.parametrize("first", [["--batch", "2"], ["--json"], ["--batch", "2", "--json"]])
def test_flags_may_come_before_the_model(first):
    options = parse_options(["estimate", *first, "resnet50"])
    assert parse_query(query_of(options)).name == "resnet50"
    with pytest.raises(RequestError, match="unrecognized arguments: other"):
        parse_options(["estimate", *first, "resnet50", "other"])


def test_some_dtypes_fail_and_the_rest_is_shown(run):
    status, out, err = run("estimate", QUERY.replace("bfloat16", "float16"))
    assert (status, err) == (0, "")
    assert "float16 could not be traced: nobody can trace this" in out
    assert "Training in float32 at batch 32 needs" in out


def test_counts_are_printed_where_nothing_could_be_traced(run):
    query = "arch=torchvision:resnet50&dtype=float16"
    status, out, err = run("estimate", query)
    assert status == 3
    assert "25,557,032 parameters" in out
    assert "float16 could not be traced: nobody can trace this" in out
    assert err == ("sizer: the model was counted, but no step could be traced: given float16; nobody can trace this\n")
    status, out, err = run("estimate", query, "--json")
    assert status == 3
    assert json.loads(out)["model"]["parameters"] == 25_557_032
    assert err.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "arch=torchvision:resnet50&batch=-5"], "sizer: batch: given '-5', allowed whole numbers from 1"),
        (["estimate", "arch=torchvision:resnet50&colour=red"], "colour"),
        (["estimate", ""], "arch"),
        (["estimate", "arch=hf:no-such-preset"], "a key of the presets"),
        (["estimate"], "sizer: the following arguments are required: QUERY; see `python -m sizer estimate --help`"),
        (["estimate", QUERY, "--json", "--csv"], "not allowed with argument"),
        (["estimate", QUERY, "--config", "no/such/file"], "config file cannot be read: given 'no/such/file'"),
        (["guess", QUERY], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 2}', "sizer: config"),
        (b"\xff\xfe", "sizer: config"),
        (b" " * (2 * 2**20 + 1), "sizer: config is too large"),
    ],
)
def test_bad_config_file_is_refused_as_such(run, tmp_path, data, message):
    (tmp_path / "config.json").write_bytes(data)
    status, out, err = run("estimate", "", "--config", str(tmp_path / "config.json"))
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "status"), [("BuildError", 2), ("TraceError", 3), ("DeviceError", 4), ("JobError", 1)]
)
def test_exit_status_is_the_errors_own(run, kind, status):
    found, out, err = run("estimate", f"arch=torchvision:{kind.lower()}", function="tests.test_cli:fail")
    assert (found, out) == (status, "")
    assert err == "sizer: it went?[31m wrong; try again\n"


def fail(job: dict, progress) -> dict:
    """Work that raises the error its architecture names, with a control character in its text."""
    from sizer.base import errors

    name = parse_query(job["query"]).name
    kind = next(kind for key, kind in vars(errors).items() if key.lower() == name)
    raise kind("it went\x1b[31m wrong", todo="try again")


# --------------------------------------------------------------------------------------------------------------- lists


def test_gpus_lists_the_catalogue(run):
    status, out, _ = run("gpus")
    assert status == 0
    assert any(line.startswith("a100-80gb ") for line in out.splitlines())
    assert out.splitlines()[0].split()[:3] == ["key", "name", "maker"]
    assert out.splitlines()[-1].endswith("its compute capability: gpu=custom:24GiB@8.9")
    rows = json.loads(run("gpus", "--json")[1])["gpus"]
    assert {"t4", "h100-80gb", "cpu"} <= {row["key"] for row in rows}
    assert {"NVIDIA", "AMD", "Intel", "Apple"} < {row["maker"] for row in rows}
    assert all(isinstance(row["total_bytes"], int) for row in rows)


def test_models_lists_presets_and_what_packages_build(run):
    function = "tests.service.scripted:run"
    status, out, _ = run("models", function=function)
    assert status == 0
    assert any(line.split()[:2] == ["torchvision:resnet50", "resnet"] for line in out.splitlines())
    data = json.loads(run("models", "--json", function=function)[1])
    assert data["torchvision"] == data["timm"] == [{"name": "resnet50", "family": "resnet"}]
    assert any(line.split()[:2] == ["timm:resnet50", "resnet"] for line in out.splitlines())
    preset = next(row for row in data["presets"] if row["key"] == "llama-3.1-8b")
    assert preset["published_parameters"] == preset["parameters"] == 8_030_261_248
    # the hub counts Qwen3-1.7B's output layer, which is the embedding once more
    assert any(line.split() == ["hf:qwen3-1.7b", "Qwen", "1.72", "B"] for line in out.splitlines())
    for row in data["presets"]:
        assert parse_query(f"arch=hf:{row['key']}").name == row["key"]


def test_devices_lists_the_cpu_and_meta(run):
    status, out, err = run("devices", "--json")
    assert (status, err) == (0, "")
    rows = {row["device"]: row for row in json.loads(out)["devices"]}
    assert rows["cpu"]["total_bytes"] > 2**30
    assert rows["meta"]["total_bytes"] is None
    assert all({"device", "name", "total_bytes", "capability"} <= set(row) for row in rows.values())


# ---------------------------------------------------------------------------------------------------------------- text


def test_table_aligns_names_left_and_numbers_right():
    assert list(format_table(("key", "size"), [("a", "100"), ("long", "2")])) == [
        "key   size",
        "a      100",
        "long     2",
    ]


def test_text_of_a_report_moves_no_cursor():
    import dataclasses

    report = report_for(parse_query(QUERY))
    report = dataclasses.replace(report, notes=("a\x1b[2Jb\rc",))
    assert "Note: a?[2Jb?c" in format_report(report)


def test_program_ends_quietly_when_nobody_reads_on():
    command = f"{sys.executable} -m sizer gpus | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("key")
    assert done.stderr == ""


# ------------------------------------------------------------------------------------------------- with the real torch


def test_program_estimates_a_real_model():
    command = [
        sys.executable,
        "-m",
        "sizer",
        "estimate",
        "arch=torchvision:squeezenet1_1&dtype=float32&batch=1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    report = Report.from_dict(json.loads(done.stdout))
    assert report.model.parameters == 1_235_496  # torchvision's own figure for SqueezeNet1_1_Weights
    assert report.estimates[0].weights_bytes == 4 * 1_235_496


# ---------------------------------------------------------------------------------------------------------- the package


@pytest.mark.parametrize(("batch", "status"), [(1, 0), (65_536, 5)])
def test_program_fails_unless_all_fits(batch: int, status: int):
    query = f"arch=torchvision:resnet18&mode=inference&dtype=bfloat16&batch={batch}&gpu=t4"
    run = subprocess.run(
        [sys.executable, "-m", "sizer", "estimate", query, "--json", "--fail-unless-fits"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stderr) == (status, "")
    assert json.loads(run.stdout)["estimates"][0]["fits"] is (status == 0)


def test_package_has_a_version():
    assert sizer.__version__.count(".") == 2


def test_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"sizer {sizer.__version__}\n"


def help_of(capsys, *arguments: str) -> list[str]:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*arguments, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    return lines


def test_help_lists_the_keys_with_what_they_take(capsys):
    lines = help_of(capsys)
    for key in query_keys():
        (line,) = (line for line in lines if line.startswith(f"  {key.name} "))
        assert key.allowed.split()[0] in line
    assert "(default: a100-80gb)" in " ".join(" ".join(lines).split())


def test_help_lists_a_flag_for_each_key(capsys):
    text = "\n".join(help_of(capsys, "estimate"))
    for key in query_keys():
        if key.name not in ("v", "arch"):
            assert re.search(rf"^  --{key.name.replace('_', '-')} ?(VALUE|, --no-|,|$)", text, re.MULTILINE), key.name


@pytest.mark.parametrize(
    ("flags", "query"),
    [
        (("resnet50", "--gpu", "rtx-4090", "--batch", "1,8"), "arch=torchvision:resnet50&gpu=rtx-4090&batch=1,8"),
        (("hf:gpt2", "--checkpointing", "--seq", "64"), "arch=hf:gpt2&checkpointing=1&seq=64"),
        (("hf:gpt2&dtype=bfloat16", "--no-checkpointing"), "arch=hf:gpt2&dtype=bfloat16"),
        (
            ("hf:gpt2", "--train", "adapter", "--adapter-dropout", "0.1", "--targets", "c_attn,c_proj"),
            "arch=hf:gpt2&train=adapter&adapter_dropout=0.1&targets=c_attn,c_proj",
        ),
    ],
)
def test_flags_ask_the_question_that_a_query_asks(run, flags, query):
    status, out, err = run("estimate", *flags)
    assert (status, err) == (0, "")
    assert out.partition(LINK)[2] == format_query(parse_query(query)) + "\n"


def test_a_key_is_given_once_as_a_flag_or_in_the_query(run):
    status, out, err = run("estimate", "hf:gpt2&seq=8", "--seq", "9")
    assert (status, out) == (2, "")
    assert err.startswith("sizer: seq: given the key more than once")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("gpt2", "--chekpointing"), "unrecognized arguments: --chekpointing; did you mean --checkpointing"),
        (("gpt2", "--batchs=2"), "did you mean --batch"),
        (("gpt2", "--batch-size", "4"), "unrecognized arguments: --batch-size 4; write --batch 4"),
        (("gpt2", "--gradient-checkpointing"), "unrecognized arguments: --gradient-checkpointing; write --checkpointing"),
        (("gpt2", "--qlora"), "unrecognized arguments: --qlora; write --train adapter --weights nf4"),
        (("gpt2", "batch=4"), "unrecognized arguments: batch=4; write --batch 4"),
        (("--model", "gpt2"), "unrecognized arguments: --model; write the name of the model alone"),
        (("gpt2", "--xyz", "1"), "unrecognized arguments: --xyz 1; see `python -m sizer estimate --help`"),
    ],
)
def test_a_flag_that_is_not_there_is_answered_by_the_nearest(run, flags, words):
    status, out, err = run("estimate", *flags)
    assert (status, out) == (2, "")
    assert words in err


def test_lengths_are_written_as_people_write_them(run):
    _, out, _ = run("estimate", "hf:gpt2", "--seq", "0.5k", "--dtype", "float32", "--batch", "1")
    assert "seq=512&" in f"{out.partition(LINK)[2].strip()}&"


def test_keyword_arguments_ask_the_question_that_a_query_asks():
    query = "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=1,2&image=64&checkpointing=1"
    asked = sizer.estimate("resnet18", dtype=("float32", "bfloat16"), batch=[1, 2], image=64, checkpointing=True, gpu=None)
    assert asked == sizer.estimate(query)
    with pytest.raises(RequestError, match=r"'optimiser=sgd'.*optimizer"):
        sizer.estimate("resnet18", optimiser="sgd")


def test_every_key_says_what_it_takes_and_its_default():
    assert tuple(key.name for key in query_keys()) == tuple(KEYS)
    assert [key.name for key in query_keys() if not key.default] == ["arch"]
    assert all(key.allowed for key in query_keys())


def test_the_name_alone_is_understood(run):
    status, out, _ = run("estimate", "resnet50&dtype=float32&batch=1,32")
    assert status == 0
    assert out == run("estimate", "arch=torchvision:resnet50&dtype=float32&batch=1,32")[1]


def test_the_headline_and_the_advice_are_those_of_the_focus(run):
    out = run("estimate", f"{QUERY}&focus=bfloat16:1")[1]
    estimate = report_for(parse_query(QUERY)).find("bfloat16", 1)
    assert f"in bfloat16 at batch 1 needs {format_bytes(estimate.process_bytes)} for the process" in out
    assert "It fits: " in out and " stay free on the A100 (40 GB)." in out
    assert "In memory at the peak, batch 1:" in out


def test_a_table_that_is_too_wide_goes_on_below():
    header, rows = ("name", "first", "second"), [("a", "1", "2"), ("b", "3", "4")]
    assert list(format_table(header, rows, width=11)) == [
        "name  first", "a         1", "b         3",
        "name  second", "a          2", "b          4",
    ]  # fmt: skip
    assert list(format_table(header, rows, width=19)) == list(format_table(header, rows))
    assert len(list(format_table(header, rows, width=1))) == 6, "one column at least"


def test_a_report_is_as_wide_as_its_terminal():
    report = report_for(parse_query("arch=torchvision:resnet50"))
    tables = format_report(report, 60).partition("In memory at the peak")[2].partition("peak of")[0]
    assert max(map(len, tables.splitlines())) <= 60 < max(map(len, format_report(report).splitlines()))


@pytest.mark.parametrize(
    ("asked", "lines", "width"),
    [
        (levers_for, format_levers, 45),
        (limits_for, format_limits, 40),
        (devices_for, format_devices, 50),
        (ranks_for, format_ranks, 66),
        (served_devices_for, format_devices, 70),
        (served_ranks_for, format_ranks, 70),
    ],
)
def test_the_table_of_a_decision_is_as_wide_as_its_terminal(asked, lines, width):
    found = asked("arch=torchvision:resnet18&dtype=float32&batch=8")
    whole, narrow = (list(takewhile(str.strip, dropwhile(_is_no_table, lines(found, size)))) for size in (None, width))
    assert max(map(len, narrow)) <= width < max(map(len, whole))
    assert {word for line in narrow for word in line.split()} == {word for line in whole for word in line.split()}


def _is_no_table(line: str) -> bool:
    return "  " not in line.strip()


def test_a_lever_without_an_answer_has_its_reason_in_full():
    found = levers_for("arch=torchvision:resnet18&dtype=float32&batch=8")
    reason = f"{'why ' * 40}not"
    found = replace(found, rows=(replace(found.rows[0], cell=None, reason=reason), *found.rows[1:]))
    assert f"{found.rows[0].title}: {reason}" in list(format_levers(found))


def test_devices_without_an_answer_have_their_reason_in_full_and_once():
    found = devices_for("arch=torchvision:resnet18&dtype=float32&batch=8")
    reason, (first, second, *others) = f"{'why ' * 40}not", found.rows
    found = replace(found, rows=(*(replace(row, cell=None, reason=reason) for row in (first, second)), *others))
    assert f"{first.gpu}, {second.gpu}: {reason}" in list(format_devices(found))


def test_a_largest_batch_that_nobody_has_looked_for_yet_is_not_none():
    found = devices_for("arch=torchvision:resnet18&dtype=float32&batch=8")
    row = found.rows[0]
    assert row.batch is None
    assert any(one.startswith(row.gpu) and one.endswith("none") for one in format_devices(found))
    unsearched = replace(found, rows=(replace(row, searched=False),))
    assert any(one.startswith(row.gpu) and one.endswith("not known yet") for one in format_devices(unsearched))


class _Stopped:
    """A client whose job of limits is stopped when some are known."""

    def submit_limits(self, query: str) -> _Stopped:
        return self

    partial, progress = limits_for("arch=torchvision:resnet18&dtype=float32&batch=1"), ""

    def result(self, timeout: float) -> None:
        raise TimeLimitError("the job was stopped after 120 s (wall clock)", todo="try a smaller model")

    def close(self) -> None:
        pass


def test_what_a_job_had_found_is_printed_though_it_was_stopped(capsys):
    status = main(["limits", "resnet18&dtype=float32&batch=1"], make_client=_Stopped)
    shown = capsys.readouterr()
    assert status == JobError.exit_status != 0
    assert "Largest batch" in shown.out
    assert "stopped after 120 s" in shown.err and "the same command continues" in shown.err


class _Asked:
    """A client that is asked for levers, whose job fails at once."""

    def __init__(self) -> None:
        self.compiles: list[bool] = []

    def submit_levers(self, query: str, *, compiles: bool) -> None:
        self.compiles.append(compiles)
        raise JobError("not answered")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("flags", "compiles"), [((), False), (("--with-compiled",), True)])
def test_levers_compile_eager_code_if_asked_to(flags, compiles):
    client = _Asked()
    assert main(["levers", "resnet18&dtype=float32&batch=1", *flags], make_client=lambda: client) == JobError.exit_status
    assert client.compiles == [compiles]


@pytest.mark.parametrize(("part", "stops"), [(None, False), (STOPS, True)])
def test_a_job_of_an_estimate_is_told_whether_it_may_stop(part, stops, monkeypatch):
    query, found = "arch=torchvision:resnet18&dtype=float32&batch=1", []

    class Estimator:
        def __init__(self, request, *, stops, **rest):
            found.append(stops)

        def reports(self):
            yield report_for(parse_query(query))

    monkeypatch.setattr("sizer.estimating.estimator.Estimator", Estimator)
    TASKS["estimate"]({"task": "estimate", "query": query, "config_text": None, "part": part, "kept": []}, mock.MagicMock())
    assert found == [stops]


@pytest.mark.parametrize(("part", "compiles"), [(None, False), (COMPILED, True)])
def test_a_job_of_levers_is_told_whether_to_compile(part, compiles, monkeypatch):
    query, found = "arch=torchvision:resnet18&dtype=float32&batch=1", []

    def levers(request, *, compiles, **rest):
        found.append(compiles)
        yield levers_for(query)

    monkeypatch.setattr("sizer.decision.levers.levers", levers)
    TASKS["levers"]({"task": "levers", "query": query, "config_text": None, "part": part, "kept": []}, mock.MagicMock())
    assert found == [compiles]


def test_the_path_of_a_config_is_read_as_config_is(run, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in LLAMA.items()))
    monkeypatch.chdir(tmp_path)
    asked = ("--batch", "1", "--dtype", "float32", "--json")
    expected = run("estimate", "", "--config", "model/config.json", *asked)
    for given in ("model/config.json", str(tmp_path / "model"), "model", "model.yaml"):
        assert run("estimate", given, *asked) == expected
    assert run("estimate", "model&batch=1&dtype=float32", "--json") == expected
    status, _, err = run("estimate", "nothere.json")
    assert status == 2
    assert "config file cannot be read" in err


def test_a_question_in_words_is_asked(capsys):
    options = parse_options(["estimate", "serve qwen3 8b on 2 l4s", "--max-model-len", "8k"])
    assert query_of(options) == "arch=hf:qwen3-8b&mode=serve&gpu=l4&tp=2&max_model_len=8k"
    assert "read as a question in words" in capsys.readouterr().err
    with pytest.raises(RequestError, match="allowed a query, or a question that names a model, and a task or a device"):
        query_of(parse_options(["estimate", "is llama 3.1 8b good"]))
