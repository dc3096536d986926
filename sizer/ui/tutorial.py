"""What moves to a device, which counter says what of its memory, and what to do when it runs out."""

from __future__ import annotations

import pandas as pd
import streamlit as st

TO = """
| | `module.to(device)` | `x = tensor.to(device)` |
|---|---|---|
| works | in place, and returns the module | never in place: assign what it returns |
| moves | parameters, buffers, gradients | this tensor's values |
| leaves behind | tensors and modules in plain attributes, lists, dicts; optimizer state that exists | `x` itself |
| copies nothing | of what is there already | if device and dtype are right: it is `x` |

Move the module first, then make the optimizer, and move each batch in the loop. Two ways to find what was forgotten, before it
bites:
"""
PYTHON = "import sizer\n\nfor finding in sizer.check_placement(model, (batch,)).findings:\n    print(finding.what, finding.where)"
COMMAND = 'python -m sizer placement "arch=hf:gpt2"'
COUNTERS = {
    "What": ["in tensors now", "its peak", "reserved by PyTorch", "held by the process", "free on the device"],
    "CUDA, ROCm": [
        "torch.cuda.memory_allocated()",
        "torch.cuda.max_memory_allocated()",
        "torch.cuda.memory_reserved()",
        "nvidia-smi",
        "torch.cuda.mem_get_info()[0]",
    ],
    "MPS": [
        "torch.mps.current_allocated_memory()",
        "no counter",
        "part of Metal's figure",
        "torch.mps.driver_allocated_memory()",
        "not reported",
    ],
    "CPU": ["no counter", "no counter", "nothing is reserved", "resident memory", "MemAvailable in /proc/meminfo"],
}
READING = """
A peak counts from the last `reset_peak_memory_stats()`; read it after `synchronize()`. Compare like with like: the process holds
what is reserved and some hundred MiB for the driver's context.
"""
CHECKLIST = """
1. **Read the message.** "Tried to allocate" far above what is free: the batch or the sequence is too long. Only just above, with
   much "reserved but unallocated": fragmentation, so set `PYTORCH_ALLOC_CONF=expandable_segments:True` before starting.
2. **See who else is there.** `nvidia-smi` lists the processes; a notebook that was closed may still hold its memory.
3. **Does it grow from step to step?** Then something keeps the graph alive: add up `loss.item()` or `loss.detach()`, not `loss`;
   keep no outputs in a list.
4. **Validation out of memory, training not?** Run it under `torch.inference_mode()`.
5. **A smaller batch**, with gradient accumulation for the same result; then shorter sequences or smaller images.
6. **Mixed precision** (`torch.autocast`) halves most activations; **gradient checkpointing** trades them for time.
7. **Optimizer state**: AdamW keeps two tensors per parameter, Adafactor and SGD far less; `foreach=False` or `fused=True` spares
   the temporary copy that the default makes in `step()`.
8. **Not `empty_cache()`, not `gc.collect()`**: PyTorch has tried the first before it gave up, and tensors die by counting.

Whether one of these would be enough is what *Size a model* computes, before anything runs.
"""


def show_tutorial() -> None:
    """Show what is to be known of memory on any device."""
    st.header("What `.to()` moves, and what it leaves behind", anchor=False)
    st.markdown(TO)
    st.code(PYTHON, language=None)
    st.code(COMMAND, language=None)
    st.header("Memory counters by backend", anchor=False)
    st.dataframe(pd.DataFrame(COUNTERS), hide_index=True)
    st.markdown(READING)
    st.header("CUDA out of memory", anchor=False)
    st.markdown(CHECKLIST)
