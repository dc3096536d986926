"""Answer small questions before any job is forked: what PyTorch and this package prepare once is then there for all jobs.

The first trace of a process fills caches of operators, and writes to 65 MiB of memory that a forked job would copy.
"""

from __future__ import annotations

from contextlib import suppress

from sizer.base.errors import SizerError
from sizer.query.text import parse_query

# One of the smallest models of each kind, in the dtypes that take other ways through autocast and the gradient scaler.
QUESTIONS = (
    "arch=torchvision:squeezenet1_1&dtype=float32,bfloat16,amp-float16&batch=1,2&image=64",
    "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32&batch=1&image=64",
    "arch=hf:gpt2&dtype=bfloat16&batch=1&seq=16",
)


def warm() -> None:
    """Answer each question, or leave it: a package that is not installed is no reason to run no job."""
    from sizer.estimating.estimator import estimate  # imports torch: only the job server calls this

    for question in QUESTIONS:
        with suppress(SizerError):
            estimate(parse_query(question))
