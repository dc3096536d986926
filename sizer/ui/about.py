"""Texts of the page About: the meaning of the numbers, their sources, their limits, and a tutorial on device memory."""

from __future__ import annotations

import platform

import pandas as pd
import streamlit as st

from sizer.catalogue.contexts import ANY, BYTES_PER_THREAD
from sizer.catalogue.gpus import GPUS
from sizer.service.job_memory import CONFINEMENT
from sizer.ui import service
from sizer.ui.charts import legend
from sizer.ui.focus import PEAK_KINDS
from sizer.ui.styling import COLOURS, GIBIBYTES

METHOD = """
The model is built on PyTorch's `meta` device: tensors have shapes and dtypes, but no memory. Real PyTorch code then runs
two training steps: forward pass, backward pass and optimizer. Sizer records each allocation and each release with its
operator and module, and replays the record through the rules of the device's allocator. Nothing is fitted to measurements: if you
change a layer, the numbers follow.

Sizes grow linearly with the batch. Sizer traces two batch sizes, checks a third one, and computes the others. If a model does not
grow linearly, Sizer traces each batch size by itself.
"""

CATEGORIES = """
| Category | What it counts |
|---|---|
| parameter, buffer | the model's own tensors; a tensor that several names share counts once |
| frozen parameter | weights that are not trained, if only a head or an adapter is trained |
| gradient | one per trainable parameter, in the parameter's dtype, from the first backward pass on |
| optimizer state | tensors that the optimizer creates in its first step and keeps: two per parameter for AdamW |
| activation | tensors that the forward pass saves for the backward pass |
| temporary | tensors created and released within a phase: intermediate results, copies in another dtype |
| input | the batch itself and its targets |
| workspace | scratch memory inside kernels: cuBLAS, cuDNN, attention, sorting, oneDNN |
| kv cache | keys and values, or states, of the prompt and of every generated token |
| allocator cache | memory reserved from the device but not in use at the peak: rounding and fragmentation |
| outside PyTorch | the driver's context, loaded kernels, library handles |
"""

CHECKS = """
*Measure* runs the same two steps, or the same generation, on a real device in a separate process, and reads the memory counters
after each phase. The page compares each figure with the estimate and shows the signed error: (estimated − measured) / measured.
A positive error is an estimate that was too high. If both runs recorded each allocation, the page names the first operator and
module where they differ. Out of memory is a result, too.

The ledger keeps every comparison and shows the errors on each device (median, worst, bias). It imports measurements of other
machines. The page also lists figures that others measured on GPUs and published, each with its source.
"""

LIMITS = f"""
- **One process on one device**, or one rank of several GPUs that train together. Data loading and other programs are not counted.
  The memory of NCCL is a range.
- **Kernels are chosen at run time.** cuDNN's heuristics choose each convolution's plan for the described GPU. With
  `cudnn_benchmark=1` the first step tries all plans; the fastest one is unknown. Without an installed cuDNN the workspace is a
  model, and the process range allows for it.
  Under each answer, "How this was computed" names the kernels that were assumed, and why.
- **The context is a range.** It grows with the card's multiprocessors ({BYTES_PER_THREAD // 2**10} KiB for each thread that can be
  resident) and with the kernels that get loaded. The range holds nineteen of twenty of {ANY.messages} processes that others
  published; "may not fit" means that the device's memory lies inside it, and "tight" that work fits only because the allocator
  returns cached memory to the device. Windows, and libraries that allocate beside
  PyTorch, may take more.
- **Control flow that reads values** (detection models, routing) runs on stand-in values. Each page lists them as not counted.
- **Generation** is that of transformers, token by token. A server with paged attention holds other memory: `mode=serve` plans it.
- **Compiled models** (`compile=default`, `compile=reduce-overhead`) run PyTorch's own Inductor for the described GPU.
- **Quantized weights** are counted, quantized on loading or by their checkpoint. The kernels of most checkpoint methods are not
  traced.
- **Several GPUs**: DDP, ZeRO-1, FSDP2, HSDP, tensor, context and pipeline parallel are counted, of one rank.
"""


def show_about() -> None:
    """Show the meaning of each number, the method, its limits and the wall around jobs."""
    with st.container(width=820):
        st.header("Allocated, reserved, process", anchor=False)
        for kind in PEAK_KINDS.values():
            st.markdown(f"**{kind.title}.** {kind.help}")
        st.header("How an estimate is made", anchor=False)
        st.markdown(METHOD)
        st.header("How estimates are checked", anchor=False)
        st.markdown(CHECKS)
        st.header("Memory categories", anchor=False)
        st.html(legend(COLOURS))
        st.markdown(CATEGORIES)
        st.header("What is not counted", anchor=False)
        st.markdown(LIMITS)
        st.header("How a question runs", anchor=False)
        client = service.get_client()
        _show_wall(client.missing_layers)
        if client.versions is not None:
            versions = ", ".join(f"{name} {version}" for name, version in client.versions.items())
            st.text(f"Python {platform.python_version()}; answers are made with {versions}.")
        show_tutorial()
    st.header("Devices", anchor=False)
    _show_devices()


