"""The documents' figures, counted: `python -m tests.readme` writes them anew, `tests/test_figures.py` checks them.

SENTENCES are words of the documents with a "{}" for each figure, and a function that counts those from the tree: rows, cases,
constants, and the CSV files that benchmarks write. BLOCKS are the tables between two comments, made from such files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from sizer.base.units import format_bytes
from sizer.catalogue import contexts
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.presets import PRESETS
from sizer.query.text import query_keys
from sizer.report.bounds import BETWEEN_VERSIONS
from tests.benchmarks import bench_budgets, bench_torchtitan
from tests.benchmarks.bench_outside import HELD, read_messages, used
from tests.benchmarks.published.errors import LIBRARIES, in_range, read_errors, table_by_kind, table_by_set
from tests.benchmarks.published.rows import read_runs
from tests.benchmarks.service_figures import SERVICE
from tests.benchmarks.shares import read_share
from tests.benchmarks.tables import read_table
from tests.distributed.cases import CASES
from tests.distributed.test_gloo import OF_FOUR, OF_TWO
from tests.null_driver.test_ranks import QUERIES
from tests.oldest import REQUIREMENTS, floors
from tests.readme import DOCS, DOCUMENTS, README
from tests.report.test_bounds import CONVOLVING
from tests.serving import log_table
from tests.tracing.test_cpu_truth_models import CASES as CPU_CASES
from tests.tracing.test_cpu_truth_models import HAIR

TESTS = Path(__file__).parent
PUBLISHED_README = TESTS / "measured" / "published" / "README.md"
ON_A_DEVICE = TESTS / "measured" / "errors-h200-2.11-2026-11-26.json"  # bench_accuracy --save, with PyTorch 2.11
REASONS = TESTS / "measured" / "reasons.csv"
REPORTS = TESTS / "measured" / "published" / "reports.csv"
RECORDED = TESTS / "null_driver" / "recorded"
TRAINERS = TESTS / "running" / "trainers.json"

Figures = tuple[object, ...]


def _presets() -> Figures:
    return (len(PRESETS),)


def _devices() -> Figures:
    return (len(GPUS),)


def _floors() -> Figures:
    oldest = floors(REQUIREMENTS.read_text(encoding="utf-8"))
    return tuple(
        oldest[name].removesuffix(".0")
        for name in ("torch", "torchvision", "transformers", "timm", "peft", "bitsandbytes")
    )


def _published() -> Figures:
    return len(read_runs()), sum(int(row["figures"]) for row in read_errors())


def _nearness() -> Figures:
    today, then = ([abs(float(row["median_percent"])) <= 1 for row in read_errors(name)] for name in LIBRARIES)
    (torch, transformers), *others = {(row["torch"], row["transformers"]) for row in read_errors()}
    assert not others
    return sum(today), len(today), torch.removesuffix(".0"), transformers.removesuffix(".0"), sum(then), len(then)


def _recorded() -> Figures:
    counts = [len([*RECORDED.glob(f"*-{torch}/*.json")]) for torch in ("2.11", "2.15")]
    assert counts[0] == counts[1]
    return sum(counts), counts[0]


def errors_on_a_device() -> dict[str, dict[str, float]]:
    """Return the signed error of each quantity of the cases that this project measured on a GPU, by the case's name."""
    return {name.partition("/")[2]: row for name, row in json.loads(ON_A_DEVICE.read_text(encoding="utf-8")).items()}


def _on_a_device() -> Figures:
    rows = errors_on_a_device().values()
    within = [sum(abs(row[f"peak_{name}_bytes"]) < 0.0005 for row in rows) for name in ("allocated", "reserved")]
    processes = [abs(row["process_bytes"]) for row in rows if "process_bytes" in row]
    return len(rows), *within, len(processes), f"{100 * median(processes):.1f}", f"{100 * max(processes):.0f}"


def _cpu() -> Figures:
    names = {case.values[0] if hasattr(case, "values") else case[0] for case in CPU_CASES}
    return len(names), len(CPU_CASES), f"{HAIR:.1%}".removesuffix("%")


def _ranks() -> Figures:
    return len(OF_TWO), len(OF_FOUR)


def _worlds() -> Figures:
    worlds = [case.world for case in CASES.values()]
    return len(worlds), min(worlds), f"{max(worlds):,}"


def _asked_of_ranks() -> Figures:
    return (len(QUERIES),)


