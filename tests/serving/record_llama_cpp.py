"""Record llama.cpp's own figures for presets (tests/measured/llama_cpp/README.md).

    python -m tests.serving.record_llama_cpp SOURCE BUILD

SOURCE is a checkout of llama.cpp, BUILD the folder of its programs, changed as the README of the figures says. A ggml-rpc-server
must listen on each of the ports 50052 to 50054. Models that llama.cpp's converter or loader does not read are named and left out.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import FILE_TYPES, NEWEST_BUILD
from sizer.serving.gguf import BLOCKS
from sizer.serving.llama_cpp import Layout
from tests.serving.logs import architecture_of
from tests.serving.test_llama_cpp import COLUMNS, FILES, FOLDER, flags_of

ADDRESS = "127.0.0.1:50052"
ADDRESSES = (ADDRESS, "127.0.0.1:50053", "127.0.0.1:50054")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"-c": 4096},
    {"-c": 32_768},
    {"-c": 16_384, "-np": 4},
    {"-c": 8192, "-ub": 2048, "-b": 2048},
    {"-c": 8192, "-ngl": 12},
    {"-c": 8192, "--n-cpu-moe": 5},
    {"-c": 8192, "--n-cpu-moe": 1},
    {"-c": 8192, "--n-cpu-moe": 99},
    {"-c": 32_768, "--n-cpu-moe": 12, "-ub": 2048, "-b": 2048},
    {"-c": 4096, "-np": 4, "--n-cpu-moe": 3},
    {"-c": 8192, "-ctk": "q8_0", "-ctv": "q8_0"},
    {"-c": 8192, "-ngl": 0},
    {"-c": 8192, "-fa": "off"},
    {"-c": 16_384, "-np": 4, "-fa": "off"},
)
OLD_BUILD = 9000  # keeps logits of all tokens, as llama-fit-params does by itself; recorded for the first of SETTINGS
_ROW = re.compile(
    r"\] (\S+)\s+- \[\s*(\d+),\s*(\d+),\s*(\d+),\s*(\d+)\], type =\s*(\S+), size =\s*[\d.]+ MiB(?: ->\s*[\d.]+ MiB \((\S+)\))?"
)


def write_header(model: str, source: Path, folder: Path) -> Path:
    """Write the file that llama.cpp's converter makes of a preset, without data, and return its path."""
    for path in (source / "gguf-py", source):
        sys.path.insert(0, str(path))
    gguf, conversion, base = map(importlib.import_module, ("gguf", "conversion", "conversion.base"))
    config = find_preset(model).config
    kind = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        module = getattr(transformers, config["architectures"][0])(kind).to(torch.bfloat16)
    text = kind.get_text_config(decoder=True)
    tied = kind.tie_word_embeddings or text.tie_word_embeddings
    state = {name: one for name, one in module.state_dict().items() if not (tied and name.endswith("lm_head.weight"))}
    state = transformers.core_model_loading.revert_weight_conversion(module, state)
    own = {key: one for key, one in config.items() if key != "text_config"}
    whole = {"n_ctx": getattr(text, "n_positions", None), **kind.to_dict(), **own}
    whole.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(whole, default=str))
    tokens = min(text.vocab_size, 262_144) if str(text.model_type).startswith("gemma3_") else text.vocab_size
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": list(range(tokens))}, "added_tokens": []}))
    named = conversion.get_model_architecture(conversion.ModelBase.load_hparams(folder, False), conversion.ModelType.TEXT)
    family = conversion.get_model_class(named)
    indexed = family.index_tensors

    def index(self: Any, remote_hf_model_id: str | None = None) -> dict[str, Any]:
        indexed(self, remote_hf_model_id)
        lazy = {name: (lambda one=one: base.LazyTorchTensor(meta=one, args=(), func=tuple)) for name, one in state.items()}
        return dict(filter(None, (self.filter_tensors(item) for item in lazy.items())))

    def vocabulary(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(tokens)

    family.index_tensors, family.set_vocab, family.no_mtp = index, vocabulary, True
    gguf.Metadata.load = staticmethod(lambda *args, **kwargs: gguf.Metadata(name="x"))
    path = folder / "model.gguf"
    made = family(folder, gguf.LlamaFileType.MOSTLY_BF16, path, dry_run=True, model_name="x")
    made.prepare_tensors()
    made.prepare_metadata(vocab_only=False)
    writer = made.gguf_writer
    writer.dry_run = False
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    sizes = [one.nbytes for shard in writer.tensors for one in shard.values()]
    with path.open("r+b") as file:  # sparse
        file.truncate(path.stat().st_size + sum(-(-size // 32) * 32 + 32 for size in sizes))
    return path


def write_matrix(source: Path, path: Path) -> None:
    """Write an importance matrix with one entry that no tensor has: its presence changes the choice of types."""
    gguf, numpy = map(importlib.import_module, ("gguf", "numpy"))
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for kind, columns in (("in_sum2", 32), ("counts", 1)):
        writer.add_tensor(f"blk.9999.ffn_up.weight.{kind}", numpy.ones((1, columns), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_rows(model: str, path: Path, matrix: Path, build: Path) -> Iterator[tuple[object, ...]]:
    """Yield the bytes of a model's file in each type."""
    for file_type in FILE_TYPES:
        own = ["--imatrix", str(matrix)] if file_type.startswith("iq") or file_type == "q2_k_s" else []
        name = "mxfp4_moe" if file_type == "mxfp4" else file_type
        done = subprocess.run([build / "llama-quantize", *own, "--dry-run", path, name], capture_output=True, text=True, check=True)
        total = 0
        for _, *sizes, before, after in _ROW.findall(done.stdout + done.stderr):
            block, size = BLOCKS[(after or before).lower()]
            total += prod(map(int, sizes)) // block * size
        yield model, file_type, total


def memory_rows(model: str, path: Path, program: Path) -> Iterator[tuple[object, ...]]:
    """Yield the bytes of a server on the remote device and on the host, for each of SETTINGS."""
    layout = Layout(architecture_of(model))
    for build, setting in [(OLD_BUILD, SETTINGS[0]), *((NEWEST_BUILD, one) for one in SETTINGS)]:
        if "--n-cpu-moe" in setting and not layout.architecture.experts:
            continue
        flags = {"-ngl": 999, "-np": 1, "-fa": "on", **setting}
        words = [str(word) for item in flags.items() for word in item]
        call = [program / "llama-fit-params", "--rpc", ADDRESS, "--fit-print", "on", "-m", path, *words]
        kept = {"LLAMA_OUTPUTS": str(flags["-np"])} if build == NEWEST_BUILD else {}
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=program, env={**os.environ, **kept})
        if done.returncode:  # such as heads of 80 elements with a quantized cache
            continue
        found = {line.split()[0]: [int(word) for word in line.split()[1:4]] for line in done.stdout.splitlines() if line}
        (weights, cells, compute), (on_host, *_) = found["RPC0"], found["Host"]
        slots, layers = flags["-np"], min(flags["-ngl"], layout.layers + 1)
        batch, experts, kv = (flags.get(name, usual) for name, usual in (("-ub", 512), ("--n-cpu-moe", 0), ("-ctk", "f16")))
        row = tuple(map(str, (flags["-c"] // slots, slots, batch, layers, experts, build, kv, int(flags["-fa"] == "on"))))
        estimated = layout.parts(flags_of(layout, dict(zip(COLUMNS, row, strict=True)))).compute
        yield model, *row, weights, on_host, cells, compute, estimated


def device_rows(model: str, path: Path, program: Path) -> Iterator[tuple[object, ...]]:
    """Yield the bytes of a server on each of several devices, for as many as two and three, and for some layers on the host."""
    layout = Layout(architecture_of(model))
    for devices, layers in ((2, layout.layers + 1), (3, layout.layers + 1), (2, 12)):
        words = ["-c", "8192", "-np", "1", "-fa", "on", "-ngl", str(layers), "-ts", ",".join("1" * devices)]
        call = [program / "llama-fit-params", "--rpc", ",".join(ADDRESSES[:devices]), "--fit-print", "on", "-m", path, *words]
        env = {**os.environ, "LLAMA_OUTPUTS": "1"}
        done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=program, env=env)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("RPC")]
        row = {"max_model_len": "8192", "slots": "1", "micro_batch": "512", "host_experts": "0", "kv": "f16"}
        asked = flags_of(layout, {**row, "layers": str(layers), "build": str(NEWEST_BUILD), "flash": "1"})
        for number, (_, *sizes) in enumerate(lines):
            parts = layout.parts_of(replace(asked, devices=devices), number)
            yield model, devices, layers, number, *sizes, parts.compute


def main() -> None:
    """Record the figures of all models in the tables."""
    source, build = map(Path, sys.argv[1:])
    models, files, memory, devices = list(FILES), [], [], []
    for model in models:
        with tempfile.TemporaryDirectory() as name:
            try:
                path = write_header(model, source, Path(name))
                write_matrix(source, Path(name) / "matrix.gguf")
                files += file_rows(model, path, Path(name) / "matrix.gguf", build)
                memory += memory_rows(model, path, build)
                devices += device_rows(model, path, build)
            except (AssertionError, KeyError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
                print(f"{model}: {type(error).__name__}: {error}", file=sys.stderr)
    for table, rows in (("files.csv", files), ("memory.csv", memory), ("devices.csv", devices)):
        with (FOLDER / table).open(encoding="utf-8") as file:
            columns = file.readline().strip().split(",")
        with (FOLDER / table).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(rows)


if __name__ == "__main__":
    main()
