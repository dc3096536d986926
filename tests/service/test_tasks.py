"""What jobs send before their result."""

from __future__ import annotations

from sizer.service import tasks

QUERY = "arch=torchvision:squeezenet1_1&mode=inference&image=64&dtype=float32,bfloat16&batch=1,2,3&focus=float32:2"


class Recorded:
    """A channel that keeps what is said."""

    def __init__(self) -> None:
        self.partials: list[dict] = []

    def partial(self, value: dict) -> None:
        self.partials.append(value)

    def progress(self, text: str) -> None:
        pass

    def keep(self, name: str, data: bytes) -> None:
        pass


def test_counts_and_the_first_and_the_last_cells_are_sent_at_once(monkeypatch):
    monkeypatch.setattr(tasks, "PARTIAL_SECONDS", 1e9)
    channel = Recorded()
    result = tasks.run({"task": "estimate", "query": QUERY, "config_text": None, "kept": {}}, channel)
    counts, first, others = channel.partials
    assert counts["model"] == result["model"]
    assert counts["estimates"] == []
    assert [(row["dtype"], row["batch"]) for row in first["estimates"]] == [("float32", 2)]
    assert len(others["estimates"]) == 5
    assert [row["dtype"] for row in others["max_batch"]] == ["float32"]
    assert len(result["estimates"]) == 6
