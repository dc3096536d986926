"""The repeated runs as Sizer ships them: `sizer/device/ledger/published.csv`, written by `bench_published --write`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch
import transformers

from sizer.catalogue.gpus import GPUS
from sizer.device.ledger.published_figures import DATA, Published
from tests.benchmarks.published.held import Held
from tests.benchmarks.published.rows import Run
from tests.benchmarks.tables import replace_rows

KEY = ("work", "gpu", "quantity", "source")
# What a case is called where its arguments do not tell.
WORKS = {
    "attention_benchmark": "training",
    "vit_finetuning": "fine-tuning ViT-L/16",
    "trainer": "BERT-large under the Trainer",
    "forward_pass": "forward pass",
    "lora_training": "LoRA training",
    "qlora_training": "QLoRA training",
    "vision_training": "training",
}
# The GPUs for which one of the catalogue with the same rules stands, by set and that one's key: README.md beside the figures.
DEVICES = {
    ("attention_tables", "rtx-3090"): "GeForce RTX 3080 Ti, laptop",
    ("attention_tables", "t4"): "GeForce RTX 2060",
    ("liger_operators", "h100-80gb"): "H100 PCIe (80 GB)",
    ("vit_large", "a100-40gb"): "not named",
}


def work_of(run: Run) -> str:
    """What was run, in a line: "training: model=opt-350m batch=1 seq=128 attention=eager"."""
    than = f", less {run.than}" if run.than else ""
    return f"{WORKS.get(run.case, run.case.replace('_', ' '))}: {run.arguments}{than}"


def shipped(one: Held) -> Published:
    """A run as it ships."""
    run = one.run
    return Published(
        work=work_of(run),
        device=DEVICES.get((run.set, run.gpu)) or GPUS[run.gpu].name,
        gpu=run.gpu,
        quantity=run.quantity,
        measured_bytes=run.figure_bytes,
        estimated_bytes=one.estimated_bytes,
        torch=run.torch,
        estimated_with=f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}",
        source=run.source,
    )


def write_shipped(held: Iterable[Held]) -> None:
    """Write the runs in the place of those that are there."""
    names = [field.name for field in fields(Published)]
    rows = [{name: str(getattr(shipped(one), name)) for name in names} for one in held]
    replace_rows(DATA, rows, KEY)
