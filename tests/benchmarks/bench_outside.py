"""What published out-of-memory messages say of the bytes outside PyTorch's allocator: `python -m tests.benchmarks.bench_outside`.

Reads `tests/measured/published/outside.csv` (README.md there says what its columns mean) and prints, per GPU, the messages that
are used, their median beside the catalogue's rule, and how many lie within its range; then what the rule's numbers in
`sizer/catalogue/contexts.py` come from. `tests/catalogue/test_context.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from sizer.catalogue.contexts import BYTES_PER_THREAD, THREADS_PER_MULTIPROCESSOR, Context, context_of, libraries_of
from sizer.commands.terminal import format_table
from tests.benchmarks.tables import read_table

PUBLISHED = Path(__file__).parent.parent / "measured" / "published"
UNITS = {"bytes": 2**-20, "KiB": 2**-10, "MiB": 1.0, "GiB": 1024.0}
HELD = 0.95  # of the messages lie in the range
ENOUGH = 8  # messages from one architecture; with fewer, all architectures together stand for it
FROM_TORCH = (2, 2)  # messages of 2.1 are kept and not used: some of its builds loaded every kernel at once
ROUNDING_MIB = (
    30.0  # three figures in GiB with two decimals are each off by up to 5 MiB; the driver's own are in steps of 2
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One GPU that messages come from."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def threads(self) -> int:
        """Threads that can be resident at once."""
        return self.multiprocessors * THREADS_PER_MULTIPROCESSOR[self.capability]

    @property
    def share_mib(self) -> float:
        """MiB that the driver sets aside for the threads."""
        return self.threads * BYTES_PER_THREAD / 2**20

    @property
    def architecture(self) -> str:
        """The architecture's name."""
        return libraries_of(self.capability).architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: MiB, rounded as PyTorch prints them. `chip` is None where nobody can tell the GPU."""

    total_mib: float
    free_mib: float
    others_mib: float
    in_use_mib: float
    allocated_mib: float
    unallocated_mib: float
    torch: tuple[int, int]
    chip: Chip | None
    other_libraries: str
    ran: str
    source: str

    @property
    def outside_mib(self) -> float:
        """What the process holds beyond what PyTorch allocated or reserved."""
        return self.in_use_mib - self.allocated_mib - self.unallocated_mib

    @property
    def consistent(self) -> bool:
        """Whether free and used memory fit the GPU, and PyTorch's own the process."""
        fits = self.free_mib + self.others_mib + self.in_use_mib <= self.total_mib + ROUNDING_MIB
        return fits and self.outside_mib >= 0

    @property
    def libraries_mib(self) -> float:
        """What is outside beyond the threads' share, on a known GPU."""
        assert self.chip is not None
        return self.outside_mib - self.chip.share_mib

    @property
    def context(self) -> Context:
        """What the catalogue says of a process on this GPU."""
        assert self.chip is not None
        return context_of(self.chip.threads, self.chip.capability)

    @property
    def held(self) -> bool:
        """Whether the catalogue's range holds it."""
        return self.context.low_bytes <= self.outside_mib * 2**20 <= self.context.high_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule's numbers as the messages give them: MiB."""

    medians: dict[str, float]
    counts: dict[str, int]
    together: float
    below: float
    above: float
    slope: float
    """Median of the slopes (bytes per thread) between any two messages: how the context grows, fitted to nothing else."""


def read_chips() -> dict[str, Chip]:
    """The GPUs of gpus.csv by name."""
    chips = {}
    for row in read_table(PUBLISHED / "gpus.csv"):
        major, minor = map(int, row["capability"].split("."))
        chips[row["gpu"]] = Chip(
            name=row["gpu"], capability=(major, minor), multiprocessors=int(row["multiprocessors"])
        )
    return chips


def read_messages() -> list[Message]:
    """Every message of outside.csv."""
    chips = read_chips()
    return [
        Message(
            total_mib=mib(row["total"]),
            free_mib=mib(row["free"]),
            others_mib=mib(row["others"] or "0 bytes"),
            in_use_mib=mib(row["in_use"]),
            allocated_mib=mib(row["allocated"]),
            unallocated_mib=mib(row["unallocated"]),
            torch=version(row["torch_at_least"]),
            chip=chips[row["gpu"]] if row["gpu"] else None,
            other_libraries=row["other_libraries"],
            ran=row["ran"],
            source=row["source"],
        )
        for row in read_table(PUBLISHED / "outside.csv")
    ]


