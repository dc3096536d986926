"""Access of a question to stored results, for reading and writing.

A job runs code on untrusted input, so a name that a job gives to a result proves nothing. The server derives the scopes of a
question (`sizer.estimating.scopes`) from its query, and decides by them:

    a name under one of the question's scopes    is written unchanged, for all questions with that scope
    any other name                               is prefixed with the scope of the question's work, for questions with that scope
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sizer.base.errors import RequestError
from sizer.estimating.scopes import DIGEST_LENGTH, digest_scope, module_scope_of, work_scope_of
from sizer.query.request import Request
from sizer.query.text import parse_query

TRY_OTHER_CHOICES = ("levers", "limits", "ranks", "budget")  # tasks that answer other questions on the way
_NAME = re.compile(rf"[0-9a-f]{{{DIGEST_LENGTH}}}-[0-9a-f]{{64}}")
_BESIDE = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The names that the jobs of one question may read and write.

    `scopes` are digests; the first one is that of the question's work. A question that `reads_all` is given results of other
    scopes too, by their own names.
    """

    architecture: str
    scopes: tuple[str, ...]
    reads_all: bool

    def stored_name(self, name: str) -> str:
        """Return the name under which a result of this question's jobs is stored."""
        if _NAME.fullmatch(name) and name.startswith(self.scopes):
            return name
        return f"{self._beside}{name}"

    def reads(self, stored: str) -> bool:
        """Return True if this question can use a stored result."""
        if _BESIDE in stored:
            return stored.startswith(self._beside)
        return self.reads_all or stored.startswith(self.scopes)

    def readable(self, stored: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the stored results that this question can use, by the names that its jobs know."""
        own = {name: data for name, data in stored.items() if self.reads(name)}
        beside = {name.removeprefix(self._beside): data for name, data in own.items() if _BESIDE in name}
        return beside | {name: data for name, data in own.items() if _BESIDE not in name}

    @property
    def _beside(self) -> str:
        return f"{self.scopes[0]}{_BESIDE}"


def access_of(task: str, query: str | None, config_text: str | None, versions: str) -> Access | None:
    """Return the access of a question; None if it has no query, or if the query is refused.

    Args:
        task: the name of the question's task.
        query: the question's query.
        config_text: the config of an architecture from the hub.
        versions: the edition of everything that answers depend on (`sizer.service.edition.edition_of`).
    """
    try:
        request = parse_query(query) if query else None
    except RequestError:
        return None
    if request is None:
        return None
    return Access(
        architecture=digest_architecture(request, config_text, versions),
        scopes=(digest_scope(work_scope_of(request)), digest_scope(module_scope_of(request))),
        reads_all=task in TRY_OTHER_CHOICES,
    )


def digest_architecture(request: Request, config_text: str | None, versions: str) -> str:
    """Return a digest of the architecture that a request names, by the given versions."""
    parts = (versions, request.source, request.name, request.revision or "", request.config or "", config_text or "")
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()
