"""A worker: a node's confined job server, which answers questions from the board.

    SIZER_BROKER=redis://... python -m sizer.service.broker.worker [--queues short,long]

It answers as many questions at once as its job server runs jobs. The broker's password is not passed to the job server, whose
environment is an allow-list. On SIGTERM it releases its questions.
"""

from __future__ import annotations

import argparse
import logging
import queue
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import replace

from celery import Task
from celery.signals import worker_shutting_down
from redis.exceptions import RedisError

from sizer.base.errors import JobError
from sizer.processes.wire import error_to_wire, to_line
from sizer.service.access import Access, access_of
from sizer.service.broker.board import ENDS, Board, Worker, connect, digest_of
from sizer.service.broker.celery_turns import NEXT, QUEUES, line_of, make_celery, work_of
from sizer.service.edition import code_digest, edition_of
from sizer.service.messages import cells_of, texts_of
from sizer.service.monitoring import set_up_logging
from sizer.service.settings import Settings
from sizer.service.supervisor import Connection, Supervisor
from sizer.service.variables import BROKER_VARIABLE, broker_url

BEAT_SECONDS, ANNOUNCE_SECONDS = 0.5, 2.0
LOST = {"lost": True}  # instead of a message: the job server has ended

_log = logging.getLogger(__name__)


class Answering:
    """Answers questions of the board by a job server, which is replaced when it ends. For use from any thread."""

    def __init__(self, board: Board, settings: Settings):
        self._board, self._settings = board, settings
        self._token = secrets.token_hex(16)
        self._inboxes: dict[int, queue.SimpleQueue[dict]] = {}
        self._ready, self._ending = threading.Event(), threading.Event()
        self._ready_message: dict | None = None  # the first job server's description of itself
        self._versions = ""
        self._failure: JobError | None = None
        self._supervisor = Supervisor(settings, receive=self._receive, lost=self._lost, restarted=lambda: None)

    def start(self) -> str:
        """Start the job server, and tell the board of this worker; its edition, a digest of all that its answers depend on.

        Raises JobError if it cannot be started.
        """
        self._supervisor.connection()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        assert self._ready_message is not None, "it is ready"
        self._versions = edition_of(self._ready_message["ready"])
        edition = digest_of([self._versions])[:16]
        threading.Thread(target=self._announce, args=(edition,), daemon=True).start()
        return edition

    def end(self) -> None:
        """Give all questions back."""
        self._ending.set()

    def close(self) -> None:
        """End the job server."""
        self.end()
        self._supervisor.close()

    # --------------------------------------------------------------------------------------------------- one question

    def answer_next(self, line: str) -> None:
        """Answer the next question of a line; do nothing if there is none."""
        if self._ending.is_set() or (digest := self._board.take(line, self._token)) is None:
            return
        try:
            question = self._question(digest)
            if question is not None:
                self._answer(digest, question)
        finally:
            self._board.give_back(digest, self._token)

    def _question(self, digest: str) -> dict | None:
        """Return a question in a job server's format; None if it has expired, or was refused."""
        try:
            return checked(self._board.question(digest, self._settings.request_bytes))
        except ValueError as error:
            refused = JobError(f"this question was refused by a worker: {error}")
            self._say(digest, {"error": error_to_wire(refused)})
            return None

    def _answer(self, digest: str, question: dict) -> None:
        connection = self._supervisor.connection()
        if connection is None:  # it restarts in a moment; the asker puts the question again
            return
        access = access_of(question["task"], question["query"], question["config_text"], self._versions)
        known = None if access is None else access.architecture
        number = secrets.randbits(128)
        inbox = self._inboxes[number] = queue.SimpleQueue()
        try:
            began = time.monotonic()
            connection.send(self._with_tapes({"run": number, **question}, access))
            if self._relay(digest, inbox, known) and known:
                seconds = time.monotonic() - began
                self._board.set_pace(work_of(question["task"], known), seconds / cells_of(question))
        finally:
            del self._inboxes[number]
            connection.send({"cancel": number})  # no effect if it has ended

    def _with_tapes(self, message: dict, access: Access | None) -> dict:
        """Return a message with other workers' tapes for its question; without them if the job server would refuse its length."""
        tapes = self._board.tapes(access.architecture, access.reads) if access else {}
        sent = message | {"tapes": {name: b64encode(data).decode("ascii") for name, data in tapes.items()}}
        return sent if len(to_line(sent)) <= self._settings.request_bytes else message

    def _relay(self, digest: str, inbox: queue.SimpleQueue[dict], architecture: str | None) -> bool:
        """Forward the job server's messages until it has answered, or no caller waits; return whether there is a result."""
        beaten = time.monotonic()
        while not self._ending.is_set():
            try:
                message = inbox.get(timeout=BEAT_SECONDS)
            except queue.Empty:
                message = None
            if message is LOST:
                return False
            if message is not None and "keep" in message:
                assert architecture is not None, "nothing else is kept"
                kept = message["keep"]
                self._board.keep(architecture, kept["name"], b64decode(kept["data"]))
            elif message is not None:
                ((kind, value),) = ((key, value) for key, value in message.items() if key != "id")
                if not self._say(digest, {kind: value}):
                    return False
                if kind in ENDS:
                    return kind == "result"
            if time.monotonic() >= beaten + BEAT_SECONDS:
                beaten = time.monotonic()
                if not self._board.beat(digest, self._token):
                    return False
        return False

    def _say(self, digest: str, content: dict) -> bool:
        (kind,) = content
        return self._board.say(digest, self._token, kind, to_line(content))

    # ----------------------------------------------------------------------------------------- on the supervisor's threads

    def _receive(self, connection: Connection, message: dict) -> None:
        if "ready" in message:
            self._ready_message = message
            self._ready.set()
        elif inbox := self._inboxes.get(message["id"]):
            inbox.put(message)

    def _lost(self, connection: Connection, failure: JobError) -> None:
        if not self._ending.is_set():
            _log.warning("%s", failure)
        if self._ready_message is None:
            self._failure = failure
            self._ready.set()
        for inbox in list(self._inboxes.values()):
            inbox.put(LOST)

    def _announce(self, edition: str) -> None:
        """Tell the board again and again that this worker is there."""
        assert self._ready_message is not None, "it is ready"
        versions, missing = self._ready_message["ready"], self._ready_message["missing"]
        worker = Worker(edition=edition, code=code_digest(), versions=versions, missing=missing)
        while True:
            try:
                self._board.announce(self._token, worker)
            except RedisError as error:
                _log.warning("the broker cannot be reached: %s", error)
            if self._ending.wait(ANNOUNCE_SECONDS):
                self._board.withdraw(self._token)
                return


