"""By which names the app may be asked for."""

from __future__ import annotations

import logging

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from streamlit import config

from sizer.service.settings import PUBLIC_VARIABLE
from sizer.ui.surface import allowed_hosts


@pytest.fixture
def configured(monkeypatch):
    """A function that sets Streamlit's address and its allowed hosts."""

    def configure(address: str | None, hosts: list[str]) -> None:
        values = {"server.address": address, "server.allowedHosts": hosts}
        monkeypatch.setattr(config, "get_option", values.__getitem__)

    return configure


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_app_answers_to_its_own_names_alone(configured, address):
    configured(address, [])
    route = Route("/", lambda request: PlainTextResponse("ok"))
    app = Starlette(routes=[route], middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed_hosts())])
    with TestClient(app) as client:
        for host in ("localhost:8501", "127.0.0.1:8501", "localhost", "[::1]:8501", "[::1]"):
            assert client.get("/", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "evil.example:8501", "127.0.0.1.evil.example", "localhost.evil.example"):
            assert client.get("/", headers={"host": host}).status_code == 400, host


def test_names_that_are_given_stand(configured):
    configured("127.0.0.1", ["sizer.example.org"])
    assert allowed_hosts() == ["sizer.example.org"]


def test_a_public_app_without_names_says_so(configured, monkeypatch, caplog):
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    configured("0.0.0.0", [])
    with caplog.at_level(logging.WARNING):
        assert allowed_hosts() == ["*"]
    assert "STREAMLIT_SERVER_ALLOWED_HOSTS" in caplog.text
