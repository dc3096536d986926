"""The tab "At the peak": asked for by a switch, then the sentence, the modules, the tensors and the files."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace

import pytest
from PIL import Image

from sizer.base.errors import TraceError
from sizer.base.units import format_bytes
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.peak import ModuleBytes
from sizer.ui.peak_view import DEPTH, WHOLE, boxes, icicle_chart, ink_on, modules_frame, tensors_frame
from sizer.ui.picture import HEIGHT, WIDTH, Summary, alt_text, draw_picture
from sizer.ui.styling import COLOURS
from tests.ui.conftest import install, open_tab, texts
from tests.ui.reports import peak_for, report_for
from tests.ui.specs import layers
from tests.ui.test_page import look_at

REQUEST = Request(source="torchvision", name="resnet50", dtypes=("float32",), batches=(32,))
SUMMARY = Summary(
    title="resnet50", work="Training, float32, batch 32", verdict="it fits", link="/?arch=torchvision:resnet50"
)


def switch(page):
    open_tab(page, "At the peak")
    return next(toggle for toggle in page.toggle if toggle.label.startswith("Trace every tensor"))


# ------------------------------------------------------------------------------------------------------------ on the page


def test_nothing_is_traced_before_it_is_asked_for(client, open_page):
    page = open_page()
    assert client.peaks == []
    assert not switch(page).value


def test_the_cell_in_focus_is_traced_and_shown(client, open_page):
    page = open_page()
    switch(page).set_value(True).run()
    (asked,) = map(parse_query, client.peaks)
    assert (asked.dtypes, asked.batches, asked.focus) == (("float32",), (128,), None)
    found = peak_for(asked)
    assert found.sentence in texts(page)
    charts = [json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart")]
    assert "Bytes at the peak by module, children under their parents" in [chart["description"] for chart in charts]
    labels = [button.proto.label for button in page.get("download_button")]
    assert labels.count("Memory snapshot") == labels.count("Script") == labels.count("Picture") == 1


def test_another_cell_is_traced_when_it_is_looked_at(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32,bfloat16", batch="8,16")
    switch(page).set_value(True).run()
    look_at(page, "bfloat16", 16)
    assert [parse_query(query).dtypes for query in client.peaks] == [("float32",), ("bfloat16",)]


def test_there_is_no_snapshot_without_cudas_allocator(client, open_page):
    page = open_page(arch="torchvision:resnet50", dtype="float32", batch="8", gpu="cpu")
    switch(page).set_value(True).run()
    assert "Memory snapshot" not in [button.proto.label for button in page.get("download_button")]


def test_why_it_cannot_be_traced_is_said(client, open_page, monkeypatch):
    page = open_page()
    monkeypatch.setattr(type(client), "_peak", lambda self, request: failing())
    install(monkeypatch, client)
    switch(page).set_value(True).run()
    assert "It could not be traced: aten.where needs values" in texts(page)


def failing() -> None:
    raise TraceError("aten.where needs values")


# -------------------------------------------------------------------------------------------------------------- the parts


def test_tables_hold_all_bytes():
    found = peak_for(REQUEST)
    tensors, modules = tensors_frame(found), modules_frame(found)
    assert tensors["GiB"].sum() * 2**30 + found.rest_bytes == pytest.approx(found.allocated_bytes)
    assert modules.iloc[0]["Module"] == "(root)"
    assert modules["Own, GiB"].sum() * 2**30 == pytest.approx(found.allocated_bytes)
    assert "Activation" in modules.columns


def row(path: str, **sizes: int) -> ModuleBytes:
    return ModuleBytes(path=path, by_category={name.replace("_", " "): size for name, size in sizes.items()})


def test_children_lie_side_by_side_under_their_parents():
    found = {
        box.path: box for box in boxes([row("", input=100), row("b.10", parameter=300), row("b.9", activation=600)])
    }
    assert [(box.path, box.depth, box.start, box.end) for box in found.values()] == [
        (WHOLE, 0, 0, 1000),
        ("b", 1, 0, 900),
        ("b.9", 2, 0, 600),
        ("b.10", 2, 600, 900),
    ]
    assert (found["b"].colour, found["b.10"].colour) == (COLOURS["activation"], COLOURS["parameter"])
    assert found["b"].holds == "activation 600 B, parameter 300 B"


def test_deep_and_narrow_modules_are_left_to_the_table():
    deep = row(".".join("abcdefgh"), activation=10**6)
    assert max(box.depth for box in boxes([deep, row("z", input=1)])) == DEPTH - 1
    assert "z" not in {box.path for box in boxes([deep, row("z", input=1)])}
    assert boxes([]) == []
    assert not any(layers(icicle_chart([])))


def test_the_strip_below_a_name_is_as_wide_as_its_box():
    found = peak_for(REQUEST)
    named, strips, labels = layers(icicle_chart(found.modules))
    assert named == labels
    widths: Counter = Counter()
    for strip in strips:
        widths[strip["module"]] += strip["end"] - strip["start"]
    assert {row["module"]: pytest.approx(row["end"] - row["start"]) for row in named} == widths


@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
def test_labels_are_readable_on_every_colour(colour):
    def light(text: str) -> float:
        channels = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    pair = sorted((light(colour), light(ink_on(colour))))
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


# ------------------------------------------------------------------------------------------------------------- the picture


@pytest.mark.parametrize("gpu", ["a100-80gb", "rtx-4060-8gb"])
def test_the_picture_holds_every_category_in_its_colour(gpu):
    request = replace(REQUEST, gpu=gpu, batches=(128,))
    report = report_for(request)
    (estimate,) = report.estimates
    image = Image.open(io.BytesIO(draw_picture(SUMMARY, estimate, report.gpu, peak_for(request))))
    assert image.size == (WIDTH, HEIGHT)
    assert image.format == "PNG"
    colours = {colour for _, colour in image.getcolors(2**20)}
    for category, size in estimate.at_peak.items():
        if size:
            red, green, blue = (int(COLOURS[category][place : place + 2], 16) for place in (1, 3, 5))
            assert (red, green, blue) in colours, category


def test_a_long_name_stays_inside_the_picture():
    request = replace(REQUEST, batches=(8,))
    report, long = report_for(request), replace(SUMMARY, title="x" * 500, link="y" * 5000)
    data = draw_picture(long, report.estimates[0], report.gpu, peak_for(request))
    image = Image.open(io.BytesIO(data)).convert("RGB")
    edge = image.crop((WIDTH - 40, 0, WIDTH, HEIGHT)).getcolors(2**20)
    assert [colour for _, colour in edge] == [(255, 255, 255)]


def test_the_picture_has_its_words_beside_it():
    report = report_for(REQUEST)
    (estimate,) = report.estimates
    told = alt_text(SUMMARY, estimate, report.gpu)
    assert told.startswith(
        f"resnet50, Training, float32, batch 32: {format_bytes(estimate.process_bytes)} for the process"
    )
    assert "it fits" in told
    assert all(category in told for category, size in estimate.at_peak.items() if size)
