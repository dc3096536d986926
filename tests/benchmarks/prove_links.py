"""Opens varied questions in a browser, copies the link that each page offers, opens that elsewhere: the same sentence and figures.

    python -m tests.benchmarks.prove_links [--only SUBSTRING]

The app runs as a visitor would start it. Prints a line for each question, exits with 1 where one does not come back as it was.
Needs Chromium; takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser.conftest import ANSWER_MS, ARGUMENTS, CHROMIUM, running_app
from tests.browser.test_browser import copied_link, headline, table

CNN, LANGUAGE = "arch=torchvision:resnet18&image=64", "arch=hf:gpt2&seq=64"
# Every key that a link has, on a picture model or a language model, and what a key of several values may hold.
CHANGED = {
    CNN: (
        "", "dtype=float16", "dtype=amp-bfloat16,bfloat16", "batch=3", "batch=7,1", "batch=1,2,4,8,1000", "image=96x64",
        "mode=inference", "optimizer=sgd", "optimizer=adafactor", "optimizer=muon", "optimizer=none", "optimizer_impl=fused",
        "optimizer_impl=loop", "gpu=t4", "gpu=rtx-4090&expandable=1", "gpu=custom:3GiB@8.9", "gpu=mi300x", "gpu=m2-ultra-64gb",
        "gpu=cpu", "torch=2.6", "train=head", "train=adapter&targets=conv1,conv2", "accumulate=4", "focus=float32:1",
        "batch=2,4&focus=bfloat16:4", "arch=timm:resnet10t", "arch=torchvision:vit_b_32&image=224",
        "arch=torchvision:densenet121&checkpointing=1",
    ),
    LANGUAGE: (
        "", "dtype=bfloat16&batch=16", "seq=128", "attention=eager", "checkpointing=1", "mode=inference", "mode=generate&new=8",
        "mode=generate&new=8&cache=static", "mode=generate&new=24&batch=4", "head=GPT2ForSequenceClassification",
        "train=head&gpu=a10", "train=adapter", "train=adapter&adapter=dora&r=4",
        "train=adapter&r=8&alpha=32&targets=attention&adapter_dropout=0.1", "train=adapter&adapter=prompt&r=20",
        "optimizer=adafactor&gpu=rtx-3060-12gb", "accumulate=2&optimizer=sgd-momentum", "gpu=h100-80gb&focus=bfloat16:2",
        "arch=hf:t5-small&dtype=float32", "arch=hf:bert-base-uncased&dtype=amp-float16", "arch=hf:whisper-tiny&dtype=float32",
    ),
}  # fmt: skip
EACH = "dtype=float32,bfloat16&batch=1,2"


def questions() -> list[str]:
    """The queries, each key once."""
    found = []
    for base, changes in CHANGED.items():
        for change in changes:
            pairs = itertools.chain(*(part.split("&") for part in (base, EACH, change) if part))
            found.append(
                "&".join(f"{key}={value}" for key, value in dict(pair.split("=", 1) for pair in pairs).items())
            )
    return found


def seen(browser: Browser, address: str) -> tuple[str, list[list[str]], str]:
    """The sentence, the table and the copied link of a page opened anew."""
    with browser.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = context.new_page()
        page.goto(address)
        sentence = headline(page, "needs")
        expect(page.get_by_text("Parts of this link were refused")).to_have_count(0)
        return sentence, table(page), copied_link(page)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.prove_links", description=__doc__)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only questions with this in them")
    only = parser.parse_args(argv).only
    wrong, asked = 0, [query for query in questions() if only in query]
    expect.set_options(timeout=ANSWER_MS)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_app(Path(folder)) as (app_url, _),
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM) if CHROMIUM.exists() else None, args=ARGUMENTS
        )
        for query in asked:
            first = seen(browser, f"{app_url}/?{query}")
            again = seen(browser, first[2])
            same = first == again
            wrong += not same
            print(f"{query}: {'the same' if same else f'{first} became {again}'}", flush=True)
    print(f"{len(asked) - wrong} of {len(asked)} come back as they were")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
