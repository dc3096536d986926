"""The worker's program: answer one message, and end without the interpreter's clean-up, which can take longer than the answer.

    stdin    {"task": "devices", "query": ..., "config_text": null, "part": "1/2"}
    stdout   {"progress": ...}, {"partial": {...}}, {"result": {...}} or {"error": ...}
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

from sizer.base.errors import SizerError
from sizer.processes.child import write
from sizer.processes.environment import HOME_VARIABLE
from sizer.processes.wire import error_to_wire, from_line, to_line
from sizer.service.local.answering import answer
from sizer.service.settings import Settings

Say = Callable[[dict], None]


def serve(reply: Callable[[dict, Settings, Say], dict]) -> None:
    """Write the reply to the message on stdin, or its error, and end the process.

    `reply` is called with the message, the settings of the command line and a function that writes a message.
    """
    settings = Settings.from_arguments(sys.argv[1:])
    output = os.dup(1)
    os.dup2(2, 1)  # a library's prints go to stderr, not between the answers

    def say(message: dict) -> None:
        write(output, to_line(message))

    try:
        say(reply(from_line(sys.stdin.buffer.readline()), settings, say))
    except SizerError as error:
        say({"error": error_to_wire(error)})
    except BrokenPipeError:
        pass  # the client has ended
    if home := os.environ.get(HOME_VARIABLE):
        shutil.rmtree(home, ignore_errors=True)
    sys.stderr.flush()
    os._exit(0)


def _reply(message: dict, settings: Settings, say: Say) -> dict:
    def show(text: str) -> None:
        say({"progress": text})

    def show_part(data: dict) -> None:
        say({"partial": data})

    found = answer(
        message["task"], message["query"], message["config_text"], settings, show, show_part=show_part, part=message["part"]
    )
    return {"result": found}


if __name__ == "__main__":
    serve(_reply)
