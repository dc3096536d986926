"""A text of any known kind as a question: configs, commands and code."""

from __future__ import annotations

from sizer.base.errors import ConfigError, quote
from sizer.pasted.formats import read_config
from sizer.pasted.inference import read_inference, server_command
from sizer.pasted.model import read_model
from sizer.pasted.named_models import read_named_model
from sizer.pasted.question import Line, Question
from sizer.pasted.sentence import read_sentence
from sizer.serving.launch import is_launch, read_launch


def read_question(text: str, gpu: str | None) -> Question:
    """Return the question of a training config, a server's command, code that runs a model, or a model's config or name.

    Args:
        text: The text, such as the content of a file.
        gpu: Key of the device; values that it does not support are left out.

    Raises:
        ConfigError: The text is none of them.
    """
    try:
        return read_config(text, gpu)
    except ConfigError:
        found_call = server_command(text)
        if found_call is None and (not is_launch(text) or _is_in_words(text)):
            found = read_inference(text) or read_named_model(text) or read_model(text) or read_sentence(text)
            if found is None:
                raise
            return found
    command, unread, offline = found_call or (text, (), False)
    launch = read_launch(command)
    arch = {} if launch.arch is None else {"arch": launch.arch}
    unknown = f"the model {quote(launch.model)} is not a repository" if launch.model else "the command names no model"
    return Question(
        title=launch.title,
        kind="command",
        items=arch | dict(launch.items) | ({"api": "offline"} if offline else {}),
        read=tuple(Line(given=given, means=means) for given, means in launch.read),
        assumed=() if arch else (f"{unknown}: the model of the form is kept",),
        unmatched=(*launch.unmatched, *(f"{name}: its value is not in the text" for name in unread)),
        irrelevant=launch.irrelevant,
    )


def _is_in_words(text: str) -> bool:
    """Return True for a command of a server without options in which further words follow the model's name."""
    return len(text.split()) > 3 and " -" not in text and "\n" not in text.strip() and "=" not in text