def used(messages: Iterable[Message]) -> list[Message]:
    """Those that the rule is made from: consistent, on a known GPU, of torch 2.2 or newer, no other library told."""
    return [
        message
        for message in messages
        if message.consistent
        and message.chip is not None
        and message.torch >= FROM_TORCH
        and not message.other_libraries
    ]


def derive(messages: Sequence[Message]) -> Rule:
    """The rule's numbers: medians by architecture with enough messages, and how far messages are from them."""
    groups: dict[str, list[float]] = {}
    for message in messages:
        groups.setdefault(message.chip.architecture, []).append(message.libraries_mib)
    together = median(message.libraries_mib for message in messages)
    medians = {name: median(found) for name, found in groups.items() if len(found) >= ENOUGH}
    residuals = sorted(m.libraries_mib - medians.get(m.chip.architecture, together) for m in messages)
    left_out = int(len(residuals) * (1 - HELD) / 2)  # at each end
    slopes = [
        (one.outside_mib - other.outside_mib) * 2**20 / (one.chip.threads - other.chip.threads)
        for one, other in combinations(messages, 2)
        if one.chip.threads != other.chip.threads
    ]
    return Rule(
        medians=medians,
        counts={name: len(found) for name, found in groups.items()},
        together=together,
        below=0.5 - residuals[left_out],  # half a MiB for the medians, which are rounded
        above=0.5 + residuals[-1 - left_out],
        slope=median(slopes),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile, between two values in proportion."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mib(text: str) -> float:
    """A figure as PyTorch prints it, in MiB."""
    number, unit = text.split()
    return float(number) * UNITS[unit]


def version(text: str) -> tuple[int, int]:
    """A version's first two numbers."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


# --------------------------------------------------------------------------------------------------------------- printing


def gpu_table(messages: Sequence[Message]) -> Iterator[str]:
    """The lines of the table per GPU."""
    header = ("architecture", "GPU", "messages", "5 %", "median", "95 %", "catalogue", "from", "to", "held")
    groups: dict[Chip, list[Message]] = {}
    for message in messages:
        groups.setdefault(message.chip, []).append(message)
    rows = []
    for chip, found in sorted(groups.items(), key=lambda item: (item[0].capability, item[0].multiprocessors)):
        outside = [message.outside_mib for message in found]
        context = context_of(chip.threads, chip.capability)
        figures = [percentile(outside, 5), median(outside), percentile(outside, 95)]
        ours = [context.typical_bytes / 2**20, context.low_bytes / 2**20, context.high_bytes / 2**20]
        held = f"{sum(message.held for message in found)}/{len(found)}"
        texts = [f"{figure:.0f}" for figure in (*figures, *ours)]
        rows.append((chip.architecture, chip.name, str(len(found)), *texts, held))
    yield from format_table(header, rows, left=2)


def rule_table(rule: Rule) -> Iterator[str]:
    """The lines of the rule's numbers."""
    rows = [(name, str(rule.counts[name]), f"{found:.1f}") for name, found in sorted(rule.medians.items())]
    rows.append(("all together", str(sum(rule.counts.values())), f"{rule.together:.1f}"))
    yield from format_table(("beyond the threads' share, MiB", "messages", "median"), rows, left=1)
    yield f"below the median {rule.below:.1f} MiB, above it {rule.above:.1f} MiB (95 % of the messages)"
    yield f"bytes per thread between any two messages: {rule.slope:.0f} (the rule takes {BYTES_PER_THREAD})"


def main() -> None:
    messages = read_messages()
    kept = used(messages)
    print("\n".join(gpu_table(kept)), end="\n\n")
    print("\n".join(rule_table(derive(kept))), end="\n\n")
    errors = [abs(message.outside_mib - message.context.typical_bytes / 2**20) for message in kept]
    share = sum(message.held for message in kept) / len(kept)
    print(f"{len(messages)} messages, {len(kept)} used; median distance {median(errors):.0f} MiB, {share:.0%} in range")
    older = [m for m in messages if m.consistent and m.chip and not m.other_libraries and m.torch < FROM_TORCH]
    print(f"not used, of torch 2.1: {len(older)}, {sum(m.held for m in older)} in range")
    told = [m for m in messages if m.consistent and m.chip and m.other_libraries]
    print(f"not used, with other libraries: {len(told)}, {sum(m.held for m in told)} in range")


if __name__ == "__main__":
    main()