def _outside() -> Figures:
    keys = ("t4", "rtx-4090", "a100-80gb", "h100-80gb")
    messages = used(read_messages())
    distances = sorted(abs(one.outside_mib - one.context.typical_bytes / 2**20) for one in messages)
    return (
        len(messages),
        contexts.BYTES_PER_THREAD // 2**10,
        *(GPUS[key].context_bytes // 2**20 for key in keys),
        round(distances[len(distances) // 2]),
        contexts.BELOW_MIB,
        contexts.ABOVE_MIB,
    )


def _engines() -> Figures:
    names = [path.name for path in RECORDED.glob("*-2.11/*.json")]
    return f"{HELD:.0%}".removesuffix("%"), BETWEEN_VERSIONS, sum(name.startswith(CONVOLVING) for name in names)


def _ranges() -> Figures:
    rows = read_errors()
    processes = in_range(row for row in rows if row["quantity"] == "process")
    held, ranged = in_range(rows)
    return ranged, *processes, held


def _types() -> Figures:
    share = read_share("transformers", "float32", "training", "defaults")
    return (
        share["version"].removesuffix(".0"),
        share["names"],
        share["counted"],
        f"{float(share['traced_percent']):.0f}",
    )


def _halves() -> Figures:
    share = read_share("transformers", "bfloat16", "training", "completed")
    return tuple(share[name] for name in ("names", "counted", "traced", "own_code"))


def _autocast() -> Figures:
    share = read_share("transformers", "amp-bfloat16", "training", "completed")
    assert share["traced"] == share["counted"]
    return (share["counted"],)


def _timm() -> Figures:
    shares = [read_share("timm", "float32", mode, "") for mode in ("training", "inference")]
    assert len({(share["names"], share["counted"], share["traced"], share["version"]) for share in shares}) == 1
    assert shares[0]["names"] == shares[0]["traced"]
    return f"{int(shares[0]['names']):,}", shares[0]["version"]


SENTENCES: dict[str, Callable[[], Figures]] = {
    "In {} cases peak allocated memory is within 0.05 % for {}, and peak reserved memory for {}. The {} processes that had the GPU "
    "for themselves are {} % off in the median, {} % at worst": _on_a_device,
    "one of {} presets": _presets,
    "the {} devices of the catalogue": _devices,
    "torch ≥ {}, torchvision ≥ {}, transformers ≥ {}, timm ≥ {} where its models are asked for, peft ≥ {} for "
    "adapters, and bitsandbytes ≥ {} for quantized weights": _floors,
    "holds {} figures with their sources, of which {} are repeated": _published,
    "within 1 % for {} of {} with today's libraries (torch {}, transformers {}), for {} of {} with those of the runs' "
    "time": _nearness,
    "In all {} recorded cases ({} each": _recorded,
    "{} models, {} cases, and every optimizer in every implementation (float32, bfloat16, autocast; training and inference); "
    "each phase's peak within {} %": _cpu,
    "{} pieces of work in worlds of {} to {} ranks": _worlds,
    "Of {} such questions each is exact to the byte over CUDA's own host code, allocated and reserved": _asked_of_ranks,
    "and of ranks on each of them: {} pieces of work by two processes over gloo, and {} by four": _ranks,
    "from {} published out-of-memory messages: {} KiB for each thread that can be resident, and libraries by architecture "
    "(T4 {} MiB, RTX 4090 {}, A100 {}, H100 {}); half of them within {} MiB, "
    "nineteen of twenty within {} below and {} above": _outside,
    "({} % of the messages); engines that another version of cuDNN takes ({} % of reserved memory either way: nine of ten of "
    "{} cases": _engines,
    "Of {} published figures that such a range applies to ({} of {} processes on the T4, GPUMemNet's growth, xMem's reserved "
    "memory) it holds {}": _ranges,
    "Of transformers {}'s {} types, {} build from their defaults and are counted; {} % of those trace a training step": _types,
    "of {} types at random {} are counted with defaults completed, {} trace a bfloat16 step, {} fail so": _halves,
    "Under autocast every one of {} at random traces": _autocast,
    "all {} of {}, in both modes": _timm,
}


def _far() -> Iterator[str]:
    """Yield a line for each case of a GPU with a figure that is 0.05 % off or more."""
    reasons = {row["case"]: row["reason"] for row in read_table(REASONS)}
    yield "| case | peak allocated | peak reserved | process | why |"
    yield "|---|---|---|---|---|"
    for name, row in errors_on_a_device().items():
        errors = [row.get(f"{quantity}_bytes") for quantity in ("peak_allocated", "peak_reserved", "process")]
        if max(map(abs, (error for error in errors[:2] if error is not None))) >= 0.0005:
            cells = ("" if error is None else f"{error:+.2%}".replace("%", " %").replace("-", "−") for error in errors)
            yield f"| `{name}` | {' | '.join(cells)} | {reasons[name]} |"


def _service() -> Iterator[str]:
    yield "| what | figure | with |"
    yield "|---|---|---|"
    for row in read_table(SERVICE):
        yield f"| {row['what']} | {row['figure']} | `{row['with']}` |"


def _skipped_a_step(case: str) -> bool:
    """Return True if the device skipped an optimizer's step of a case, which the estimate counts."""
    (file,) = ON_A_DEVICE.parent.glob(f"h200*/{case}.json")
    return any("left out an optimizer's step" in doubt for doubt in json.loads(file.read_text(encoding="utf-8")).get("doubts", ()))


def _device_row(title: str, convolves: bool) -> str:
    errors = [
        100 * row["peak_allocated_bytes"]
        for name, row in errors_on_a_device().items()
        if name.startswith(CONVOLVING) == convolves and not _skipped_a_step(name)
    ]
    return f"| {title} | allocated peak | {len(errors)} | {max(errors, key=abs):+.2g} % |"


def _accuracy() -> Iterator[str]:
    """Yield README's five rows: each source of truth, the number of figures, and how far off the estimates are."""
    then = read_errors(LIBRARIES[1])

    def row(title: str, name: str, quantity: str, kind: str = "") -> str:
        found = [one for one in then if (one["set"], one["quantity"]) == (name, quantity) and one["run"].startswith(kind)]
        found = found if kind else [one for one in found if not one["run"].startswith("QLoRA")]
        worst = max((float(one["worst_percent"]) for one in found), key=abs)
        return f"| {title} | {quantity} | {sum(int(one['figures']) for one in found)} | {f'{worst:+g} %' if worst else 'equal'} |"

    yield "| source of truth | what was read | figures | worst error |"
    yield "|---|---|---|---|"
    yield f"| `torch.profiler` on the CPU | bytes after each phase | {_cpu()[1]} runs | equal |"
    yield f"| PyTorch's own CUDA code without a GPU | allocated and reserved peaks | {_recorded()[0]} runs | equal |"
    yield _device_row("transformers on this project's H200, except a case whose optimizer step was skipped", False)
    yield _device_row("convolutional networks on this project's H200", True)
    yield row("LoRA on a T4, published", "t4_adapters", "allocated")
    yield row("QLoRA on a T4, published", "t4_adapters", "allocated", "QLoRA")
    yield row("transformers' attention tables, published, with the libraries of that time", "attention_tables", "allocated")


def _reports() -> Iterator[str]:
    """Yield a line for each public report that a query repeats."""
    yield "| work | source | published | error | with gradients as zeros | reason above 3 % |"
    yield "|---|---|---|---|---|---|"
    for row in read_table(REPORTS):
        errors = (row["error_percent"], row["zeroed_percent"])
        error, zeroed = (f"{float(text):+.2f} %".replace("-", "−") if text else "" for text in errors)
        published = format_bytes(int(row["allocated_bytes"]))
        yield f"| {row['work']} | {row['source']} | {published} | {error} | {zeroed} | {row['reason']} |"


def _pipelines() -> Iterator[str]:
    """Yield a line for each published figure of a diffusion pipeline."""
    yield "| question | figure | GiB | error | source | why it differs |"
    yield "|---|---|---|---|---|---|"
    for row in read_table(TESTS / "diffusion" / "published.csv"):
        query, error = row["query"].removeprefix("arch=diffusers:"), row["error"].replace("%", " %").replace("-", "−")
        yield f"| `{query}` | {row['quantity']} | {row['published_gib']} | {error} | {row['source']} | {row['reason']} |"


def _measured_pipelines() -> Iterator[str]:
    """Yield a line for each pipeline that was measured, with the signed error of the estimate."""
    rows = read_table(TESTS / "diffusion" / "measured.csv")
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    yield f"| question | {' | '.join(quantities)} |"
    yield f"|---|{'---|' * len(quantities)}"
    for query in dict.fromkeys(row["query"] for row in rows):
        cells = [_measured_cell(row) for row in rows if row["query"] == query]
        yield f"| `{query.removeprefix('arch=diffusers:')}` | {' | '.join(cells)} |"


def _measured_cell(row: dict[str, str]) -> str:
    measured, estimated = int(row["measured_bytes"]), int(row["estimated_bytes"])
    if measured == estimated:
        return f"{measured:,}, equal"
    return f"{measured:,}, {estimated / measured - 1:+.3%}".replace("%", " %").replace("-", "−")


def _trainers() -> Iterator[str]:
    """Yield a line for each script of a trainer: the query's keys, its reserved bytes and what the script differs by."""
    yield "| script | query | reserved by the query | reserved by the script | allocated peak |"
    yield "|---|---|---|---|---|"
    for name, row in json.loads(TRAINERS.read_text(encoding="utf-8")).items():
        script, query = row["script"], row["query"]
        error = f"{max(query['step1'], query['step2']) / max(script['step1'], script['step2']) - 1:+.2%}"
        error = "0.00 %" if error in ("+0.00%", "-0.00%") else error.replace("%", " %").replace("-", "−")
        yield f"| `{name}` | `{row['keys']}` | {query['reserved']:,} | {script['reserved']:,} | {error} |"


def _keys() -> Iterator[str]:
    """Yield a line for each key of a query."""
    yield "| key | flag | values | default |"
    yield "|---|---|---|---|"
    for key in query_keys():
        flag = "" if key.name in ("v", "arch") else f"`--{key.name.replace('_', '-')}`"
        yield f"| `{key.name}` | {flag} | {key.allowed.replace('|', ' or ')} | {key.default} |"


# The file and the comment around each table.
BLOCKS: dict[str, tuple[Path, Callable[[], Iterator[str]]]] = {
    "accuracy": (README, _accuracy),
    "an H200": (DOCS / "accuracy.md", _far),
    "keys": (DOCS / "cli.md", _keys),
    "pipelines": (DOCS / "diffusion.md", _pipelines),
    "measured pipelines": (DOCS / "diffusion.md", _measured_pipelines),
    "reports": (DOCS / "accuracy.md", _reports),
    "scripts of trainers": (DOCS / "recipes.md", _trainers),
    "errors by set": (DOCS / "accuracy.md", table_by_set),
    "errors by kind of run": (PUBLISHED_README, table_by_kind),
    "logs of vLLM": (DOCS / "serving.md", partial(log_table.table, "vllm")),
    "logs of SGLang": (DOCS / "serving.md", partial(log_table.table, "sglang")),
    "errors of servers": (DOCS / "serving.md", log_table.summary),
    "ranges of servers": (DOCS / "serving.md", log_table.bands),
    "figures of llama.cpp": (DOCS / "serving.md", log_table.llama_files),
    "published logs of llama.cpp": (DOCS / "serving.md", log_table.llama_logs),
    "rules of vLLM": (DOCS / "serving.md", partial(log_table.rules, "vllm")),
    "rules of SGLang": (DOCS / "serving.md", partial(log_table.rules, "sglang")),
    "the service": (DOCS / "hosting.md", _service),
    "torchtitan": (DOCS / "several-gpus.md", bench_torchtitan.table),
    "budgets": (DOCS / "compile.md", bench_budgets.table),
}


def found(sentence: str, text: str) -> re.Match:
    """Where a text says a sentence, its figures as groups. Raises LookupError where it does not, once."""
    matches = [*pattern_of(sentence).finditer(text)]
    if len(matches) != 1:
        raise LookupError(f"said {len(matches)} times, not once: {sentence}")
    return matches[0]


def pattern_of(sentence: str) -> re.Pattern:
    """A sentence wherever its lines break, with whatever figures."""
    words = re.escape(sentence).replace(r"\{\}", r"(\d+(?:[.,]\d+)*)").replace(r"\ ", r"\s+")
    return re.compile(words)


def with_figures(text: str) -> str:
    """Return a document's text with the figures of its sentences counted anew."""
    for sentence, count in SENTENCES.items():
        if (match := pattern_of(sentence).search(text)) is None:
            continue
        for group, figure in reversed([*enumerate(count(), start=1)]):
            text = text[: match.start(group)] + str(figure) + text[match.end(group) :]
    return text


def block(name: str, text: str) -> re.Match:
    """A table between its comments, as group 1. Raises LookupError where there is none."""
    match = re.search(rf"<!-- {name}: python -m tests\.readme -->\n(.*?)<!-- end -->", text, re.DOTALL)
    if match is None:
        raise LookupError(f"no table of {name}")
    return match


def with_blocks(text: str, path: Path) -> str:
    """A file's text with its tables made anew. Raises LookupError."""
    for name, (file, table) in BLOCKS.items():
        if file == path:
            match = block(name, text)
            text = text[: match.start(1)] + "".join(f"{line}\n" for line in table()) + text[match.end(1) :]
    return text


def write_figures() -> None:
    """Write the figures and tables of all documents anew. Raises LookupError."""
    for path in (*DOCUMENTS, PUBLISHED_README):
        path.write_text(with_blocks(with_figures(path.read_text(encoding="utf-8")), path), encoding="utf-8")
