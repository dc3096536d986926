"""Reading a link: every refused key is named, every other key survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.query.text import MAX_KEYS, format_query, parse_query
from sizer.ui.links import read_link

RESNET = Request(source="torchvision", name="resnet50")


def keys(query: str) -> list[str]:
    return [refusal.key for refusal in read_link(query).refusals]


def test_empty_is_the_default_page():
    assert read_link("").request == replace(RESNET, dtypes=("float32", "amp-bfloat16"), batches=(1, 8, 32, 128))
    assert read_link("").refusals == ()


@pytest.mark.parametrize("complete", [False, True])
def test_good_links_are_taken_whole(complete):
    request = Request(source="hf", name="gpt2", dtypes=("float16",), batches=(3,), sequence_length=7, gpu="t4")
    link = read_link(format_query(request, complete=complete))
    assert (link.request, link.refusals) == (request, ())


@pytest.mark.parametrize(
    ("query", "refused", "survivor"),
    [
        ("arch=torchvision:resnet18&batch=nan&gpu=t4", ["batch"], "arch=torchvision:resnet18&gpu=t4"),
        ("arch=torchvision:resnet18&batch=1&batch=2", ["batch"], "arch=torchvision:resnet18"),
        ("arch=torchvision:resnet18&GPU=t4", ["'GPU'"], "arch=torchvision:resnet18"),
        ("arch=torchvision:resnet18&gpu", ["gpu"], "arch=torchvision:resnet18"),
        ("arch=X!&gpu=y&optimizer=sgd", ["arch", "gpu"], "arch=torchvision:resnet50&optimizer=sgd"),
        ("gpu=t4", ["arch"], "arch=torchvision:resnet50&gpu=t4"),
        # each value is good, the two do not go together: the key that the refusal names gives way
        ("arch=torchvision:resnet18&head=BertModel", ["head"], "arch=torchvision:resnet18"),
        (
            "arch=torchvision:resnet18&optimizer=muon&optimizer_impl=fused",
            ["optimizer_impl"],
            "arch=torchvision:resnet18&optimizer=muon",
        ),
        # a refused model gives way to one that takes the other keys, of its own source first
        ("arch=hf:no-such&seq=9", ["arch"], "arch=hf:gpt2&seq=9"),
        ("arch=hf:no-such&gpu=t4", ["arch"], "arch=hf:gpt2&gpu=t4"),
        ("arch=torchvision:no%20such&seq=9&gpu=t4", ["arch"], "arch=hf:gpt2&seq=9&gpu=t4"),
        ("?arch=torchvision:resnet18&x=1", ["'x'"], "arch=torchvision:resnet18"),
    ],
)
def test_refused_keys_give_way(query, refused, survivor):
    assert keys(query) == refused
    assert read_link(query).request == parse_query(survivor)


def test_link_refused_as_a_whole_says_so():
    link = read_link("&".join(f"k{n}=1" for n in range(MAX_KEYS + 1)))
    assert link.request == RESNET
    assert [str(refusal) for refusal in link.refusals] == [
        f"query has too many keys: given {MAX_KEYS + 1}, allowed at most {MAX_KEYS}, each key once; drop the rest"
    ]
    assert len(KEYS) <= MAX_KEYS
