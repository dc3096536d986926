"""Messages to a job server: the texts that an answer depends on, and how much work a question is."""

from __future__ import annotations

from sizer.base.errors import RequestError
from sizer.query.text import parse_query

# "part" belongs to a task that can be split: "2/3" is the second of three parts. For "levers" it is None or COMPILED, for
# "estimate" None or STOPS.
COMPILED = "compiled"  # with the lever that compiles eager code
STOPS = "stops"  # a dtype ends after two batch sizes that do not fit
TEXTS = ("task", "query", "config_text", "measured", "part")


def texts_of(message: dict) -> dict[str, str | None]:
    """Return the texts of a message, None for missing ones. Raises ValueError if one is not a text, or the task is missing."""
    texts = {name: message.get(name) for name in TEXTS}
    if not isinstance(texts["task"], str) or any(not isinstance(text, str | None) for text in texts.values()):
        raise ValueError(f"{', '.join(TEXTS)} must be texts, and the task must be there")
    return texts


# ---------------------------------------------------------------------------------------------------------------- cost


def cells_of(job: dict) -> int:
    """Return the number of cells (dtype and batch size) of a job."""
    try:
        request = parse_query(job["query"] or "")
    except RequestError:  # the job reports the error; or it has another subject
        return 1
    return len(request.dtypes) * len(request.batches)
