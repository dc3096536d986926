"""SIZER_BROKER, on a machine that has neither Celery nor Redis: what it may hold, and what is said."""

from __future__ import annotations

import sys

import pytest

from sizer.base.errors import JobError
from sizer.service import client
from sizer.service.variables import BROKER_VARIABLE, broker_url


@pytest.mark.parametrize("given", ["redis://127.0.0.1:6379/0", "rediss://:secret@host/1", "unix:///run/redis.sock"])
def test_an_address_of_redis_is_taken(monkeypatch, given):
    monkeypatch.setenv(BROKER_VARIABLE, f" {given} ")
    assert broker_url() == given


@pytest.mark.parametrize("given", ["", " "])
def test_without_one_there_is_none(monkeypatch, given):
    monkeypatch.setenv(BROKER_VARIABLE, given)
    assert broker_url() is None


@pytest.mark.parametrize("given", ["amqp://:secret@host", "secret@127.0.0.1:6379", "1"])
def test_anything_else_is_refused_and_not_repeated(monkeypatch, given):
    monkeypatch.setenv(BROKER_VARIABLE, given)
    with pytest.raises(JobError, match=r"SIZER_BROKER cannot be used: allowed redis://host:port/number") as caught:
        broker_url()
    assert "secret" not in str(caught.value), "it may hold a password"


def test_a_package_that_is_missing_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setenv(BROKER_VARIABLE, "redis://127.0.0.1:9/0")
    monkeypatch.setitem(sys.modules, "celery", None)  # its import fails
    for name in ("connection", "celery_turns"):
        monkeypatch.delitem(sys.modules, f"sizer.service.broker.{name}", raising=False)
    with pytest.raises(JobError, match=r"\((celery|kombu)\); pip install -r deploy/requirements-broker\.txt"):
        client._make_shared.__wrapped__()
