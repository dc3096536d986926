"""Objects that the garbage collector leaves alone, since this process has frozen them for good."""

from __future__ import annotations

import gc

_frozen = False


def freeze() -> None:
    """Freeze all objects that there are, until this process ends."""
    global _frozen
    gc.freeze()
    _frozen = True


def is_frozen() -> bool:
    """Return whether objects are frozen. `gc.get_freeze_count` looks at each of them, a tenth of a second for a job's."""
    return _frozen or gc.get_freeze_count() > 0
