from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from sizer.architecture.hub_files import _Exchange, fetch_config
from sizer.base.config_json import read_config
from sizer.base.errors import HubError
from sizer.catalogue.sources import fetch as fetch_of_source
from tests.hub import REPO, Handler, Hub

CONFIG = json.dumps({"model_type": "gpt2", "n_embd": 768}).encode()
PATH = f"/{REPO}/resolve/main/config.json"


def test_the_config_is_read_from_the_endpoint_of_the_environment(hub: Hub):
    hub.routes[PATH] = lambda handler: handler.answer(200, CONFIG)
    assert fetch_config(REPO) == CONFIG


def test_an_endpoint_may_be_given_with_a_path(hub: Hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    hub.routes[f"/mirror{PATH}"] = lambda handler: handler.answer(200, CONFIG)
    assert fetch_config(REPO, endpoint=f"{hub.endpoint}/mirror/") == CONFIG


def test_a_revision_is_one_part_of_the_path(hub: Hub):
    hub.routes[f"/{REPO}/resolve/refs%2Fpr%2F1/config.json"] = lambda handler: handler.answer(200, CONFIG)
    assert fetch_config(REPO, "refs/pr/1") == CONFIG


def test_the_request_is_anonymous_and_ignores_proxies(hub: Hub, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "hf_secret")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    hub.routes[PATH] = lambda handler: handler.answer(200, CONFIG)
    fetch_config(REPO)
    ((_, headers),) = hub.asked
    assert set(headers) == {"Host", "Accept", "Accept-Encoding", "User-Agent", "Connection"}
    assert "hf_secret" not in str(headers)


def test_a_config_without_quantization_is_read_with_its_hf_quant_config(hub: Hub):
    quantization = json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}).encode()
    hub.routes[PATH] = lambda handler: handler.answer(200, CONFIG)
    hub.routes[f"/{REPO}/resolve/main/hf_quant_config.json"] = lambda handler: handler.answer(200, quantization)
    found = read_config(fetch_config(REPO))
    assert found["quantization_config"] == {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quant_algo": "FP8"}
    assert [path for path, _ in hub.asked] == [PATH, f"/{REPO}/resolve/main/hf_quant_config.json"]


def test_a_config_with_quantization_is_read_alone(hub: Hub):
    config = json.dumps({"model_type": "gpt2", "quantization_config": {"quant_method": "fp8"}}).encode()
    hub.routes[PATH] = lambda handler: handler.answer(200, config)
    hub.routes[f"/{REPO}/resolve/main/hf_quant_config.json"] = lambda handler: handler.answer(500)
    assert fetch_config(REPO) == config


def test_a_hf_quant_config_that_cannot_be_read_is_an_error(hub: Hub):
    hub.routes[PATH] = lambda handler: handler.answer(200, CONFIG)
    hub.routes[f"/{REPO}/resolve/main/hf_quant_config.json"] = lambda handler: handler.answer(500)
    with pytest.raises(HubError, match="status 500"):
        fetch_config(REPO)


def test_redirects_on_the_same_host_are_followed(hub: Hub):
    hub.routes[PATH] = lambda handler: handler.answer(307, Location="/new/name/resolve/main/config.json?x=1")
    hub.routes["/new/name/resolve/main/config.json?x=1"] = lambda handler: handler.answer(200, CONFIG)
    assert fetch_config(REPO) == CONFIG
    assert [path for path, _ in hub.asked] == [PATH, "/new/name/resolve/main/config.json?x=1"]


@pytest.mark.parametrize(
    "location",
    [
        "http://localhost:{port}/x",  # the same machine under another name
        "http://127.0.0.1:1/x",  # another port
        "//example.com/x",
        "https://127.0.0.1:{port}/x",
        "http://user@127.0.0.1:{port}/x",
        "file:///etc/passwd",
        "http://huggingface.co/x",
    ],
)
def test_redirects_off_the_host_are_refused(hub: Hub, location: str):
    target = location.format(port=hub.server_port)
    hub.routes[PATH] = lambda handler: handler.answer(302, Location=target)
    with pytest.raises(HubError, match=r"redirects off its own host: given .*; paste its config.json instead"):
        fetch_config(REPO)
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("location", "followed"),
    [
        ("/api/resolve-cache/models/org/name/config.json", True),
        ("https://cdn-lfs-us-1.huggingface.co/x?sig=1", True),
        ("https://cas-bridge.xethub.hf.co/x", True),
        ("https://huggingface.co:8443/x", False),
        ("https://evilhuggingface.co/x", False),
        ("https://huggingface.co.evil.example/x", False),
        ("https://hf.co.example/x", False),
        ("https://evil.hf.space/x", False),
        ("http://cdn-lfs.huggingface.co/x", False),
        ("https://cdn-lfs.huggingface.co:8443/x", False),
    ],
)
def test_the_public_hub_may_redirect_to_its_own_domains_only(location: str, followed: bool):
    start = urlsplit("https://huggingface.co/org/name/resolve/main/config.json")
    exchange = _Exchange(REPO, start, 5.0)
    if followed:
        assert exchange._redirect(start, location).geturl().endswith(location)
    else:
        with pytest.raises(HubError, match="redirects off its own host"):
            exchange._redirect(start, location)