def checked(question: dict | None) -> dict | None:
    """Return a question from the board with only its known parts. Raises ValueError if a part is missing or wrong."""
    if question is None:
        return None
    texts = texts_of(question)
    match question.get("visitor"):
        case [str(address), str(session)]:
            return {**texts, "visitor": [address, session]}
    raise ValueError('"visitor" must be an address and a session')


def serve(url: str, queues: Sequence[str], settings: Settings) -> None:
    """Answer questions until SIGTERM. Raises JobError if no job server can be started."""
    answering = Answering(Board(connect(url)), settings)
    try:
        edition = answering.start()
        lines = [line_of(name, edition) for name in queues]
        celery = make_celery(url)

        @celery.task(name=NEXT, bind=True)
        def take_turn(task: Task) -> None:
            line = task.request.delivery_info["routing_key"]
            if line in lines:
                answering.answer_next(line)

        worker_shutting_down.connect(lambda **_: answering.end(), weak=False)
        _log.warning("answering from %s", ", ".join(lines))
        celery.worker_main(
            [
                *("--quiet", "worker"),
                "--pool=threads",
                f"--concurrency={settings.max_jobs}",
                f"--queues={','.join(lines)}",
                *("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING"),
            ]
        )
    finally:
        answering.close()


def main() -> None:
    """Read the command line and the environment, and serve."""
    parser = argparse.ArgumentParser(prog="python -m sizer.service.broker.worker", allow_abbrev=False)
    parser.add_argument("--queues", default=",".join(QUEUES), help="short, long, or both with a comma between")
    queues = parser.parse_args().queues.split(",")
    if not set(queues) <= set(QUEUES):
        parser.error(f"--queues: {queues} given, allowed are {', '.join(QUEUES)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    set_up_logging()
    try:
        if (url := broker_url()) is None:
            raise JobError(f"{BROKER_VARIABLE} is not set", allowed="redis://host:port/number")
        serve(url, queues, replace(Settings(), sharing="yes"))
    except JobError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
