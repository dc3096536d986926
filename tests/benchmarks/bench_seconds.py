"""CPU time and memory of whole commands against `python -c "import torch"`: `python -m tests.benchmarks.bench_seconds [--times 5]`.

Each command and the import run in turn; the ratios are medians. A new question has no cache folder. Others have a copy of the
folder in which an earlier question was answered. CPU seconds are those of all processes of a command. Memory is that of its largest
process.

`bench_seconds --presets [NAME …]` asks for the default answer of each preset as the page does: by a job of a server that has
imported its packages and keeps nothing. `bench_seconds --chips` clicks each example of the page in a real browser, in an app of its
own that has answered another question; then again in a new tab. Both print CPU seconds of all processes beside elapsed ones,
because other work on the machine changes the former less, and those of the import in the same run.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from sizer.base.errors import SizerError
from sizer.base.units import MIB
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import TASKS
from sizer.catalogue.presets import PRESETS
from sizer.catalogue.sources import SOURCES
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.service.client import PROBE, JobClient
from sizer.service.variables import FOLDER_VARIABLE
from sizer.ui.defaults import fla_for, sizes_for, targets_for, task_for, with_default_sizes

IMPORT = [sys.executable, "-c", "import torch"]
ONE_CELL = ("--dtype", "bfloat16", "--batch", "1")
RESNET = ("resnet50", "--dtype", "float32", "--batch")
WHICH = ("which", *RESNET, "32")
# What is asked, of `estimate` or of a command that is named, and what was asked before, None for nothing
ROWS = (
    ("kept question, same", ("resnet50",), ("resnet50",)),
    ("kept tapes, ResNet-50 on another GPU", (*RESNET, "32", "--gpu", "h100-80gb"), (*RESNET, "32")),
    ("kept tapes, ResNet-50 at another batch", (*RESNET, "33"), (*RESNET, "32")),
    ("kept tapes, ResNet-50 on another GPU, 40 cells", ("resnet50", "--gpu", "rtx-4090"), ("resnet50",)),
    ("kept tapes, Llama-3.1-8B on another GPU", ("llama-3.1-8b", *ONE_CELL, "--gpu", "a100-40gb"), ("llama-3.1-8b", *ONE_CELL)),
    ("new ResNet-50, one cell", (*RESNET, "32"), None),
    ("new ResNet-50, 40 cells", ("resnet50",), None),
    ("new Llama-3.1-8B, one cell", ("llama-3.1-8b", *ONE_CELL), None),
    ("which over all devices, ResNet-50, kept", WHICH, WHICH),
)


def measure(command: Sequence[str], folder: str) -> tuple[float, float, int]:
    """Return the CPU seconds, elapsed seconds and most bytes of a command's processes, in a process that runs nothing else."""
    source, sink = os.pipe()
    if (child := os.fork()) == 0:
        environment = {**os.environ, FOLDER_VARIABLE: folder}
        begin = time.perf_counter()
        status = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        elapsed = time.perf_counter() - begin
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(sink, f"{used.ru_utime + used.ru_stime} {elapsed} {used.ru_maxrss * 1024} {status}".encode())
        os._exit(0)
    os.close(sink)
    with open(source) as pipe:
        seconds, elapsed, most_bytes, status = pipe.read().split()
    os.waitpid(child, 0)
    if int(status):
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return float(seconds), float(elapsed), int(most_bytes)


def main() -> None:
    """Print a row for each command, preset or example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--presets", nargs="*", metavar="NAME", help="default answers of the page; of all presets without names")
    parser.add_argument("--chips", action="store_true", help="first figures of the page's examples")
    given = parser.parse_args()
    if given.chips:
        measure_chips()
    elif given.presets is not None:
        measure_presets(given.presets or list(PRESETS))
    else:
        measure_commands(given.times)


def measure_commands(times: int) -> None:
    """Print a row for each command: CPU seconds, their ratio to the import's, that of elapsed seconds, and MiB."""
    for title, arguments, before in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            if before is not None:
                measure(_command(before), f"{folder}/before")
            _measure_anew(arguments, folder)  # compiles bytecode and Numba's functions
            pairs = [(_measure_anew(arguments, folder), measure(IMPORT, "")) for _ in range(times)]
        seconds = statistics.median(ours[0] for ours, _ in pairs)
        cpu, elapsed = (statistics.median(ours[at] / theirs[at] for ours, theirs in pairs) for at in (0, 1))
        most = max(ours[2] for ours, _ in pairs)
        print(
            f"{title}: {seconds:.2f} s of CPU time, {cpu:.3f} of `import torch`, {elapsed:.3f} of its elapsed time, "
            f"{most / MIB:,.0f} MiB",
            flush=True,
        )


def _command(arguments: Sequence[str]) -> list[str]:
    asked = arguments if arguments[0] == WHICH[0] else ("estimate", *arguments)
    return [sys.executable, "-m", "sizer", *asked, "--json"]


def _measure_anew(arguments: Sequence[str], folder: str) -> tuple[float, float, int]:
    """Measure a command with a copy of the cache that was there before, if there was one."""
    if not os.path.isdir(f"{folder}/before"):
        return measure(_command(arguments), "")
    shutil.rmtree(f"{folder}/now", ignore_errors=True)
    shutil.copytree(f"{folder}/before", f"{folder}/now")
    return measure(_command(arguments), f"{folder}/now")


# ------------------------------------------------------------------------------------------------------------- the page


