"""From a blueprint to a tape: the step runs on meta tensors, and every allocation and release is written down.

    Blueprint ──build──► module on meta ──trace──► Recorder (a dispatch mode, by the Rules of a Device) ──► Tape

    operator_tables, device, log, modules ← values ← allocations, blocks ← meta
        ← cuda | cpu | mps_kernels ← device_rules ← recorder ← steps ← compiled ← traced_rank
        ← trace, watch, rule_texts, explain, batch_lines, depth ← token_trace ← cache_growth, generation ← rollouts

Each room is imported by those to the right of it alone, for types too (`tests/tracing/test_rooms.py`). `values` knows what small
tensors would hold, `meta` is what meta tensors do differently from every device, `cuda`, `cpu` and `mps` what one kind of device
does. In these three an operator's family has one module, whose tables `device_rules` joins. Where does a change belong?

- a composite operator that a device runs with a kernel of its own: KERNELS of the family, `meta/composite.py` for all devices;
- a result with other strides or another dtype than the meta kernel's: RESULTS of the family, `meta/strides.py`;
- an operator whose result depends on values: HANDLERS, `values/stand_ins.py`, `masks.py`, `boxes.py`;
- an operator without a meta kernel: HANDLERS, `meta/sequence_losses.py`, `meta/matrix_products.py`, `cuda/recurrent.py`;
- a length that a model predicts: PREDICTED, `values/lengths.py`;
- what a kernel holds beside its results: HELD of the family;
- a workspace that a library or the GPU's size decides: a `DeferredSize` in HELD, resolved in KINDS, `cuda/size_oracle.py`;
- what a matrix product holds: WORKSPACE_USERS, `cuda/cublas.py`, and `blas_of`, `cuda/by_capability.py`;
- a size that goes by the capability alone, so that devices of several share a trace: `cuda/by_capability.py`;
- dtypes that every device refuses: CHECKS, `meta/dtypes.py`; shapes, and the words of errors: `meta/refusals.py`;
- a slow meta kernel: SHORTCUTS, `meta/shortcuts.py`;
- a dtype under autocast: the lists of `meta/autocast.py`;
- which attention backend CUDA chooses: CONDITIONS, `cuda/attention.py`;
- how quantised weights come to the device: `modules.py` and `trace.build_loaded`;
- what an operator of bitsandbytes does: `meta/quantized_operators.py`, `cuda/bitsandbytes.py`, `cpu/bitsandbytes.py`;
- which rank of several is traced, and in which world: `traced_rank.py`;
- what a schedule does in the place of a step's passes, and when it is told: `traced_rank.py`;
- which layers of a deep model are traced, and when all are: `depth.py`, `sizer/tape/unfold.py`;
- which batch sizes are traced, and how the others follow from them: `batch_lines.py`;
- how a generation is traced token by token: `token_trace.py`; which of its steps are, and how the others follow: `generation.py`;
- how completions of a training step are generated, and which of their tokens are traced: `rollouts.py`;
- a package that launches Triton kernels by itself: `compiled/launches.py`;
- what torch.compile does of code, and what it may ask of a device: `compiled/`;
- a Python function that must be replaced while a trace runs: `trace.recording`, which enters all such contexts.
"""
