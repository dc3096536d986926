"""Forms of parallel training: PyTorch's own, pipeline schedules, and the memory that communication takes on each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sizer.catalogue.gpus import Gpu

PER_HOST = 8  # GPUs of one machine; a launcher sets LOCAL_RANK to a rank's number among them

# GPU memory of one NCCL communicator: the smallest, one of 8 H100, and a third of 6 GB measured for three.
NCCL_OF_TWO_BYTES = 544 * 10**6
NCCL_BYTES = (688 * 10**6, 1_060 * 10**6, 2_000 * 10**6)

PIPELINE_KEYS = ("pp", "schedule", "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """One value of `parallel=`.

    - `shards`: the weights are sharded over the ranks. `communicators`: NCCL communicators of each rank. `keys`: its query
      keys.
    - `infers`: it applies to inference too. `generates`: it applies to generation.
    - `quantized`: it supports a model that was quantized on load. `splits_fp8`: it shards FP8 weights.
    - `takes_recipes`: its ranks can train by recipes of other libraries' trainers.
    """

    key: str
    title: str
    shards: bool = False
    infers: bool = False
    generates: bool = False
    quantized: bool = False
    splits_fp8: bool = False
    takes_recipes: bool = False
    communicators: int = 1
    keys: tuple[str, ...] = ("ranks", "rank")


_SPLIT = ("tp", "sp", "lp")  # keys of tensor parallel: the degree, and whether to split sequence and loss, too

_ROWS = (
    Parallel(key="none", title="One GPU", quantized=True, takes_recipes=True, communicators=0, keys=()),
    Parallel(key="ddp", title="DDP", quantized=True, takes_recipes=True, keys=("ranks", "cp", *PIPELINE_KEYS, "rank")),
    Parallel(key="zero1", title="ZeRO-1", quantized=True, takes_recipes=True),
    Parallel(
        key="fsdp",
        title="FSDP2",
        shards=True,
        takes_recipes=True,
        infers=True,
        keys=("ranks", "reshard", "offload", *_SPLIT, "cp", *PIPELINE_KEYS, "rank"),
    ),
    Parallel(
        key="hsdp",
        title="HSDP",
        shards=True,
        takes_recipes=True,
        infers=True,
        communicators=2,
        keys=("ranks", "replicate", "reshard", "offload", *_SPLIT, "cp", "rank"),
    ),
    Parallel(
        key="tp", title="Tensor parallel", infers=True, generates=True, splits_fp8=True, keys=(*_SPLIT, "rank")
    ),
    Parallel(key="pp", title="Pipeline parallel", keys=("tp", *PIPELINE_KEYS, "rank")),
)


def takes_weights(parallel: str, method: str) -> bool:
    """Return True if this way of working together takes weights that are quantized by a method, a `quant_method`."""
    row = PARALLELS[parallel]
    return row.quantized or (row.splits_fp8 and method == "fp8")


def ways_to_split(*, sp: bool, lp: bool) -> str:
    """Return the split dimensions of ranks that share a batch, in words."""
    ways = ["tensor", *(["sequence"] if sp else []), *(["loss"] if lp else [])]
    return f"{' and '.join((', '.join(ways[:-1]), ways[-1])) if ways[1:] else ways[0]} parallel"


PARALLEL_KEYS = ("parallel", "ranks", "replicate", "reshard", "offload", *_SPLIT, "cp", *PIPELINE_KEYS, "rank")
PARALLELS: dict[str, Parallel] = {row.key: row for row in _ROWS}

# Names of other libraries' methods: the equivalent key to use instead, and why.
_DEEPSPEED = (
    "DeepSpeed runs in your own script: sizer run --gpu h100-80gb -- deepspeed --num_gpus 8 train.py --deepspeed config.json"
)
OTHER_NAMES = {
    "fsdp1": "ask for fsdp, which is FSDP2; sizer.size_step takes code that has FSDP1",
    "fsdp2": "ask for fsdp",
    "zero2": f"{_DEEPSPEED}. The nearest is parallel=fsdp&reshard=0, which needs less: in its step DeepSpeed "
    "keeps the whole 16-bit model in addition to float32 shards and buckets",
    "zero3": f"{_DEEPSPEED}. The nearest is parallel=fsdp, without float32 copies of 16-bit weights and buckets",
    "deepspeed": f"{_DEEPSPEED}. The nearest are zero1 and fsdp, which have no float32 copies of 16-bit weights and no buckets",
    "ep": "the values of a token determine its rank; use tp or fsdp, or pass your code to sizer.size_step for a range",
    "sp": "use tp=8&sp=1 with a kind of parallel training",
    "cp": "use cp=4 with ddp, fsdp or hsdp",
}


def nccl_bytes(
    parallel: str, ranks: int, *, reshard: int = 1, tp: int = 1, cp: int = 1, pp: int = 1
) -> tuple[int, int, int]:
    """Return NCCL's memory on each rank, in bytes: the smallest, the usual, the largest.

    FSDP2 uses a separate communicator for `reshard`, the size of a smaller group. So do `tp` ranks that split matrices, `cp`
    ranks that share sequences, and `pp` stages of a pipeline.
    Source: published measurements. 544 MB for a group of 2 and 688 for larger groups on A100
    (github.com/NVIDIA/nccl/issues/964); 1.06 GB for a group of 8 H100 (1685), about 1.6 for one communicator and 6 for three
    (864).

    *Known limitation*: NCCL's choice of algorithms, protocols and number of channels is not known.
    """
    beside = (reshard > 1, tp > 1 and parallel != "tp", cp > 1, pp > 1 and parallel != "pp")
    communicators = PARALLELS[parallel].communicators + sum(beside)
    if not communicators or ranks == 1:
        return 0, 0, 0
    low, usual, high = NCCL_BYTES
    return NCCL_OF_TWO_BYTES if ranks == 2 else low, usual * communicators, high * communicators


def beside_nccl(gpu: Gpu, held: tuple[int, int, int]) -> Gpu:
    """Return a rank's GPU: adds NCCL's memory, `held`, to the memory of a process outside the allocator."""
    low, usual, high = held
    return replace(
        gpu,
        context_low_bytes=gpu.context_low_bytes + low,
        context_bytes=gpu.context_bytes + usual,
        context_high_bytes=gpu.context_high_bytes + high,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One value of `schedule=`: its title, and the name of its class in torch.distributed.pipelining.

    `stages` is the number of stages of each rank. `fills` says that there are at least as many microbatches as stages.
    """

    key: str
    title: str
    class_name: str
    stages: int = 1
    fills: bool = False

    def takes(self, microbatches: int, ranks: int) -> bool:
        """Return whether the schedule supports these numbers of microbatches and ranks.

        Source: errors of the classes' constructors (torch/distributed/pipelining/schedules.py, 2.11 and 2.15).
        """
        if self.fills:
            return microbatches >= ranks
        return self.stages == 1 or microbatches % max(1, microbatches // ranks) == 0


_SCHEDULE_ROWS = (
    Schedule(key="1f1b", title="1F1B", class_name="Schedule1F1B", fills=True),
    Schedule(key="gpipe", title="GPipe", class_name="ScheduleGPipe"),
    Schedule(key="interleaved", title="interleaved 1F1B", class_name="ScheduleInterleaved1F1B", stages=2),
)

SCHEDULES: dict[str, Schedule] = {row.key: row for row in _SCHEDULE_ROWS}
