"""What only a browser shows: the form in use, links that travel, files that arrive, a page that fits a phone."""

from __future__ import annotations

import csv
import io
import json
import re
from urllib.request import urlopen

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser.conftest import ANSWER_MS, fit

GIB = 2**30
SMALL = "arch=torchvision:resnet18&dtype=float32,bfloat16&batch=1,2&image=64"

# A Llama of two layers. Embedding 100*16, per layer: attention 4*16*16, MLP 3*16*32, two norms of 16; last norm 16, head tied.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LLAMA_PARAMETERS = 100 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16


def headline(page: Page, words: str) -> str:
    """The headline, once it is there with these words and the answer is whole."""
    found = page.get_by_test_id("stHeading").filter(has_text=words)
    expect(found).to_be_visible(timeout=ANSWER_MS)
    table(page)
    wait_for_the_whole(page)
    return found.inner_text()


WHOLE = """() => {
    const rows = [...document.querySelector("[data-testid=stDataFrame]")?.querySelectorAll("tr") ?? []];
    return rows.length > 1 && rows.every(row => !row.textContent.includes("…"));
}"""  # a grid draws its cells a moment after it is there


ENDED = """() => {
    const app = document.querySelector("[data-testid=stApp]");
    return app.dataset.testScriptState === "notRunning" && document.querySelector(".st-key-stop") === null;
}"""  # a run that ends for the next part of an answer is "notRunning" for a moment, too, but its answer can be stopped


def wait_for_the_whole(page: Page) -> None:
    """Wait until the answer and the run that shows it have ended: what stands further down is of the run before until then."""
    page.wait_for_function(ENDED, timeout=ANSWER_MS)


def table(page: Page) -> list[list[str]]:
    """The cells of the dtype × batch table, its first row the batch sizes, once nothing of it is to come any more."""
    page.wait_for_function(WHOLE, timeout=ANSWER_MS)
    return cells_of(page.get_by_test_id("stDataFrame").first)


def cells_of(grid: Locator) -> list[list[str]]:
    """The cells of a table that is drawn as a grid, its headings first, once all of them are drawn."""
    expect(grid.locator("tr").filter(has_text="…")).to_have_count(0)
    return [[cell.strip() for cell in row.locator("th, td").all_text_contents()] for row in grid.locator("tr").all()]


def copied_link(page: Page) -> str:
    """The link that the page offers to copy."""
    tab = page.get_by_role("tab", name="Link and command")
    expect(tab).to_have_count(1)  # two, while tabs are drawn anew
    tab.click()
    return page.get_by_test_id("stCode").filter(has_text="http").inner_text().strip()


def choose(page: Page, label: str, words: str) -> None:
    """Choose an option of a select box by typing it."""
    box = page.get_by_role("combobox", name=re.compile(label))
    box.click()
    box.fill(words)
    page.get_by_role("option", name=words, exact=True).click()


def write(page: Page, label: str, text: str) -> None:
    """Write into a text field and confirm it."""
    field = page.get_by_label(label, exact=True)
    field.fill(text)
    field.press("Enter")


def test_opens_with_an_answer(page: Page, app_url: str):
    page.goto(app_url)
    sentence = headline(page, "Training resnet50 at batch 128")
    assert re.search(
        r"needs \d+\.\d\d GiB as nvidia-smi shows it \(\d+\.\d\d GiB allocated\); it fits one A100", sentence
    )
    rows = table(page)
    assert rows[0][1:-1] == ["1", "8", "32", "128"]
    assert [row[0] for row in rows[1:]] == ["float32", "amp-bfloat16"]
    assert page.get_by_text("25,557,032").is_visible()
    expect(page.get_by_test_id("stVegaLiteChart").locator("svg, canvas")).to_have_count(3)
    opened = f"{app_url}/?arch=torchvision:resnet50&dtype=float32,amp-bfloat16&batch=1,8,32,128"
    assert page.evaluate("[location.href, history.length]") == [opened, 2], "no entry beside that of the blank page and its own"
    page.reload()
    assert headline(page, "Training resnet50 at batch 128") == sentence
    assert page.url == opened
    page.get_by_role("button", name="All dtypes, batch 1 to 128").click()
    page.wait_for_function("() => document.querySelectorAll('[data-testid=stDataFrame] tr').length === 6", timeout=ANSWER_MS)
    rows = table(page)
    assert rows[0][1:-1] == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert [row[0] for row in rows[1:]] == ["float32", "bfloat16", "float16", "amp-bfloat16", "amp-float16"]
    assert page.url == f"{app_url}/?arch=torchvision%3Aresnet50", "the query's own defaults"
    page.go_back()
    assert headline(page, "Training resnet50 at batch 128") == sentence
    page.go_back()
    assert page.url == "about:blank"


