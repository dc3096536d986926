"""The oldest supported versions, as constraints for pip: `pip install -r requirements.txt -c <(python -m tests.oldest)`.

They are the floors of requirements.txt, of the packages whose versions an answer depends on.
"""

from __future__ import annotations

import re
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements.txt"
DEPENDED_ON = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "peft",
    "bitsandbytes",
    "fla-core",
)  # sizer.estimating.cautions.versions, where all are installed

_FLOOR = re.compile(r"^([A-Za-z0-9_-]+)>=([0-9]+)\.([0-9]+)(?:\.([0-9]+))?,", re.MULTILINE)


def floors(text: str) -> dict[str, str]:
    """Package → its oldest allowed release, of every requirement that has a floor."""
    return {name: f"{major}.{minor}.{patch or 0}" for name, major, minor, patch in _FLOOR.findall(text)}


def constraints(text: str) -> list[str]:
    """A line for each package that answers depend on. Raises KeyError where one has no floor."""
    oldest = floors(text)
    return [f"{name}=={oldest[name]}" for name in DEPENDED_ON]


if __name__ == "__main__":
    print("\n".join(constraints(REQUIREMENTS.read_text(encoding="utf-8"))))
