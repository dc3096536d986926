"""Run vLLM's sampler by one of its paths over the null driver, and print the bytes that it allocates at its peak.

With REJECTION, run the sampler that verifies drafted tokens.

python -m tests.null_driver.samplers PATH ROWS VOCABULARY PROGRAMS [REJECTION]
"""

from __future__ import annotations

import json
import sys

import torch

from sizer.estimating.server_profile import DTYPE, RejectionSampler, Sampler


def main(path: str, rows: int, vocabulary: int, programs: int, rejection: str = "") -> None:
    """Print the peak of the first run, beside the head and the hidden states."""
    plain = Sampler(path, 1, vocabulary, programs)
    module = (RejectionSampler(path, 1, vocabulary, programs, rejection) if rejection else plain).to("cuda", DTYPE)
    hidden = torch.zeros(rows, 1, dtype=DTYPE, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        module(hidden)
    print(json.dumps(torch.cuda.max_memory_allocated() - before))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
