"""Log lines as JSON: SIZER_LOG=json. Of jobs they tell the task, the outcome and the seconds, never the question."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

LOG_VARIABLE = "SIZER_LOG"  # "json"; anything else leaves logging as it is
FACTS = ("task", "outcome", "waited_seconds", "ran_seconds")  # what a record may bring beside its message


class JsonFormatter(logging.Formatter):
    """One line for each record: time (UTC), level, logger, message and the facts that came with it, where it went wrong."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FACTS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging() -> None:
    """Write every log line of this process as JSON to standard error, where the environment asks for it."""
    if os.environ.get(LOG_VARIABLE, "").strip().lower() != "json":
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    for name in list(logging.root.manager.loggerDict):  # Streamlit and uvicorn have handlers of their own
        logger = logging.getLogger(name)
        if logger.handlers:
            logger.handlers.clear()
            logger.propagate = True
