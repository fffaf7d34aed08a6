"""Ray's Jobs API as far as its client asks for it, with jobs that a test makes up."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray


class Dashboard:
    """Answers for `jobs`, by submission id.

    `asked` are all requests, `sent` the jobs that were submitted, `uploaded` the sizes of packages
    in bytes, `stopped` the ids stopped, `logs` what the jobs printed,
    `late` how a job is once it was submitted, `stops_at_once` whether a job ends when asked to.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.uploaded: list[int] = []
        self.logs: dict[str, str] = {}
        self.late: dict[str, dict[str, Any]] = {}
        self.stops_at_once = True

    def add(self, submission_id: str, status: str, **facts: Any) -> None:
        known: dict[str, Any] = {"type": "SUBMISSION", "submission_id": submission_id}
        known |= {"status": status, "entrypoint": "python other.py", "message": ""}
        known |= {"metadata": {}, "runtime_env": {}, "start_time": 1000, "end_time": None}
        self.jobs[submission_id] = known | {"driver_exit_code": None} | facts

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": ray.__version__, "ray_commit": "x"}
        if (method, path) == ("POST", "/api/jobs/"):
            self.sent.append(json.loads(body))
            submission_id = self.sent[-1]["submission_id"]
            if submission_id in self.late:
                self.add(submission_id, **self.late[submission_id])
            return 200, {"job_id": None, "submission_id": submission_id}
        if path == "/api/jobs/":
            return 200, list(self.jobs.values())
        if path.startswith("/api/packages/"):
            if method == "PUT":
                self.uploaded.append(len(body))
            return (200, {}) if method == "PUT" else (404, "not there")
        submission_id, _, what = path.removeprefix("/api/jobs/").partition("/")
        if submission_id not in self.jobs:
            return 404, f"Job {submission_id} does not exist"
        if what == "logs":
            return 200, {"logs": self.logs.get(submission_id, f"logs of {submission_id}\n")}
        if what == "stop":
            self.stopped.append(submission_id)
            if self.stops_at_once:
                self.jobs[submission_id]["status"] = "STOPPED"
            return 200, {"stopped": True}
        return 200, self.jobs[submission_id]


@contextlib.contextmanager
def dashboard() -> Iterator[Dashboard]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, value = found.answer(self.command, self.path, body)
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_PUT = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Dashboard(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
