"""Contents of Redis: questions in their lines, workers, partial and full answers, and tapes.

A question's key is a digest of everything that its answer depends on (versions, code, task, query, config). The same question
of two apps is one entry, and its answer is stored for an hour. All entries expire unless renewed, so that nothing remains of an
app or a worker that was killed.

Atomic operations on the board are Lua scripts in Redis. Each script handles one question at a time; `Board` passes its keys.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from sizer.base.units import MIB
from sizer.service.tapes import ARCHITECTURE_NAMES, BLOCK_BYTES, ITEM_BYTES, LONGEST_NAME

# Put a question in its line, unless it is waiting, in work, or answered; returns 1 if it was put, else 0. The rank follows fair
# queueing by finish times: the visitor's last rank in the line, or the present time, plus the cost.
PUT = """
local wanted, answer, lease, line, question, virtual, own = unpack(KEYS)
local digest, text, cost, reader, wanted_seconds, seconds = unpack(ARGV)
redis.call('SADD', wanted, reader)
redis.call('EXPIRE', wanted, wanted_seconds)
local last = redis.call('XREVRANGE', answer, '+', '-', 'COUNT', 1)[1]
if last and last[2][2] == 'result' then return 0 end
if last and last[2][2] == 'error' then redis.call('DEL', answer) end
if redis.call('EXISTS', lease) == 1 or redis.call('ZSCORE', line, digest) then return 0 end
local now = tonumber(redis.call('GET', virtual) or '0')
local finish = math.max(now, tonumber(redis.call('GET', own) or '0')) + tonumber(cost)
redis.call('SET', own, finish, 'EX', seconds)
redis.call('SET', question, text, 'EX', seconds)
redis.call('ZADD', line, finish, digest)
redis.call('EXPIRE', line, seconds)
return 1
"""

# Take the first question of a line that still has a waiter; returns its digest, nil if there is none.
TAKE = """
local line, virtual = unpack(KEYS)
local worker, lease_ms, seconds, wanted, lease, question = unpack(ARGV)
while true do
  local digest, rank = unpack(redis.call('ZPOPMIN', line))
  if not digest then return false end
  if redis.call('EXISTS', wanted .. digest) == 1 then
    redis.call('SET', lease .. digest, worker, 'PX', lease_ms)
    redis.call('SET', virtual, rank, 'EX', seconds)
    return digest
  end
  redis.call('DEL', question .. digest)
end
"""

# A worker's heartbeat: returns 1 if its question is wanted, 0 if it is not wanted any more, -1 if the worker lost it.
BEAT = """
local wanted, lease = unpack(KEYS)
local worker, lease_ms = unpack(ARGV)
if redis.call('GET', lease) ~= worker then return -1 end
redis.call('PEXPIRE', lease, lease_ms)
return redis.call('EXISTS', wanted)
"""

# Add a worker's message to an answer if the worker still owns the question; the last message ends it. Returns whether it was
# added.
SAY = """
local answer, lease, question = unpack(KEYS)
local worker, kind, data, seconds = unpack(ARGV)
if redis.call('GET', lease) ~= worker then return 0 end
redis.call('XADD', answer, '*', 'kind', kind, 'data', data)
redis.call('EXPIRE', answer, seconds)
if kind == 'result' or kind == 'error' then
  redis.call('XTRIM', answer, 'MAXLEN', 1)
  redis.call('DEL', lease, question)
