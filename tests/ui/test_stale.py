"""The last answer is greyed out while a new question has no figures, and after an error."""

from __future__ import annotations

from tests.ui.conftest import markup, texts

LINK = {"arch": "torchvision:resnet50", "dtype": "float32", "batch": "32", "gpu": "t4"}


def last_answers(page) -> list[str]:
    return [text for text in texts(page) if text.startswith("The last answer, on another question: ")]


def test_an_error_keeps_the_last_answer_under_its_own_name(client, open_page):
    page = open_page(**LINK)
    assert page.main.title and not last_answers(page)
    page.text_input(key="batch").set_value("none").run()
    assert page.error and not page.main.title
    (named,) = last_answers(page)
    assert "resnet50 · Training · float32 · batch 32" in named
    assert any("Training resnet50 at batch 32" in text for text in [markup(page)])
    assert [metric.label for metric in page.metric] == ["Process", "Allocated", "Reserved", "Parameters"]
    page.text_input(key="batch").set_value("16").run()
    assert page.main.title and not last_answers(page)
