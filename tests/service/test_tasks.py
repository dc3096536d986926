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


def test_names_of_any_length_are_kept_as_digests():
    class Named(Recorded):
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, bytes] = {}

        def keep(self, name: str, data: bytes) -> None:
            self.kept[name] = data

    channel, name = Named(), "depths of " + "a very long config " * 1000
    tasks.ServerStore({"kept": {}}, channel).put(name, b"1")
    assert [len(one) for one in channel.kept] == [32 + 1 + 64]  # the scope's digest, and the name's
    assert tasks.ServerStore({"kept": channel.kept}, channel).get(name) == b"1"