def test_a_repository_of_an_adapter_says_how_to_ask_for_it(hub: Hub):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8}
    other = PATH.replace("config.json", "adapter_config.json")
    hub.routes[PATH] = lambda handler: handler.answer(404, **{"X-Error-Code": "EntryNotFound"})
    hub.routes[other] = lambda handler: handler.answer(200, json.dumps(adapter).encode())
    with pytest.raises(HubError, match=r"org/name holds an adapter.*ask for arch=hub:org/base&train=adapter&adapter=lora&r=8"):
        fetch_config(REPO)
    assert [path for path, _ in hub.asked] == [PATH, other]


def test_circles_end(hub: Hub):
    hub.routes[PATH] = lambda handler: handler.answer(302, Location=PATH)
    with pytest.raises(HubError, match="redirects in circles: given org/name, allowed 5 times"):
        fetch_config(REPO)
    assert len(hub.asked) == 6


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (401, "", "org/name is gated or private, or does not exist; check the name, or paste its config.json instead"),
        (401, "GatedRepo", "org/name is gated; "),
        (403, "", "gated or private"),
        (404, "", "org/name was not found, or has no config.json; check the name"),
        (404, "EntryNotFound", "org/name has no config.json"),
        (404, "RevisionNotFound", "org/name does not have this revision"),
        (429, "", "asks for fewer requests: given org/name; wait a minute"),
        (500, "", "status 500"),
        (204, "", "status 204"),
    ],
)
def test_statuses_say_what_to_do(hub: Hub, status: int, code: str, text: str):
    headers = {"X_Error_Code": code} if code else {}
    for file in ("config.json", "adapter_config.json", "model_index.json"):
        hub.routes[PATH.replace("config.json", file)] = lambda handler: handler.answer(status, b"", **headers)
    with pytest.raises(HubError, match=text):
        fetch_config(REPO)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<html>Sign in</html>", "config.json of org/name is refused: this is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "refused: config is not valid JSON"),
        (b"[]", "refused: config is not a JSON object"),
        (b'{"a": 1, "a": 2}', "refused: config has a key twice in one object: given 'a'"),
        (b"", "refused: config is empty"),
    ],
)
def test_only_strict_json_is_handed_on(hub: Hub, body: bytes, text: str):
    hub.routes[PATH] = lambda handler: handler.answer(200, body)
    with pytest.raises(HubError, match=text):
        fetch_config(REPO)


def test_a_packed_answer_is_refused(hub: Hub):
    hub.routes[PATH] = lambda handler: handler.answer(200, CONFIG, Content_Encoding="gzip")
    with pytest.raises(HubError, match="sent a packed answer"):
        fetch_config(REPO)


def test_reading_stops_at_the_cap(hub: Hub):
    sent = []

    def flood(handler: Handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1000):  # 1000 x 64 KiB = 62.5 MiB
            handler.wfile.write(b" " * 65536)
            sent.append(65536)

    hub.routes[PATH] = flood
    with pytest.raises(HubError, match=r"config.json of org/name is too large: allowed at most 2,097,152 bytes"):
        fetch_config(REPO)
    assert sum(sent) < 32 * 2**20  # the cap and what the sockets hold