IMPORTED_EVERY = 20  # presets, after which the import is measured again
LOOK_SECONDS = 0.02  # between two looks at a job
PATIENCE_MS = 240_000
OTHER = "arch=torchvision:squeezenet1_1&dtype=float32&batch=1"
# Notes when the headline of a question is there that has not the other question's model.
NOTE_FIGURES = """() => { window.figures = null; window.began = performance.now();
    const look = () => { const found = document.querySelector("[data-testid=stMain] [data-testid=stHeading]");
        if (found && /GiB|tokens|requests/.test(found.textContent) && !found.textContent.includes("squeezenet")
            && !found.closest(".st-key-stale")) window.figures ??= performance.now() - window.began; };
    new MutationObserver(look).observe(document.body, {childList: true, subtree: true, characterData: true}) }"""


def default_question(name: str) -> Request:
    """Return what the page asks once a preset is chosen: its own device and task, and the sizes that suit them."""
    request = parse_query(f"arch=hf:{name}")
    source, gpu = SOURCES[request.source], find_gpu(request.gpu)
    task = TASKS[task_for(source, name, gpu)]
    train = task.trains[0] if task.trains else ""
    targets = f"&targets={found}" if train == "adapter" and (found := targets_for(source, name)) else ""
    fla = "&fla=1" if fla_for(source, name, gpu) else ""
    given = parse_query(f"arch=hf:{name}&mode={task.mode}{train and f'&train={train}'}{targets}{fla}")
    return with_default_sizes(given, sizes_for(source, name, gpu, task))


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process, and of all that it has started. Linux."""
    ticks, queue = 0, [process]
    while queue:
        try:
            folder = Path(f"/proc/{queue.pop()}")
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))  # proc(5): utime to cstime
            queue += [int(child) for thread in (folder / "task").iterdir() for child in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_presets(names: Sequence[str]) -> None:
    """Print a row for each preset: CPU seconds, ratio to the import's, seconds until the first figures and until the whole."""
    os.environ[FOLDER_VARIABLE] = ""
    imported, rows = [], []
    with closing(JobClient()) as client:
        client.submit(PROBE).result()
        for number, name in enumerate(names):
            if number % IMPORTED_EVERY == 0:
                imported.append(measure(IMPORT, "")[0])
            rows.append((name, *_measure_default(client, name)))
            print(f"{name}: {_words(rows[-1][1:], statistics.median(imported))}", flush=True)
    rows.sort(key=lambda row: row[1], reverse=True)
    cpu = [row[1] for row in rows]
    above = ", ".join(row[0] for row in rows if row[1] > 10) or "none"
    print(
        f"`import torch`: {statistics.median(imported):.2f} s. {len(rows)} presets: median {statistics.median(cpu):.2f} s, "
        f"95 % within {sorted(cpu)[int(0.95 * (len(cpu) - 1))]:.2f} s, most {cpu[0]:.2f} s ({rows[0][0]}); above 10 s: {above}"
    )


def _words(figures: tuple[float, float, float, str], imported: float) -> str:
    cpu, first, whole, ended = figures
    took = f"{cpu:.2f} s of CPU time, {cpu / imported:.2f} of `import torch`"
    return f"{took}, first figures {first:.2f} s, whole {whole:.2f} s{ended}"


def _measure_default(client: JobClient, name: str) -> tuple[float, float, float, str]:
    before, began, first, ended = cpu_seconds(os.getpid()), time.perf_counter(), 0.0, ""
    job = client.submit(format_query(default_question(name)), stops=True)
    try:
        while job.result(timeout=LOOK_SECONDS) is None:
            if not first and job.partial is not None and job.partial.estimates:
                first = time.perf_counter() - began
    except SizerError as error:
        ended = f", {error}"
    whole = time.perf_counter() - began
    time.sleep(0.3)  # until the job's process has been waited for
    return cpu_seconds(os.getpid()) - before, first or whole, whole, ended


def measure_chips() -> None:
    """Print a row for each example: CPU and elapsed seconds until its first figures, new and known."""
    from sizer.ui.question_words import EXAMPLES
    from tests.browser.conftest import running_app

    imported = statistics.median(measure(IMPORT, "")[0] for _ in range(3))
    print(f"`import torch`: {imported:.2f} s of CPU time", flush=True)
    for title in EXAMPLES:
        with tempfile.TemporaryDirectory() as folder, running_app(Path(folder), **{FOLDER_VARIABLE: ""}) as (address, process):
            (cold, cold_cpu), (known, known_cpu) = _click(address, process.pid, title)
        print(f"{title}: new {cold:.2f} s ({cold_cpu:.2f} s of CPU time), known {known:.2f} s ({known_cpu:.2f})", flush=True)


def _click(address: str, process: int, title: str) -> Iterator[tuple[float, float]]:
    """Yield elapsed and CPU seconds from the click on an example to its first figures: in an app without and with its answer."""
    from playwright.sync_api import expect, sync_playwright

    from tests.browser.conftest import ARGUMENTS, CHROMIUM

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        for _ in range(2):
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto(f"{address}/?{OTHER}")
            page.get_by_test_id("stHeading").filter(has_text="squeezenet").wait_for(timeout=PATIENCE_MS)
            ended = expect(page.get_by_test_id("stApp"))
            ended.to_have_attribute("data-test-script-state", "notRunning", timeout=PATIENCE_MS)
            page.wait_for_timeout(2000)
            page.evaluate(NOTE_FIGURES)
            before = cpu_seconds(process)
            page.get_by_role("button", name=title, exact=True).click()
            page.wait_for_function("window.figures !== null", timeout=PATIENCE_MS)
            yield page.evaluate("window.figures") / 1000, cpu_seconds(process) - before
            ended.to_have_attribute("data-test-script-state", "notRunning", timeout=PATIENCE_MS)
            page.wait_for_timeout(1500)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
