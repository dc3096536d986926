"""The board in a real Redis server: whose turn it is, whose question it is, and what it keeps."""

from __future__ import annotations

import zlib

import pytest

from tests.service.brokers import need_broker

need_broker()

from sizer.service.broker.board import Board, unpack  # noqa: E402
from sizer.service.broker.celery_turns import LONG_SECONDS, cost_of, queue_of  # noqa: E402


def put(board: Board, name: str, visitor: str, *, cost: float = 1.0) -> bool:
    return board.put(name, "line", {}, cost=cost, visitor=visitor, reader="app")


def test_who_has_asked_little_goes_before_who_has_asked_much(board):
    for number in range(4):
        put(board, f"many{number}", "10.0.0.1")
    put(board, "one", "10.0.0.2")
    put(board, "large", "10.0.0.3", cost=2.5)
    taken = [board.take("line", "worker") for _ in range(6)]
    # finish times: 1, 2, 3, 4 of the first, 1 of the second, 2.5 of the third; equal ones go by their digests
    assert taken == ["many0", "one", "many1", "large", "many2", "many3"]
    assert board.take("line", "worker") is None


def test_who_comes_later_does_not_wait_for_what_others_had(board):
    for number in range(3):
        put(board, f"a{number}", "10.0.0.1")
    assert [board.take("line", "worker") for _ in range(2)] == ["a0", "a1"]
    put(board, "b0", "10.0.0.2")  # from 2, the present, to 3, as is a2: neither goes back behind the other
    put(board, "a3", "10.0.0.1")
    assert [board.take("line", "worker") for _ in range(3)] == ["a2", "b0", "a3"]


def test_a_question_is_put_once_and_not_taken_where_nobody_waits_for_it(board):
    assert put(board, "question", "10.0.0.1")
    assert not board.put("question", "line", {}, cost=1.0, visitor="10.0.0.2", reader="another app")
    board.leave("question", "app")
    assert board.look("question", "line").ahead == 0
    board.leave("question", "another app")
    assert board.take("line", "worker") is None
    assert board.question("question", 100) is None


def test_a_question_is_its_workers_alone(board):
    put(board, "question", "10.0.0.1")
    assert board.take("line", "worker") == "question"
    assert (board.beat("question", "worker"), board.beat("question", "another")) == (True, None)
    assert not board.say("question", "another", "result", b"{}")
    assert board.look("question", "line").taken
    board.give_back("question", "another")
    assert board.look("question", "line").taken
    board.give_back("question", "worker")
    assert not board.look("question", "line").taken


def test_tapes_of_one_architecture_are_bounded(board, monkeypatch):
    monkeypatch.setattr("sizer.service.broker.board.TAPES_BYTES", 100)
    monkeypatch.setattr("sizer.service.broker.board.BLOCK_BYTES", 1)
    board.keep("architecture", "first", b"x" * 60)
    board.keep("architecture", "second", b"x" * 60)
    board.keep("architecture", "first", b"y" * 90)
    assert board.tapes("architecture", lambda name: True) == {"first": b"y" * 90}


def test_a_tape_counts_for_a_block_and_an_architecture_has_so_many(board):
    for number in range(300):
        board.keep("architecture", str(number), b"")
        board.keep("architecture", "0", b"again")
    assert len(board.tapes("architecture", lambda name: True)) == 256
    assert board.tapes("architecture", lambda name: name in ("0", "7")) == {"0": b"again", "7": b""}
    for number in range(300):
        board.keep("large", str(number), bytes(2**17))
    assert len(board.tapes("large", lambda name: True)) == 64  # 8 MiB


def test_routes_go_by_what_the_same_work_took():
    question = {"task": "estimate", "query": "arch=torchvision:resnet18&dtype=float32&batch=1,2,4,8"}
    assert queue_of(cost_of(question, None)) == "short"  # 4 cells at a quarter of a second
    assert cost_of(question, 5.0) == 20.0 > LONG_SECONDS
    assert queue_of(cost_of(question, 5.0)) == "long"


def test_what_unpacks_to_too_much_is_not_unpacked():
    bomb = zlib.compress(b"0" * 2**24)
    assert len(bomb) < 2**15
    with pytest.raises(ValueError, match="longer than 65,536 bytes"):
        unpack(bomb, 2**16)
    with pytest.raises(ValueError, match="cut off"):
        unpack(bomb[:-9], 2**25)
    with pytest.raises(ValueError, match="not compressed"):
        unpack(b"plain", 100)
