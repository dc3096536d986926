"""An app's side of the board: replaces `sizer.service.supervisor.Connection` to a local job server by workers on any node."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError, ResponseError

from sizer.base.errors import JobError, quote
from sizer.processes.wire import error_to_wire, from_line
from sizer.service.access import access_of
from sizer.service.broker.board import ENDS, Board, connect, digest_of, unpack
from sizer.service.broker.celery_turns import NEXT, cost_of, line_of, make_celery, queue_of, work_of
from sizer.service.edition import code_digest, edition_of
from sizer.service.messages import texts_of
from sizer.service.settings import Settings

LOOK_SECONDS, BLOCK_MS, IDLE_SECONDS = 1.0, 50, 0.05
MOST_PUTS = 3  # in its line: a question that has lost this many workers fails
TURN_AGAIN_SECONDS = 10.0  # that a question may be first in its line, before its turn is assumed lost
CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Question:
    """A question of this app, from its request to the last word of its answer."""

    number: int
    digest: str
    message: dict
    visitor: str
    seen: str = "0"  # the number of the last forwarded entry of its answer
    line: str = ""
    puts: int = 0
    first_since: float | None = None


class BrokerConnection:
    """Asks workers instead of a job server. `receive` gets a server's messages, `lost` the reason of the end.

    It is ready when there is a worker that runs the same code. While Redis is down it retries; `heard_at` is the time of the
    last answer.
    """

    def __init__(
        self,
        url: str,
        settings: Settings,
        receive: Callable[[BrokerConnection, dict], None],
        lost: Callable[[BrokerConnection, JobError], None],
    ):
        self.ready = False
        self.heard_at = time.monotonic()
        self._settings, self._receive, self._lost = settings, receive, lost
        self._board, self._celery = Board(connect(url)), make_celery(url)
        self._reader = secrets.token_hex(8)
        self._outbox: queue.SimpleQueue[dict] = queue.SimpleQueue()
        self._questions: dict[int, _Question] = {}
        self._code = code_digest()
        self._edition, self._versions = "", ""  # of the workers in use
        self._looked = -LOOK_SECONDS  # when it last looked for workers, and after its questions
        self._ended, self._failure = threading.Event(), JobError("the connection to the broker was closed")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, message: dict) -> None:
        """Queue a message; never blocks."""
        self._outbox.put(message)

    def close(self) -> None:
        """Leave every question, and end."""
        self._ended.set()
        self._thread.join(CLOSE_SECONDS)

    def kill(self, failure: JobError) -> None:
        """End; `failure` is the reason that `lost` gets."""
        self._failure = failure
        self._ended.set()

    # -------------------------------------------------------------------------------------------------- on its own thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._work()
        except Exception as error:  # any kind of error: waiters must be told
            self._failure = JobError(f"a message of the broker was not understood ({quote(str(error))})")
        with contextlib.suppress(RedisError):
            for question in self._questions.values():
                self._board.leave(question.digest, self._reader)
        self._lost(self, self._failure)

    def _work(self) -> None:
        """Do pending work, and wait a moment. If Redis is down, the supervisor decides when to give up, by `heard_at`."""
        try:
            if time.monotonic() >= self._looked + LOOK_SECONDS:
                self._look_for_workers()
                self._look_after_questions()
                self._looked = time.monotonic()
            if self.ready:
                self._take_messages()
                self._read_answers()
                self.heard_at = time.monotonic()
        except (RedisError, OperationalError) as error:
            _log.warning("the broker cannot be reached: %s", error)
            self._ended.wait(LOOK_SECONDS)
        self._ended.wait(IDLE_SECONDS if not self._questions else 0)

    def _look_for_workers(self) -> None:
        workers = [worker for worker in self._board.workers() if worker.code == self._code]
        editions = Counter(worker.edition for worker in workers)
        if not editions or self._edition in editions:
            return
        if self.ready:  # none of the workers in use is left; their questions are asked again
            return self.kill(JobError("the workers were replaced", todo="try again"))
        self._edition = max(editions, key=lambda edition: editions[edition])
        chosen = next(worker for worker in workers if worker.edition == self._edition)
        self._versions = edition_of(chosen.versions)
        self.ready = True
        self._receive(self, {"ready": chosen.versions, "missing": chosen.missing})

    def _take_messages(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._outbox.get_nowait()
                if "run" in message:
                    self._ask(message)
                elif question := self._questions.pop(message.get("cancel", -1), None):
                    self._board.leave(question.digest, self._reader)

    def _ask(self, message: dict) -> None:
        texts = texts_of(message)
        anew = secrets.token_hex(8) if message.get("anew") else None
        address, session = message["visitor"]
        question = _Question(
            number=message["run"],
            digest=digest_of((self._edition, *texts.values(), anew)),
            message={**texts, "visitor": message["visitor"]},
            visitor=address or session,
        )
        self._questions[question.number] = question  # put in its line at the next look, if Redis is down now
        self._put(question)

    def _put(self, question: _Question) -> None:
        """Put a question in the line for its cost, unless it is there already, and send a turn."""
        asked = question.message
        access = access_of(asked["task"], asked["query"], asked["config_text"], self._versions)
        cost = cost_of(asked, self._board.pace(work_of(asked["task"], access.architecture)) if access else None)
        question.line = line_of(queue_of(cost), self._edition)
        if self._board.put(
            question.digest, question.line, asked, cost=cost, visitor=question.visitor, reader=self._reader
        ):
            question.puts += 1
            self._send_turn(question)

    def _send_turn(self, question: _Question) -> None:
        self._celery.send_task(NEXT, queue=question.line, retry=False)
        question.first_since = None

    def _look_after_questions(self) -> None:
        """Put questions without a worker in the line again, and report the position of the others."""
        for question in list(self._questions.values()):
            try:
                place = self._board.look(question.digest, question.line)
            except ResponseError:
                self._fail(question, "the broker's data on it are not a question")
                continue
            if place.ahead is not None:
                self._wait(question, place.ahead)
            elif not place.taken:  # or its answer is there already: then it is not put
                if question.puts >= MOST_PUTS:
                    self._fail(question, f"the workers that had it have ended, {question.puts} times")
                else:
                    self._put(question)

    def _wait(self, question: _Question, ahead: int) -> None:
        self._receive(self, {"id": question.number, "progress": f"waiting for a free place ({ahead} before this one)"})
        now = time.monotonic()
        question.first_since = None if ahead else question.first_since or now
        if question.first_since is not None and now - question.first_since > TURN_AGAIN_SECONDS:
            self._send_turn(question)

    def _read_answers(self) -> None:
        asked = {question.digest: question for question in self._questions.values()}
        if not asked:
            return
        seen = {digest: question.seen for digest, question in asked.items()}
        try:
            found = self._board.read(seen, block_ms=BLOCK_MS)
        except ResponseError:  # a key of another kind fails the whole read: find out which question it belongs to
            found = self._read_one_by_one(asked)
        for digest, entries in found.items():
            for entry in entries:
                self._hand_on(asked[digest], *entry)

    def _read_one_by_one(self, asked: Mapping[str, _Question]) -> dict[str, list[tuple[str, str, bytes]]]:
        """Return new messages of each answer, read one by one, so that only a question with an unreadable answer fails."""
        found: dict[str, list[tuple[str, str, bytes]]] = {}
        for digest, question in asked.items():
            try:
                found |= self._board.read({digest: question.seen}, block_ms=1)
            except ResponseError:
                self._fail(question, "the broker's data on its answer are invalid")
        return found

    def _hand_on(self, question: _Question, number: str, kind: str, data: bytes) -> None:
        """Forward a worker's message on a question in a job server's format."""
        question.seen = number
        try:
            content = {kind: from_line(unpack(data, self._settings.result_bytes))[kind]}
        except (ValueError, KeyError):
            return self._fail(question, "the broker's data on its answer are invalid")
        if kind in ENDS:
            del self._questions[question.number]
            self._board.leave(question.digest, self._reader)
        self._receive(self, {"id": question.number, **content})

    def _fail(self, question: _Question, why: str) -> None:
        self._questions.pop(question.number, None)
        error = JobError(f"this question could not be answered: {why}", todo="try again")
        self._receive(self, {"id": question.number, "error": error_to_wire(error)})
        with contextlib.suppress(ResponseError):
            self._board.leave(question.digest, self._reader)