def test_a_link_is_previewed_without_running_anything(app_url: str):
    with urlopen(f"{app_url}/?{SMALL}") as answer:
        served = answer.read().decode()
    assert "<title>Sizer: resnet18 on A100 (80 GB)</title>" in served
    assert 'property="og:description" content="resnet18 · Training · float32, bfloat16 · batch 1, 2' in served


def test_link_travels(page: Page, context: BrowserContext, app_url: str):
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "resnet18")
    write(page, "Batch sizes", "2, 3")
    choose(page, "Device", "Tesla T4 · 16 GB")
    sentence = headline(page, "Tesla T4")
    assert "gpu=t4" in page.url
    link, figures = copied_link(page), table(page)
    assert link.startswith(f"{app_url}/?v=1&arch=torchvision:resnet18&mode=training")
    with context.browser.new_context() as elsewhere:
        other = elsewhere.new_page()
        other.goto(link)
        assert headline(other, "Tesla T4") == sentence
        assert table(other) == figures
        assert copied_link(other) == link


def test_a_cell_is_looked_at_by_pointer_and_by_keys_and_stays(page: Page, app_url: str):
    page.goto(f"{app_url}/?{SMALL}")
    first = headline(page, "at batch 2 of 64 × 64 pixels in float32")
    grid = page.get_by_test_id("stDataFrame").first
    box = grid.bounding_box()
    grid.click(position={"x": 0.3 * box["width"], "y": 2.5 * box["height"] / 3})  # the last row, the first batch size
    headline(page, "at batch 1 of 64 × 64 pixels in bfloat16")
    page.keyboard.press("ArrowRight")
    second = headline(page, "at batch 2 of 64 × 64 pixels in bfloat16")
    page.reload()
    assert headline(page, "in bfloat16") == second
    link = copied_link(page)
    assert "focus=bfloat16:2" in link
    page.go_back()
    headline(page, "at batch 1 of 64 × 64 pixels in bfloat16")
    page.go_back()
    assert headline(page, "in float32") == first


@pytest.mark.exhaustive
def test_back_goes_back(page: Page, app_url: str):
    page.goto(f"{app_url}/?{SMALL}&gpu=t4")
    before = headline(page, "Tesla T4")
    choose(page, "Device", "GeForce RTX 3090 · 24 GB")
    headline(page, "RTX 3090")
    page.go_back()
    assert headline(page, "Tesla T4") == before
    expect(page.get_by_role("combobox", name=re.compile("Device"))).to_have_value("Tesla T4 · 16 GB")


@pytest.mark.exhaustive
def test_refused_keys_leave_the_rest(page: Page, app_url: str):
    page.goto(f"{app_url}/?{SMALL}&gpu=t5&mode=inference")
    headline(page, "Inference with resnet18")
    expect(page.get_by_text("Parts of this link were refused")).to_be_visible()
    expect(page.get_by_text("gpu: given 't5', allowed ")).to_be_visible()


