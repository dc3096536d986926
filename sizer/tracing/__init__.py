"""From a blueprint to a tape: the step runs on meta tensors, and every allocation and release is logged.

    Blueprint ──build──► module on meta ──trace──► Recorder (a dispatch mode, by the Rules of a Device) ──► Tape

    operator_tables, device, log, modules ← values ← allocations, blocks ← meta
        ← cuda | cpu | mps_kernels ← device_rules ← recorder ← steps ← compiled ← traced_rank
        ← trace, watch, rule_texts, explain, batch_lines, depth ← token_trace ← cache_growth, generation ← rollouts

Only rooms to the right of a room may import it, also for types (`tests/tracing/test_rooms.py`). `values` has the values of
small tensors. `meta` has the differences between meta tensors and all devices. `cuda`, `cpu` and `mps_kernels` have the rules
of one kind of device; in these three, each family of operators has one module, and `device_rules` joins their tables. Find the
place of a change:

- a composite operator that a device runs with a kernel of its own: KERNELS of the family, `meta/composite.py` for all devices;
- a result with other strides or another dtype than the meta kernel's: RESULTS of the family, `meta/strides.py`;
- an operator with a result that depends on values: HANDLERS, `values/stand_ins.py`, `masks.py`, `boxes.py`;
- an operator without a meta kernel: HANDLERS, `meta/loss_operators.py`, `meta/matrix_products.py`, `cuda/recurrent.py`;
- a length that a model predicts: PREDICTED, `values/libraries.py`;
- memory inside a kernel, other than its results: ALLOCATIONS of the family;
- a workspace that a library or the GPU's size determines: a `DeferredSize` in ALLOCATIONS, resolved in KINDS,
  `cuda/size_oracle.py`;
- memory of a matrix product: WORKSPACE_USERS, `cuda/cublas.py`, and `blas_of`, `cuda/by_capability.py`;
- a size that depends on the capability only, so that devices of several share a trace: `cuda/by_capability.py`;
- dtypes that every device refuses: CHECKS, `meta/dtypes.py`; shapes, and messages of errors: `meta/refusals.py`;
- a slow meta kernel: SHORTCUTS, `meta/shortcuts.py`;
- a dtype under autocast: the lists of `meta/autocast.py`;
- the attention backend that CUDA chooses: CONDITIONS, `cuda/attention.py`;
- loading of quantized weights: `modules.py` and `trace.build_loaded`;
- operators of bitsandbytes: `meta/quantized_operators.py`, `cuda/bitsandbytes.py`, `cpu/bitsandbytes.py`;
- the rank that is traced, and its world: `traced_rank.py`;
- a schedule instead of a step's passes, and its callbacks: `traced_rank.py`;
- the layers of a deep model that are traced, and the cases in which all are: `depth.py`, `sizer/tape/unfold.py`;
- the batch sizes that are traced, and the derivation of the others: `batch_lines.py`;
- a generation, token by token: `token_trace.py`; its traced steps, and the derivation of the others: `generation.py`;
- generated completions of a training step, and their traced tokens: `rollouts.py`;
- a package that launches Triton kernels by itself: `compiled/launches.py`;
- effects of torch.compile on code, and its queries about a device: `compiled/`;
- a Python function that must be replaced while a trace runs: `trace.recording`, which enters all such contexts.
"""