def _show_wall(missing: dict[str, str] | None) -> None:
    """Show the limits that the kernel sets to a job. `missing` lists the layers that this machine lacks; None if not known yet."""
    st.markdown("A config is read, and its model built and traced, in a process of its own, which the kernel confines:")
    if missing is None:
        st.text("Not known yet: the job server is starting.")
        return
    for layer, what in CONFINEMENT.items():
        st.text(f"{layer}: {what}" if layer not in missing else f"{layer}: missing here ({missing[layer]})")


def _show_devices() -> None:
    number = st.column_config.NumberColumn(format="%.2f")
    st.dataframe(
        pd.DataFrame(
            {
                "Device": [gpu.name for gpu in GPUS.values()],
                "Maker": [gpu.maker for gpu in GPUS.values()],
                "Key in links": list(GPUS),
                "Memory, GB": [gpu.total_bytes / 1e9 for gpu in GPUS.values()],
                "Memory, GiB": [GIBIBYTES.of(gpu.total_bytes) for gpu in GPUS.values()],
                "Outside PyTorch, GiB": [GIBIBYTES.of(gpu.context_bytes) for gpu in GPUS.values()],
                "from": [GIBIBYTES.of(gpu.context_low_bytes) for gpu in GPUS.values()],
                "to": [GIBIBYTES.of(gpu.context_high_bytes) for gpu in GPUS.values()],
                "Where the number is from": [gpu.source for gpu in GPUS.values()],
            }
        ),
        hide_index=True,
        column_config=dict.fromkeys(("Memory, GB", "Memory, GiB", "Outside PyTorch, GiB", "from", "to"), number),
    )


# ------------------------------------------------------------------------------------------------------------- tutorial


TO = """
| Call | `module.to(device)` | `x = tensor.to(device)` |
|---|---|---|
| works | in place, and returns the module | never in place: assign what it returns |
| moves | parameters, buffers, gradients | this tensor's values |
| leaves behind | tensors and modules in plain attributes, lists, dicts; existing optimizer state | `x` itself |
| copies nothing | of tensors that are already on the device | if device and dtype are right: it is `x` |

Move the module first, then create the optimizer, and move each batch in the loop. Two ways to find tensors that were not moved:
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
A peak counts from the last `reset_peak_memory_stats()`; read it after `synchronize()`. Compare figures of one kind only: the
process holds the reserved memory and several hundred MiB for the driver's context.
"""
CHECKLIST = """
1. **Read the message.** "Tried to allocate" far above what is free: the batch or the sequence is too long. Only just above, with
   much "reserved but unallocated": fragmentation, so set `PYTORCH_ALLOC_CONF=expandable_segments:True` before starting.
2. **Look for other processes.** `nvidia-smi` lists them. A closed notebook may still hold its memory.
3. **Does it grow from step to step?** Then a reference keeps the graph alive: sum `loss.item()` or `loss.detach()`, not `loss`,
   and keep no outputs in a list.
4. **Validation out of memory, training not?** Run it under `torch.inference_mode()`.
5. **A smaller batch**, with gradient accumulation for the same result; then shorter sequences or smaller images.
6. **Mixed precision** (`torch.autocast`) halves most activations; **gradient checkpointing** trades them for time.
7. **Optimizer state**: AdamW keeps two tensors per parameter, Adafactor and SGD far less; `foreach=False` or `fused=True` spares
   the temporary copy that the default makes in `step()`.
8. **Not `empty_cache()`, not `gc.collect()`**: PyTorch has already emptied its cache before it raises the error, and a tensor is
   freed with its last reference.

*Size a model* computes whether one of these changes is enough, before you run anything.
"""


def show_tutorial() -> None:
    """Show the tutorial on device memory."""
    st.header("What `.to()` moves, and what it leaves behind", anchor=False)
    st.markdown(TO)
    st.code(PYTHON, language=None, wrap_lines=True)
    st.code(COMMAND, language=None, wrap_lines=True)
    st.header("Memory counters by backend", anchor=False)
    st.dataframe(pd.DataFrame(COUNTERS), hide_index=True)
    st.markdown(READING)
    st.header("CUDA out of memory", anchor=False)
    st.markdown(CHECKLIST)
