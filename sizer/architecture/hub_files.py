"""Files of a model's repository on the hub by anonymous, bounded GETs: config.json here. No torch, no token, no cache, no proxy."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from sizer.base.config_json import MAX_CONFIG_BYTES, query_of_adapter, read_config, read_object
from sizer.base.errors import ConfigError, HubError, PipelineError
from sizer.base.errors import quote as quote_given
from sizer.catalogue.sources import REPO_ID, REVISION

DEFAULT_ENDPOINT = "https://huggingface.co"
# Hosts to which the public hub redirects readers of a file; any other endpoint may only redirect to its own origin.
REDIRECT_DOMAINS = {"huggingface.co": (".huggingface.co", ".hf.co")}
MAX_REDIRECTS = 5
CONNECT_SECONDS = 5.0
TOTAL_SECONDS = 10.0

_CHUNK_BYTES = 64 * 2**10
_CONFIG, _ADAPTER, _QUANTIZATION = "config.json", "adapter_config.json", "hf_quant_config.json"
MODEL_INDEX = "model_index.json"
_NEXT = {_CONFIG: _ADAPTER, _ADAPTER: MODEL_INDEX}  # the file to request if a repository lacks the first one
_PASTE = "paste its config.json instead"
_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "sizer", "Connection": "close"}


def fetch_config(
    repo_id: str,
    revision: str | None = None,
    endpoint: str | None = None,
    *,
    connect_seconds: float = CONNECT_SECONDS,
    total_seconds: float = TOTAL_SECONDS,
) -> bytes:
    """Return the bytes (at most 2 MiB, checked to be strict JSON) of config.json in a model repository of the hub.

    A config that names no quantization is followed by the repository's hf_quant_config.json, which older checkpoints of
    ModelOpt have instead; `read_config` reads both. The whole exchange, name look-up and redirects included, ends within
    `total_seconds`.

    Args:
        repo_id: "org/name".
        revision: Branch, tag or commit; None for "main".
        endpoint: Address of the hub; None for HF_ENDPOINT, else the public hub.
        connect_seconds: Limit for a connection.
        total_seconds: Limit of wall-clock time.

    Raises:
        HubError: Malformed name, not found, an adapter instead (with its query), gated or private, redirected elsewhere, too
            slow, too large, not JSON.
        PipelineError: The repository holds a diffusion pipeline.

    *Known limitations*: proxies of the environment are not used; without direct access, paste the config.
    """
    folder = folder_address(repo_id, revision, endpoint)
    end = time.monotonic() + total_seconds
    data = _Exchange(repo_id, urlsplit(f"{folder}/{_CONFIG}"), connect_seconds).finish(total_seconds)
    try:
        if (query := query_of_adapter(data)) is not None:
            what = f"{repo_id} holds an adapter: name its base model instead"
            raise HubError(what, given=_ADAPTER, allowed=f"the {_CONFIG} of a model", todo=f"ask for {query}")
        if _is_index(read_object(data)):
            at = "" if revision is None else f"@{revision}"
            what, todo = f"{repo_id} holds a diffusion pipeline", f"ask for arch=diffusers:{repo_id}{at}"
            raise PipelineError(what, given=MODEL_INDEX, allowed=f"the {_CONFIG} of a model", todo=todo)
        if not read_config(data).keys() & {"quantization_config", "compression_config"}:
            exchange = _Exchange(repo_id, urlsplit(f"{folder}/{_QUANTIZATION}"), connect_seconds)
            if other := exchange.finish(max(end - time.monotonic(), 0)):
                data += b"\n" + other
                read_config(data)
    except ConfigError as error:
        what = f"config.json of {repo_id} is refused: {error.what}"
        raise HubError(what, given=error.given, allowed=error.allowed, todo=_PASTE) from None
    return data


def folder_address(repo_id: str, revision: str | None, endpoint: str | None) -> str:
    """Return the address of the folder of a repository's revision. Raises HubError for a malformed name, revision or endpoint."""
    if not REPO_ID.fullmatch(repo_id):
        todo = "write for example openai-community/gpt2"
        raise HubError("repository name is malformed", given=quote_given(repo_id), allowed="<org/name>", todo=todo)
    if revision is not None and not REVISION.fullmatch(revision):
        raise HubError("revision is malformed", given=quote_given(revision), allowed="a branch, tag or commit")
    base = _read_endpoint(endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT)
    return f"{base.geturl()}/{repo_id}/resolve/{quote(revision or 'main', safe='')}"


