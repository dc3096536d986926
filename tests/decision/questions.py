"""Questions of every kind, small enough to be asked often, on devices that they do not all fit."""

from __future__ import annotations

import json
from dataclasses import replace

from sizer.base.config_json import encode_config
from sizer.decision.cells import Cells
from sizer.estimating.estimator import estimate
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.decision import Cell, cell_of

CNN = "arch=torchvision:resnet18&image=64&dtype=float32&batch=1024&gpu=custom:3GiB@8.9"
VISION = "arch=torchvision:vit_b_32&dtype=bfloat16&batch=4&gpu=rtx-4090"
DETECTION = "arch=torchvision:ssdlite320_mobilenet_v3_large&dtype=float32&batch=2&gpu=t4"
# has events for each sample of the batch
FOR_EACH_SAMPLE = "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn&dtype=float32&batch=1&gpu=custom:2GiB@8.0"
# not affine in the batch: each batch size is traced by itself
_LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024}
TRACED_EACH = f"arch=config:{encode_config(json.dumps(_LLAMA))}&seq=2048&pp=2&rank=1&dtype=float32&batch=256&microbatch=128"
SERVED = "arch=hf:gpt2&seq=128&mode=inference&dtype=float16&batch=256&gpu=custom:3GiB@7.5"

# GPT-2 with two of its twelve layers: 53.6 M parameters, most of them embeddings.
TWO_LAYERS = "arch=config:" + encode_config('{"model_type": "gpt2", "n_layer": 2}')
LANGUAGE = f"{TWO_LAYERS}&seq=256&dtype=float32&batch=2&gpu=custom:2GiB@8.0"
# 608 M parameters, whose weights and gradients in half precision are 2.3 GiB, and 1.4 B, whose weights alone are 2.6 GiB
WIDE = '{"model_type": "gpt2", "n_layer": %d, "n_embd": 4096, "n_head": 32}'
ADAPTED = f"arch=config:{encode_config(WIDE % 2)}&seq=64&dtype=float32&batch=2&gpu=custom:2.5GiB@8.0"
TOO_LARGE = f"arch=config:{encode_config(WIDE % 6)}&seq=64&dtype=float32&batch=2&gpu=custom:2GiB@8.0"

AT_ONCE = f"{TWO_LAYERS}&seq=256&mode=inference&dtype=float32&batch=64&gpu=custom:2GiB@8.0"

# more of them: tests/benchmarks/prove_decision.py
IN_TESTS = {"CNN": CNN, "language model": LANGUAGE, "inference": AT_ONCE}


def anew(query: str) -> Cell:
    """The figures that asking a question of one dtype and batch size anew gives, in the way that the page and `estimate` ask it."""
    (row,) = estimate(parse_query(query)).estimates
    return cell_of(row)


def fits_by_its_own_trace(query: str, **changes) -> object:
    """Whether a question fits, by one trace at its own batch size and no line through others; changed in some fields."""
    request: Request = replace(parse_query(query), **changes)
    return Cells(request).fits(request)
