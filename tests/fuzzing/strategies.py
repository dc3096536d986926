"""What a stranger might write: JSON of all kinds, links with our keys and others, configs with some of their values replaced."""

from __future__ import annotations

import re
from copy import deepcopy
from urllib.parse import quote

from hypothesis import strategies as st

from sizer.catalogue.gpus import GPUS
from sizer.query.keys import KEYS
from tests.architecture.rare_configs import RARE
from tests.architecture.tiny_configs import TINY

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.sampled_from(
        [-1, 0, 1, 3, 2**31, 2**53, 2**63, 1e308, "NaN", "../../etc/passwd", "http://127.0.0.1/", "bfloat16", "\ud800"]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=20), inner, max_size=5),
    max_leaves=20,
)
FAMILIES = [*TINY.values(), *({"model_type": name, **config} for name, config in RARE.items())]


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict:
    """A config of some family with one to three of its values replaced, left out, or added."""
    config = deepcopy(draw(st.sampled_from(FAMILIES)))
    for _ in range(draw(st.integers(1, 3))):
        place = config
        while nested := [one for one in place.values() if isinstance(one, dict) and one]:
            if not draw(st.booleans()):
                break
            place = draw(st.sampled_from(nested))
        key = draw(
            st.sampled_from(sorted(place)) | st.text(max_size=20) | st.sampled_from(["architectures", "text_config"])
        )
        if draw(st.booleans()):
            place[key] = draw(JSON)
        else:
            place.pop(key, None)
    return config


WORDS = sorted({word for key in KEYS.values() for word in re.findall(r"[\w:@.-]+", key.allowed)})
VALUES = (
    st.sampled_from(WORDS)
    | st.sampled_from(["torchvision:resnet50", "hf:llama-3.1-8b", "config:eJw", "hub:a/b@main", *GPUS])
    | st.integers(-(10**30), 10**30).map(str)
    | st.lists(st.integers(0, 600).map(str) | st.sampled_from(WORDS), max_size=4).map(",".join)
    | st.text(max_size=30)
)


@st.composite
def queries(draw: st.DrawFn) -> str:
    """A link's query: our keys mostly, values that they allow among others that they do not, encoded or as they are."""
    keys = st.sampled_from(sorted(KEYS)) | st.text(max_size=8)
    pairs = draw(st.lists(st.tuples(keys, VALUES), max_size=8))
    if draw(st.booleans()):
        pairs.append(
            ("arch", draw(st.sampled_from(["torchvision:resnet50", "hf:llama-3.1-8b", "hf:bert-base-uncased"])))
        )
    encode = draw(st.sampled_from([lambda text: quote(text.encode(errors="replace")), str]))
    return draw(st.sampled_from(["", "?"])) + "&".join(f"{key}={encode(value)}" for key, value in pairs)