def fetch_files(
    repo_id: str, folder: str, files: Iterable[str], *, connect_seconds: float, total_seconds: float
) -> dict[str, bytes]:
    """Return the bytes of files of a folder (`folder_address`), by name; all are fetched at once.

    Raises HubError as `fetch_config` does, and if a file does not exist.
    """
    end = time.monotonic() + total_seconds
    exchanges = {file: _Exchange(repo_id, urlsplit(f"{folder}/{file}"), connect_seconds, file) for file in files}
    for exchange in exchanges.values():
        exchange.start()
    return {file: exchange.finish(max(end - time.monotonic(), 0)) for file, exchange in exchanges.items()}


def _is_index(config: dict) -> bool:
    return "_class_name" in config and "model_type" not in config and any(isinstance(v, list) for v in config.values())


def _read_endpoint(text: str) -> SplitResult:
    with suppress(ValueError):  # an invalid port, or unmatched brackets
        url = urlsplit(text.rstrip("/"))
        if re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", text, re.ASCII) and url.hostname and url.port != 0:
            return url
    allowed, todo = "http(s)://host[:port][/path]", "set HF_ENDPOINT to such an address, or unset it"
    raise HubError("hub endpoint is malformed", given=quote_given(text), allowed=allowed, todo=todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Response of a server: a body, or another address to request."""

    body: bytes | None = None
    location: str | None = None


class _Exchange:
    """One fetch in a separate thread, which can be abandoned: only this bounds the name look-up and a slow server.

    `file` is the file to fetch, if no other may replace it.
    """

    def __init__(self, repo_id: str, url: SplitResult, connect_seconds: float, file: str = ""):
        self._repo_id, self._url, self._connect_seconds, self._file = repo_id, url, connect_seconds, file
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None
        self._outcome: bytes | HubError = _unreadable(repo_id, "for a reason unknown")
        self._given_up = threading.Event()

    def start(self) -> threading.Thread:
        """Begin the fetch and return its thread."""
        self._thread = threading.Thread(target=self._run, name="sizer-hub", daemon=True)
        self._thread.start()
        return self._thread

    def finish(self, total_seconds: float) -> bytes:
        """Return the body; empty if there is no hf_quant_config.json. Raises HubError if the exchange failed or took longer."""
        thread = self._thread or self.start()
        thread.join(total_seconds)
        if thread.is_alive():
            self._give_up()
            raise _too_slow(self._repo_id, f"no full answer within {total_seconds:g} s")
        if isinstance(self._outcome, HubError):
            raise self._outcome
        return self._outcome

    def _give_up(self) -> None:
        self._given_up.set()
        if (connection := self._socket) is not None:
            with suppress(OSError):  # over in this very moment
                connection.shutdown(socket.SHUT_RDWR)

    def _check_given_up(self) -> None:
        """End the thread if `_give_up` found no socket to shut down; its outcome is no longer read."""
        if self._given_up.is_set():
            raise TimeoutError

    def _run(self) -> None:
        try:
            self._outcome = self._follow()
        except HubError as error:
            self._outcome = error
        except TimeoutError:
            self._outcome = _too_slow(self._repo_id, f"silence for {self._connect_seconds:g} s")
        except ssl.SSLCertVerificationError:
            todo = "install the system's CA certificates, or set SSL_CERT_FILE"
            self._outcome = HubError("the hub's certificate could not be verified", todo=todo)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._outcome = _unreadable(self._repo_id, type(error).__name__)

    def _follow(self) -> bytes:
        url = self._url
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._get(url)
            if answer.body is not None:
                return answer.body
            url = self._redirect(url, answer.location or "")
        raise HubError(
            "the hub redirects in circles", given=self._repo_id, allowed=f"{MAX_REDIRECTS} times", todo=_PASTE
        )

    def _get(self, url: SplitResult) -> _Answer:
        with closing(_connect(url, self._connect_seconds)) as connection:
            connection.connect()
            self._socket = connection.sock  # the connection itself drops its reference once the headers are read
            self._check_given_up()
            connection.request("GET", url.path + (f"?{url.query}" if url.query else ""), headers=_HEADERS)
            with connection.getresponse() as response:
                if response.status in (301, 302, 303, 307, 308):
                    return _Answer(location=response.headers.get("Location", ""))
                folder, _, file = url.path.rpartition("/")
                if _lacks_entry(response) and not self._file and file in _NEXT:
                    return _Answer(location=f"{folder}/{_NEXT[file]}")
                if response.status == 404 and self._url.path.endswith(f"/{_QUANTIZATION}"):
                    return _Answer(body=b"")
                if response.status != 200:
                    raise _status_error(self._repo_id, response, self._file or _CONFIG)
                return _Answer(body=self._read(response))

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise HubError("the hub sent a packed answer", given=self._repo_id, allowed="plain JSON", todo=_PASTE)
        chunks, size = [], 0
        while chunk := response.read1(_CHUNK_BYTES):
            self._check_given_up()
            size += len(chunk)
            if size > MAX_CONFIG_BYTES:
                allowed = f"at most {MAX_CONFIG_BYTES:,} bytes"
                raise HubError(f"{self._file or _CONFIG} of {self._repo_id} is too large", allowed=allowed, todo=_PASTE)
            chunks.append(chunk)
        declared = response.headers.get("Content-Length", str(size))
        if declared != str(size):
            given, allowed = f"{size:,} bytes", f"the {quote_given(declared)} that were announced"
            raise HubError("the hub's answer broke off", given=given, allowed=allowed, todo="try again")
        return b"".join(chunks)

    def _redirect(self, here: SplitResult, location: str) -> SplitResult:
        there = urlsplit(urljoin(here.geturl(), location))
        same_origin = _origin(there) == _origin(self._url)
        domains = REDIRECT_DOMAINS.get(self._url.hostname or "", ())
        known = there.scheme == "https" and there.port in (None, 443) and (there.hostname or "").endswith(domains)
        if there.scheme != self._url.scheme or "@" in there.netloc or not (same_origin or known):
            allowed = f"addresses on {self._url.scheme}://{self._url.netloc}"
            given = quote_given(f"{there.scheme}://{there.netloc}")
            raise HubError("the hub redirects off its own host", given=given, allowed=allowed, todo=_PASTE)
        return there


def _origin(url: SplitResult) -> tuple[str, str | None, int]:
    return url.scheme, url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme, 0)


def _connect(url: SplitResult, seconds: float) -> http.client.HTTPConnection:
    assert url.hostname is not None  # `_read_endpoint` and `_redirect` accept no other address
    if url.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=seconds, context=context)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=seconds)


def _lacks_entry(response: http.client.HTTPResponse) -> bool:
    return response.status == 404 and response.headers.get("X-Error-Code") == "EntryNotFound"


def _status_error(repo_id: str, response: http.client.HTTPResponse, file: str) -> HubError:
    """Return the error for an answer's status; X-Error-Code is the hub's own, more specific code."""
    code, status = response.headers.get("X-Error-Code", ""), response.status
    if status in (401, 403):  # the hub also answers 401 to anonymous readers for a repository that does not exist
        what = "gated" if code == "GatedRepo" else "gated or private, or does not exist"
        return HubError(f"{repo_id} is {what}", todo=f"check the name, or {_PASTE}")
    if status == 404:
        what = {
            "RevisionNotFound": "does not have this revision",
            "EntryNotFound": f"has no {file}",
        }.get(code, f"was not found, or has no {file}")
        return HubError(f"{repo_id} {what}", todo="check the name (its case too) and the revision")
    if status == 429:
        return HubError("the hub asks for fewer requests", given=repo_id, todo=f"wait a minute, or {_PASTE}")
    return HubError(f"the hub answered with status {status}", given=repo_id, todo=f"try again later, or {_PASTE}")


def _unreadable(repo_id: str, why: str) -> HubError:
    return HubError(f"the hub could not be read ({why})", given=repo_id, todo=f"check the network, or {_PASTE}")


def _too_slow(repo_id: str, given: str) -> HubError:
    return HubError(f"the hub is too slow for {repo_id}", given=given, todo=f"try again, or {_PASTE}")
