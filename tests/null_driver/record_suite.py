"""Records the cases of a GPU over the null driver, those that are not there yet.

    python -m tests.null_driver.record_suite GPU

writes to tests/null_driver/recorded/GPU-TORCH/, a process a case. What does not run is named, and its reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from sizer.catalogue.hardware import HARDWARE
from sizer.device.suite.cases import Case, list_cases
from tests.null_driver.build import null_environment

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
RECORDED = Path(__file__).parent / "recorded"
ROOT = RECORDED.parent.parent.parent

# All cases of the suite on an H100; on the others a choice that the device can hold, and depthwise convolutions in half precision,
# for which cuDNN compiles engines at run time.
_DEPTHWISE = {
    name: Case(name=name, query=f"arch=torchvision:{model}&batch={batch}&dtype={dtype}")
    for name, model, batch, dtype in (
        ("mobilenet_v2-b32-float16", "mobilenet_v2", 32, "float16"),
        ("efficientnet_b0-b32-amp-float16", "efficientnet_b0", 32, "amp-float16"),
        ("convnext_tiny-b32-bfloat16", "convnext_tiny", 32, "bfloat16"),
    )
}
_CHOICES = {
    "t4": (
        "resnet18-b32-float32", "resnet50-b32-float32", "resnet50-b64-float32-inference", "vgg16-b32-float32-sgd",
        "mobilenet_v2-b64-float32-rmsprop", "swin_t-b32-amp-float16", "bert-base-uncased-b8-float32", "gpt2-b4-amp-float16",
        "mobilenet_v2-b32-float16", "efficientnet_b0-b32-amp-float16",
    ),
    "rtx-3060-12gb": (
        "resnet50-b32-float32", "resnet50-b32-bfloat16", "mobilenet_v2-b64-float32-rmsprop", "densenet121-b32-float32",
        "regnet_y_400mf-b64-float32-sgd-momentum", "vit_b_16-b32-float32", "gpt2-b4-bfloat16", "convnext_tiny-b32-bfloat16",
    ),
    "rtx-4090": (
        "resnet50-b128-float32", "resnet50-b32-amp-bfloat16", "efficientnet_b0-b64-amp-bfloat16", "convnext_tiny-b64-float32",
        "inception_v3-b32-float32", "llama-1b-b2-bfloat16", "mobilenet_v2-b32-float16", "convnext_tiny-b32-bfloat16",
    ),
    "a100-40gb": (
        "resnet50-b128-float32", "resnet50-b32-bfloat16", "vgg16-b32-float32-sgd", "mobilenet_v2-b64-float32-rmsprop",
        "deeplabv3_resnet50-b4-float32", "fcn_resnet50-b8-bfloat16-inference", "gpt2-b4-bfloat16",
        "efficientnet_b0-b32-amp-float16", "convnext_tiny-b32-bfloat16", "detr-resnet-50-b2-float32",
    ),
}  # fmt: skip
_OTHERS = {
    name: Case(name=name, query=f"{query}&dtype=float32")
    for name, query in (
        ("detr-resnet-50-b2-float32", "arch=hf:detr-resnet-50&batch=2"),
        ("resnet18-b32-float32-expandable", "arch=torchvision:resnet18&batch=32&expandable=1"),
    )
}


# Detection's boxes are computed values, and wav2vec2 leaves out layers at random.
_NOT = {case.name for case in list_cases() if case.name.startswith(("fasterrcnn", "ssdlite", "wav2vec2"))}
# Adapters, quantized weights, bitsandbytes' optimizers, generations and ranks have tests of their own over the null driver.
_NOT |= {
    case.name
    for case in list_cases()
    if case.ranks > 1 or re.search("&(train|weights|new|optimizer=adamw-8bit)", case.query)
}


def cases_of(gpu: str) -> tuple[Case, ...]:
    """What is recorded for a GPU, by key of the catalogue."""
    every = {case.name: case for case in list_cases() if case.name not in _NOT} | _DEPTHWISE | _OTHERS
    return tuple(every.values()) if gpu not in _CHOICES else tuple(every[name] for name in _CHOICES[gpu])


def record(gpu: str) -> None:
    """Records what is missing for a GPU with the installed PyTorch."""
    folder = RECORDED / f"{gpu}-{'.'.join(version('torch').split('.')[:2])}"
    folder.mkdir(parents=True, exist_ok=True)
    # the management library is there for the cases that need it alone: what it knows would count as the process
    expandable = {**os.environ, **null_environment(HARDWARE[gpu]), **EXPANDABLE}
    usual = {**os.environ, **null_environment(HARDWARE[gpu]), "NULL_MANAGEMENT": "0"}
    for case in cases_of(gpu):
        if (folder / f"{case.name}.json").exists():
            continue
        command = [
            sys.executable,
            "-m",
            "tests.null_driver.record",
            f"{case.query}&gpu={gpu}",
            str(folder),
            case.name,
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=expandable if "expandable=1" in case.query else usual,
            capture_output=True,
            text=True,
        )
        failure = json.loads(done.stdout.splitlines()[-1])["failure"] if done.stdout else done.stderr[-500:]
        print(case.name, failure or "recorded", flush=True)


if __name__ == "__main__":
    record(sys.argv[1])
