"""The oldest versions that are tested are those that are promised."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from sizer.base.versions import READ, format_version
from sizer.catalogue.adapters import PACKAGE
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import BITSANDBYTES
from sizer.estimating.cautions import versions
from tests.oldest import DEPENDED_ON, REQUIREMENTS, constraints, floors

EXTRAS = ("diffusers", "torchao")
TEXT = REQUIREMENTS.read_text(encoding="utf-8")


def test_constraints_are_the_floors() -> None:
    text = (
        "# torch>=1.0,<2 was long ago\ntorch>=2.11,<3\ntorchvision>=0.26.1,<1\ntimm>=1.0.25,<2\ntransformers>=5.17,<6\n"
        "pandas>=2.2,<4\npeft>=0.21,<1\nbitsandbytes>=0.50,<1\nfla-core>=0.6,<1\n"
    )
    assert constraints(text) == [
        *(
            "torch==2.11.0",
            "torchvision==0.26.1",
            "timm==1.0.25",
            "transformers==5.17.0",
            "peft==0.21.0",
            "bitsandbytes==0.50.0",
            "fla-core==0.6.0",
        )
    ]
    with pytest.raises(KeyError, match="torchvision"):
        constraints("torch>=2.11,<3\n")


def test_rules_of_the_oldest_pytorch_that_is_installed_were_read() -> None:
    assert constraints(TEXT)[0] in {f"torch=={format_version(version)}.0" for version in READ}


def test_every_version_that_answers_depend_on_is_held() -> None:
    required = {source.package for source in SOURCES.values()} & set(floors(TEXT))  # diffusers is an extra
    assert set(DEPENDED_ON) == {"torch", *required, PACKAGE, BITSANDBYTES, "fla-core"}
    assert {"sizer", "torch", "torchvision", "transformers"} <= set(versions()) <= {*DEPENDED_ON, *EXTRAS, "sizer"}


def test_what_is_installed_is_not_older() -> None:
    as_numbers = lambda text: [int(part) for part in text.split("+")[0].split(".")[:2]]  # noqa: E731
    for name in set(versions()) - {*EXTRAS, "sizer"}:
        assert as_numbers(version(name)) >= as_numbers(floors(TEXT)[name])
