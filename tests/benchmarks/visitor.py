"""Somebody who looks at a page: Streamlit's websocket protocol, as a browser speaks it, without the browser."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import websockets
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg


@dataclass(slots=True)
class Shown:
    """What one run of the page sent: the elements by their place, how many bytes that took, and how the run ended."""

    elements: dict[tuple[int, ...], Message] = field(default_factory=dict)
    bytes: int = 0
    ended: bool = False

    @property
    def title(self) -> str:
        """The headline of the main part, empty where there is none."""
        main = (element for place, element in self.elements.items() if place[0] == 0)
        return next((element.heading.body for element in main if element.WhichOneof("type") == "heading"), "")

    @property
    def texts(self) -> str:
        """All plain texts, captions and alerts, one a line."""
        kinds = {"text": "text", "markdown": "markdown", "alert": "alert", "heading": "heading"}
        found = (
            getattr(element, kind).body
            for element in self.elements.values()
            if (kind := element.WhichOneof("type")) in kinds
        )
        return "\n".join(found)

    def digest(self) -> str:
        """A digest of everything that is shown, where it stands; the numbers of files to download, new in each run, aside."""
        whole = [[list(place), MessageToDict(element)] for place, element in sorted(self.elements.items())]
        for _, element in whole:
            element.get("downloadButton", {}).pop("deferredFileId", None)
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


class Visitor:
    """One open page of the app at `address` (http://host:port). An asynchronous context.

    Like a browser it keeps the long messages of the last two runs, and says which with each question: of those the app sends the
    hash alone.
    """

    def __init__(self, address: str):
        self._address = address
        self._socket: websockets.ClientConnection | None = None
        self._earlier: dict[str, ForwardMsg] = {}  # by hash, of the run before
        self._latest: dict[str, ForwardMsg] = {}
        self._kept: dict[str, ForwardMsg] = {}  # those that the app was told of

    async def __aenter__(self) -> Visitor:
        stream = self._address.replace("http", "ws", 1) + "/_stcore/stream"
        self._socket = await websockets.connect(
            stream, subprotocols=["streamlit"], origin=self._address, max_size=None, open_timeout=60, ping_interval=None
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def start(self, query: str) -> None:
        """Ask for the page at a query."""
        request = BackMsg()
        request.rerun_script.query_string = query
        self._kept = self._earlier | self._latest
        request.rerun_script.cached_message_hashes.extend(self._kept)
        await self._socket.send(request.SerializeToString())

    async def run(self, query: str, look: Callable[[Shown], None] = lambda shown: None) -> Shown:
        """Return what the page shows at a query when its last run has ended; call `look` after each message."""
        await self.start(query)
        shown = Shown()
        while not shown.ended:
            self._take(await self._socket.recv(), shown)
            look(shown)
        return shown

    def _take(self, data: bytes, shown: Shown) -> None:
        message = ForwardMsg()
        message.ParseFromString(data)
        shown.bytes += len(data)
        kind = message.WhichOneof("type")
        if kind == "ref_hash":  # the place is that of the reference, the rest is what was kept
            reference, message = message, ForwardMsg()
            message.CopyFrom((self._kept | self._latest)[reference.ref_hash])
            message.metadata.delta_path[:] = reference.metadata.delta_path
            kind = message.WhichOneof("type")
        if message.metadata.cacheable:
            self._latest[message.hash] = message
        if kind == "new_session":
            self._earlier, self._latest = self._latest, {}
            shown.elements.clear()
        elif kind == "delta" and message.delta.WhichOneof("type") == "new_element":
            shown.elements[tuple(message.metadata.delta_path)] = message.delta.new_element
        elif kind == "script_finished":
            shown.ended = message.script_finished == ForwardMsg.FINISHED_SUCCESSFULLY


async def ask_until(visitor: Visitor, query: str, word: str, *, seconds: float = 120.0) -> Shown:
    """What the page shows once it holds a word. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while word not in (shown := await visitor.run(query)).texts:
            await asyncio.sleep(0.2)
    return shown
