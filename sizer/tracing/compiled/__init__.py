"""Trace code that `torch.compile` has compiled, without a device.

Dynamo and AOTAutograd trace the code over meta tensors, by the same kernels as eager mode. The joint graph is moved to "cuda:0"
before Inductor's passes and the partitioner read it, so that Inductor decides as on the described device. Its wrapper code is
kept in memory and runs on meta tensors under the recorder, which logs the wrapper's allocations and releases. Triton kernels
are never compiled. No file is written and no process is started.

    names ← answers, graphs, compile_findings, trees ← inductor ← dynamo ← install ← launches

- `names`: the private names of PyTorch that this room relies on, and the check for them;
- `answers`: torch.cuda's answers to Inductor for the described device;
- `graphs`: a graph moved from meta to the device;
- `compile_findings`: regions, graph breaks and recompilations, for the report;
- `trees`: Inductor's bookkeeping of CUDA graphs, with `mode="reduce-overhead"`;
- `inductor`, `dynamo`: the functions of PyTorch that are replaced while a step is traced, wrapper code in memory, and kernels
  that compute nothing;
- `install`: the context that installs all of this at the first call of `torch.compile`, and the compiled parts of a query;
- `launches`: Triton kernels that code launches by itself, without the compiler.

Source: torch/_dynamo, torch/_functorch and torch/_inductor, read in PyTorch 2.15.

*Known limitations*: Inductor's choices that a device makes by timing follow `inductor.TIMED`. Memory that compilation itself
takes on the device is not counted.
"""
