"""An S3 server behind a network that fails: a proxy that spoils requests."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from email.message import Message
from typing import NamedTuple, Self

STALL_S = 30.0


class Asked(NamedTuple):
    """A request, and the status of its answer."""

    method: str
    path: str
    headers: Message
    body: bytes
    status: int


class Faults(http.server.ThreadingHTTPServer):
    """Forward HTTP to `target`, but spoil some requests, as `spoil` says.

    slow: answer 503 SlowDown. reset: drop the connection unanswered. cut: drop it in the middle
    of the answer. lose: let the server act, then drop it. denied, skewed, expired: answer so. page:
    answer 200 with a log-in page. blind: forward it without its conditions. stall: wait STALL_S
    seconds first.
    """

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), FaultsHandler)
        self.target = target.removeprefix("http://")
        self.kind, self.methods, self.query, self.skip, self.left = "", ("",), "", 0, 0
        self.lock = threading.Lock()

    def spoil(
        self, kind: str, methods: str | tuple[str, ...], count: int, query: str = "", skip: int = 0
    ) -> None:
        """Spoil `count` requests of these methods, after the first `skip` of them."""
        self.methods = (methods,) if isinstance(methods, str) else methods
        self.kind, self.query, self.skip, self.left = kind, query, skip, count

    def take(self, method: str, path: str) -> str:
        with self.lock:
            if method not in self.methods or self.query not in path or self.left == 0:
                return ""
            if self.skip:
                self.skip -= 1
                return ""
            self.left -= 1
            return self.kind

    def answered(self, asked: Asked) -> None:
        """Be told of a request that the server has answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Self]:
        """Forward what comes in, for the length of a block."""
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()


class Storm(Faults):
    """Spoil requests of every kind at random, all of them during an outage, and hold up uploads."""

    def __init__(self, target: str, seed: int, rates: dict[str, float]) -> None:
        super().__init__(target)
        self.draw, self.rates = random.Random(seed), rates
        self.outage_until = 0.0
        self.spoilt: Counter[str] = Counter()
        self.holding, self.end_of_held, self.let_go = "", "", threading.Event()
        self.held_ports: list[int] = []

    def take(self, method: str, path: str) -> str:
        with self.lock:
            (kind,) = self.draw.choices([*self.rates, ""], [*self.rates.values(), 1.0])
            if time.monotonic() < self.outage_until:
                kind = "slow"
            self.spoilt[kind] += bool(kind)
            return kind

    def hold(self, part: str) -> None:
        """From now on let no upload to a path with `part` get through."""
        self.let_go.clear()
        self.holding = part

    def release(self, kind: str) -> None:
        """End the hold; what was held up suffers `kind`."""
        self.holding, self.end_of_held = "", kind
        self.let_go.set()

    def wait_for_release(self, method: str, path: str, port: int) -> str:
        """Return at once for a request that is not held up; else once it is let go, with its end.

        `port` is the client's, by which the process that sent it is known.
        """
        if not self.holding or self.holding not in path or method not in ("PUT", "POST"):
            return ""
        self.held_ports.append(port)
        self.let_go.wait()
        return self.end_of_held


class Cut(Faults):
    """Forward until `cut`: then requests hang, on connections that stay open, until `heal`."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.connected, self.hung = threading.Event(), Counter[str]()
        self.connected.set()
        self.seen: list[Asked] = []

    def cut(self) -> None:
        self.connected.clear()

    def heal(self) -> None:
        """Forward again, and forget what has been answered; the requests that hang are reset."""
        self.seen.clear()
        self.connected.set()

    def take(self, method: str, path: str) -> str:
        if self.connected.is_set():
            return ""
        self.hung[method] += 1
        self.connected.wait()
        return "reset"

    def answered(self, asked: Asked) -> None:
        self.seen.append(asked)


class FaultsHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faults

    def forward(self) -> None:
        fault = self.server.take(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if isinstance(self.server, Storm):
            port = self.client_address[1]
            fault = self.server.wait_for_release(self.command, self.path, port) or fault
        if fault == "stall":
            time.sleep(STALL_S)
        if fault == "reset":
            return self.drop()
        if fault == "page":
            return self.answer(200, {"Content-Type": "text/html"}, b"<html><p>Log in</p></html>")
        if fault in REFUSALS:
            code, status = REFUSALS[fault]
            content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            return self.answer(status, {"Content-Type": "application/xml"}, content)
        upstream = http.client.HTTPConnection(self.server.target, timeout=20)
        sent = dict(self.headers)
        if fault == "blind":
            sent = {k: v for k, v in sent.items() if k.lower() not in ("if-match", "if-none-match")}
        upstream.request(self.command, self.path, body, sent)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        self.server.answered(Asked(self.command, self.path, self.headers, body, answer.status))
        if fault == "lose":
            return self.drop()
        headers = {k: v for k, v in answer.getheaders() if k.lower() not in HOP_HEADERS}
        if self.command == "HEAD":
            headers["Content-Length"] = answer.headers["Content-Length"] or "0"
        return self.answer(answer.status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def answer(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.drop()

    def drop(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)  # close with a reset, as a dying host does
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        pass


REFUSALS = {
    "slow": ("SlowDown", 503),
    "denied": ("AccessDenied", 403),
    "skewed": ("RequestTimeTooSkewed", 403),
    "expired": ("ExpiredToken", 400),
}
HOP_HEADERS = {"content-length", "connection", "transfer-encoding", "date", "server"}