def test_a_file_of_exactly_the_cap_is_read(hub: Hub):
    body = CONFIG + b" " * (2**21 - len(CONFIG))
    hub.routes[PATH] = lambda handler: handler.answer(200, body)
    assert fetch_config(REPO) == body


def test_an_answer_that_breaks_off_is_refused(hub: Hub):
    hub.routes[PATH] = lambda handler: handler.answer(200, CONFIG, Content_Length=str(len(CONFIG) + 5))
    with pytest.raises(HubError, match="broke off: given 37 bytes, allowed the '42' that were announced"):
        fetch_config(REPO)


def drip_body(handler: Handler):
    handler.send_response(200)
    handler.end_headers()
    handler.drip(b" " * 10_000)


def drip_headers(handler: Handler):
    handler.drip(b"HTTP/1.0 200 OK\r\nX-Padding: " + b"x" * 10_000)


@pytest.mark.parametrize("slow", [drip_body, drip_headers])
def test_a_dripping_server_is_given_up_on_time(hub: Hub, slow: Callable[[Handler], None]):
    hub.routes[PATH] = slow
    before = set(threading.enumerate())
    start = time.monotonic()
    with pytest.raises(HubError, match=r"too slow for org/name: given no full answer within 0.5 s"):
        fetch_config(REPO, total_seconds=0.5)
    assert 0.5 <= time.monotonic() - start < 5.0  # ten thousand bytes, one every 20 ms, would take 200 s
    workers = [thread for thread in set(threading.enumerate()) - before if thread.name == "sizer-hub"]
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive()


def test_a_silent_server_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(HubError, match=r"too slow for org/name: given silence for 0.2 s; try again"):
            fetch_config(REPO, endpoint=endpoint, connect_seconds=0.2)


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        HubError, match=r"could not be read \(ConnectionRefusedError\): given org/name; check the network"
    ):
        fetch_config(REPO, endpoint=f"http://127.0.0.1:{port}")


def test_something_that_is_not_http():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble():
            client, _ = server.accept()
            with client:
                client.recv(4096)
                client.sendall(b"220 mail ready\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(HubError, match=r"could not be read \(BadStatusLine\)"):
            fetch_config(REPO, endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("repo", ["gpt2", "../x", "org/..", "org/na me", "org/name/x", "org/name\n", "", "org/a--b"])
def test_malformed_names_are_refused_before_any_request(hub: Hub, repo: str):
    with pytest.raises(HubError, match=r"repository name is malformed: given .*, allowed <org/name>"):
        fetch_config(repo)
    assert hub.asked == []


@pytest.mark.parametrize("revision", ["", "../x", "a b", "a//b", "/a", "a?b", "a#b", "a\r\nHost: x"])
def test_malformed_revisions_are_refused_before_any_request(hub: Hub, revision: str):
    with pytest.raises(HubError, match="revision is malformed"):
        fetch_config(REPO, revision)
    assert hub.asked == []


@pytest.mark.parametrize(
    "endpoint",
    ["huggingface.co", "ftp://x", "http://", "http://u:p@x", "http://x?y", "http://x:port", "http://[x", "file:///etc"],
)
def test_malformed_endpoints_are_refused(endpoint: str):
    with pytest.raises(HubError, match=r"hub endpoint is malformed: given .*; set HF_ENDPOINT"):
        fetch_config(REPO, endpoint=endpoint)


def test_a_model_that_has_a_preset_is_named_with_it(monkeypatch):
    def refuse(name: str, revision: str | None) -> bytes:
        raise HubError(f"{name} is gated", todo="check the name")

    monkeypatch.setattr("sizer.catalogue.sources.import_function", lambda name: refuse)
    with pytest.raises(HubError, match=r"is gated; check the name, or ask for the preset arch=hf:llama-3.1-8b$"):
        fetch_of_source("hub", "meta-llama/Llama-3.1-8B-Instruct", None)
    with pytest.raises(HubError, match=r"is gated; check the name$"):
        fetch_of_source("hub", "org/never-heard-of", None)