end
return 1
"""

# Release a question, if the worker still owns it.
GIVE_BACK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

# Store a tape with those of its architecture, up to a limit of bytes.
KEEP = """
local tapes, held = unpack(KEYS)
local name, data, most, seconds, least, names = unpack(ARGV)
least = tonumber(least)
local there = redis.call('HEXISTS', tapes, name)
if there == 0 and redis.call('HLEN', tapes) >= tonumber(names) then return 0 end
local more = math.max(string.len(data), least)
if there == 1 then more = more - math.max(redis.call('HSTRLEN', tapes, name), least) end
if tonumber(redis.call('GET', held) or '0') + more > tonumber(most) then return 0 end
redis.call('HSET', tapes, name, data)
redis.call('INCRBY', held, more)
redis.call('EXPIRE', tapes, seconds)
redis.call('EXPIRE', held, seconds)
return 1
"""


# --------------------------------------------------------------------------------------------------------------- board


PREFIX = "sizer:"
WANTED_SECONDS, WORKER_SECONDS = 10, 10  # silence after which a reader, or a worker, is forgotten
LEASE_MS = 6_000  # after which the question of a silent worker is put again
ANSWER_SECONDS = 3600  # lifetime of a result, as in the apps' own caches
ERROR_SECONDS = 30  # lifetime of an error, so that all waiters can read it
QUESTION_SECONDS = 3600
TAPES_SECONDS = 24 * 3600
TAPES_BYTES = 8 * MIB  # limit per architecture, because all of it is sent with each question
PACE_SECONDS = 24 * 3600
ENDS = ("result", "error")


def connect(url: str) -> Redis:
    """Return a client that retries for some seconds before it raises redis.exceptions.RedisError."""
    again = Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=5)
    limits = {"socket_timeout": 5, "socket_connect_timeout": 2}
    return Redis.from_url(url, **limits, retry=again, retry_on_error=[ConnectionError, TimeoutError])


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker's description of itself.

    `edition` identifies all versions that an answer depends on, `code` this package's code.
    """

    edition: str
    code: str
    versions: dict[str, str]
    missing: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a question: the number of questions before it (None: not in the line), and whether it is taken or answered."""

    ahead: int | None
    taken: bool


class Board:
    """The board for apps and workers. Thread-safe. Raises redis.exceptions.RedisError if Redis is down."""

    def __init__(self, redis: Redis):
        self._redis = redis
        texts = {
            "PUT": PUT,
            "TAKE": TAKE,
            "BEAT": BEAT,
            "SAY": SAY,
            "GIVE_BACK": GIVE_BACK,
            "KEEP": KEEP,
        }
        self._scripts = {name: redis.register_script(text) for name, text in texts.items()}

    # ---------------------------------------------------------------------------------------------------------- questions

    def put(self, digest: str, line: str, question: dict, *, cost: float, visitor: str, reader: str) -> bool:
        """Want an answer, in the name of a reader; whether the question had to be put in its line. Its visitor pays its cost."""
        known = hashlib.sha256(visitor.encode()).hexdigest()[:32]
        keys = [_key(name, digest) for name in ("wanted", "answer", "lease")]
        keys += [
            _key("line", line),
            _key("question", digest),
            _key("virtual", line),
            _key("visitor", f"{line}:{known}"),
        ]
        text = json.dumps(question, separators=(",", ":"))
        return bool(self._scripts["PUT"](keys, [digest, text, cost, reader, WANTED_SECONDS, QUESTION_SECONDS]))

    def look(self, digest: str, line: str) -> Place:
        """Return the position of a question, and note that its readers still wait."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.expire(_key("wanted", digest), WANTED_SECONDS)
            pipe.zrank(_key("line", line), digest)
            for name in ("lease", "question", "answer"):
                pipe.exists(_key(name, digest))
            _, ahead, leased, open_still, begun = pipe.execute()
        return Place(ahead=ahead, taken=bool(leased or (begun and not open_still)))

    def leave(self, digest: str, reader: str) -> None:
        """Want an answer no more."""
        self._redis.srem(_key("wanted", digest), reader)

    def read(self, seen: Mapping[str, str], *, block_ms: int) -> dict[str, list[tuple[str, str, bytes]]]:
        """Return new messages of some answers, by digest, as (number, kind, packed JSON). Waits up to `block_ms`.

        `seen` gives the number of the last known message of each answer.
        """
        found = self._redis.xread({_key("answer", digest): last for digest, last in seen.items()}, block=block_ms)
        answers = {}
        for stream, entries in found or ():
            answers[stream.decode().rpartition(":")[2]] = [
                (number.decode(), fields.get(b"kind", b"").decode("ascii", "replace"), fields.get(b"data", b""))
                for number, fields in entries
            ]
        return answers

    # ------------------------------------------------------------------------------------------------------------ workers

    def announce(self, token: str, worker: Worker) -> None:
        """Tell that a worker is there."""
        facts = {"edition": worker.edition, "code": worker.code, "versions": worker.versions, "missing": worker.missing}
        self._redis.sadd(f"{PREFIX}workers", token)
        self._redis.set(_key("worker", token), json.dumps(facts), ex=WORKER_SECONDS)

    def workers(self) -> list[Worker]:
        """Return the live workers."""
        tokens = sorted(token.decode() for token in self._redis.smembers(f"{PREFIX}workers"))
        texts = self._redis.mget([_key("worker", token) for token in tokens]) if tokens else []
        for token, text in zip(tokens, texts, strict=True):
            if text is None:
                self._redis.srem(f"{PREFIX}workers", token)
        return [worker for text in texts if text is not None and (worker := _read_worker(text)) is not None]

    def withdraw(self, token: str) -> None:
        """Tell that a worker is there no more."""
        self._redis.delete(_key("worker", token))

    def take(self, line: str, token: str) -> str | None:
        """Return the next question of a line, for this worker; None if the line is empty."""
        arguments = [token, LEASE_MS, QUESTION_SECONDS, *(_key(name, "") for name in ("wanted", "lease", "question"))]
        digest = self._scripts["TAKE"]([_key("line", line), _key("virtual", line)], arguments)
        return None if digest is None else digest.decode()

    def question(self, digest: str, most_bytes: int) -> dict | None:
        """Return a question, None if it has expired.

        Raises ValueError if it is larger than `most_bytes`, or is not a JSON object.
        """
        if self._redis.strlen(_key("question", digest)) > most_bytes:
            raise ValueError(f"longer than {most_bytes:,} bytes")
        text = self._redis.get(_key("question", digest))
        question = None if text is None else json.loads(text)
        if not isinstance(question, dict | None):
            raise ValueError("not an object")
        return question

    def beat(self, digest: str, token: str) -> bool | None:
        """Return whether a worker's question is still wanted; None if the worker has lost it."""
        answer = self._scripts["BEAT"]([_key("wanted", digest), _key("lease", digest)], [token, LEASE_MS])
        return None if answer < 0 else bool(answer)

    def say(self, digest: str, token: str, kind: str, data: bytes) -> bool:
        """Add to an answer, a JSON text; a result or an error ends it. Whether the question was this worker's still."""
        seconds = ERROR_SECONDS if kind == "error" else ANSWER_SECONDS
        keys = [_key(name, digest) for name in ("answer", "lease", "question")]
        return bool(self._scripts["SAY"](keys, [token, kind, zlib.compress(data, 1), seconds]))

    def give_back(self, digest: str, token: str) -> None:
        """Release a question; its waiters put it in the line again."""
        self._scripts["GIVE_BACK"]([_key("lease", digest)], [token])

    # ------------------------------------------------------------------------------------------------- tapes and their pace

    def tapes(self, architecture: str, is_wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """Return the wanted tapes of an architecture, by name."""
        key = _key("tapes", architecture)
        names = [name for data in self._redis.hkeys(key) if is_wanted(name := data.decode("utf-8", "replace"))]
        found = self._redis.hmget(key, names) if names else []
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    def keep(self, architecture: str, name: str, data: bytes) -> None:
        """Store a tape; do nothing if it, or the total of its architecture, is too large."""
        if len(name) <= LONGEST_NAME and len(data) <= ITEM_BYTES:
            keys = [_key("tapes", architecture), _key("held", architecture)]
            self._scripts["KEEP"](keys, [name, data, TAPES_BYTES, TAPES_SECONDS, BLOCK_BYTES, ARCHITECTURE_NAMES])

    def pace(self, work: str) -> float | None:
        """Return the seconds per cell that some work took last; None if it is not known."""
        seconds = self._redis.get(_key("pace", work))
        return None if seconds is None else float(seconds)

    def set_pace(self, work: str, seconds: float) -> None:
        """Take note of the seconds for each cell that some work took."""
        self._redis.set(_key("pace", work), seconds, ex=PACE_SECONDS)


def _read_worker(text: bytes) -> Worker | None:
    """Return a worker's description of itself; None if the text is anything else."""
    try:
        match json.loads(text):
            case {"edition": str(edition), "code": str(code), "versions": dict(versions), "missing": dict(missing)}:
                return Worker(edition=edition, code=code, versions=versions, missing=missing)
    except ValueError:
        pass
    return None


def digest_of(parts: Iterable[str | None]) -> str:
    """Return one digest of a list of texts, unique to that list."""
    found = hashlib.sha256()
    for part in parts:
        data = b"-" if part is None else part.encode("utf-8", "surrogatepass")
        found.update(b"%d:" % (-1 if part is None else len(data)) + data)
    return found.hexdigest()


def unpack(data: bytes, most_bytes: int) -> bytes:
    """Return decompressed data. Raises ValueError if it is longer than `most_bytes`, or is not compressed data."""
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, most_bytes)
    except zlib.error:
        raise ValueError("this was not compressed") from None
    if reader.unconsumed_tail or not reader.eof:
        raise ValueError(f"longer than {most_bytes:,} bytes, or cut off")
    return text


def _key(name: str, of: str) -> str:
    return f"{PREFIX}{name}:{of}"