@pytest.mark.exhaustive
def test_downloads_equal_the_table(page: Page, app_url: str):
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "resnet18")
    shown = {
        (row[0], batch): cell
        for row in table(page)[1:]
        for batch, cell in zip(table(page)[0][1:], row[1:], strict=True)
    }
    rows = list(csv.DictReader(io.StringIO(download(page, "CSV"))))
    assert len(rows) == 4  # two dtypes, two batch sizes
    for row in rows:
        number = f"{int(row['process_bytes']) / GIB:.3f}"  # three digits of less than 1 GiB
        assert shown[row["dtype"], row["batch"]] == f"✓\N{NO-BREAK SPACE}{number}"
    assert all(row["link"].startswith(f"{app_url}/?") and " " not in "".join(row) for row in rows)
    script = download(page, "Script")
    assert "ESTIMATED = {'allocated': " in script and "import sizer" not in script
    page.get_by_role("tab", name="Modules").click()
    modules = list(csv.DictReader(io.StringIO(download(page, "Modules (CSV)"))))
    assert sum(int(row["parameters"]) for row in modules) == 11_689_512  # torchvision's count for ResNet-18
    report = json.loads(download(page, "JSON"))
    assert [estimate["peak_allocated_bytes"] for estimate in report["estimates"]] == [
        int(r["peak_allocated_bytes"]) for r in rows
    ]


def download(page: Page, label: str) -> str:
    """The text of the file behind a download button."""
    with page.expect_download() as arrival:
        page.get_by_role("button", name=label).click()
    return arrival.value.path().read_text("utf-8-sig")


@pytest.mark.exhaustive
def test_pasted_config(page: Page, context: BrowserContext, app_url: str):
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "resnet18")
    choose(page, "Model source", "Your config.json")
    field = page.get_by_label("or paste it")
    field.fill(json.dumps(LLAMA))
    field.press("Control+Enter")
    sentence = headline(page, "LlamaForCausalLM")
    expect(page.get_by_text(re.compile(rf"^{LLAMA_PARAMETERS:,}\b"))).to_be_visible()
    link = copied_link(page)
    with context.browser.new_context() as elsewhere:
        other = elsewhere.new_page()
        other.goto(link)
        assert headline(other, "LlamaForCausalLM") == sentence
        assert json.loads(other.get_by_label("or paste it").input_value()) == LLAMA


@pytest.mark.exhaustive
def test_uploaded_config(page: Page, app_url: str):
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "resnet18")
    choose(page, "Model source", "Your config.json")
    upload = {"name": "config.json", "mimeType": "application/json", "buffer": json.dumps(LLAMA).encode()}
    page.get_by_test_id("stSidebar").get_by_test_id("stFileUploaderDropzoneInput").set_input_files(upload)
    headline(page, "LlamaForCausalLM")
    assert json.loads(page.get_by_label("or paste it").input_value()) == LLAMA


@pytest.mark.exhaustive
def test_stop_and_go_on(page: Page, app_url: str):
    page.goto(f"{app_url}/?arch=torchvision:densenet201&dtype=float32,bfloat16&batch=3,5,7")
    page.get_by_role("button", name="Stop", exact=True).click(timeout=ANSWER_MS)
    expect(page.get_by_text("you stopped it")).to_be_visible()
    page.get_by_role("button", name="Go on").click()
    headline(page, "densenet201")


@pytest.mark.exhaustive
def test_other_page_and_back_keeps_the_form(page: Page, app_url: str):
    page.goto(f"{app_url}/?{SMALL}&gpu=t4")
    sentence = headline(page, "Tesla T4")
    page.get_by_role("link", name="About the numbers").click()
    expect(page.get_by_role("heading", name="Devices")).to_be_visible()
    page.get_by_role("link", name="Size a model").click()
    assert headline(page, "Tesla T4") == sentence
    assert "gpu=t4" in page.url


@pytest.mark.exhaustive
def test_fits_a_phone(page: Page, app_url: str):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{app_url}/?{SMALL}")
    headline(page, "resnet18")
    fit(page, 390)
    row = page.get_by_text("Select a cell to see its details.").bounding_box()
    grid = page.get_by_test_id("stFullScreenFrame").filter(has=page.get_by_test_id("stDataFrame")).first
    buttons = grid.get_by_test_id("stElementToolbar").bounding_box()
    assert row and buttons and row["y"] + row["height"] <= buttons["y"], "the table's buttons cover the row above it"
