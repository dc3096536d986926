"""Room in the cache of `re` for all names that a config leaves unquantised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

MOST_PATTERNS = 20_000  # a config holds no more values (sizer.base.config_json)


@contextmanager
def many_patterns() -> Iterator[None]:
    """Keep all compiled patterns of a config in the cache of `re` within the context.

    transformers matches every layer with every name that is left out. GLM-5-FP8 leaves out 712 names, and `re` keeps 512 patterns:
    without more room it compiles each pattern anew for each layer.
    """
    with mock.patch.object(re, "_MAXCACHE", MOST_PATTERNS):
        yield
