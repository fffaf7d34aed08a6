"""The calls of a run as IAM knows them: what a proxy before an S3 server saw, and who allows it.

    with Recorder(server.url).serving() as recorder: ...
    rows = calls(recorder.seen, run="demo"); verdicts = judge(identity, rows)

golden/calls.json has a row a call. With GOLDEN=write in the environment a drill writes its calls,
and then the tests of infra/ write by which statement of the run's policy each is allowed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree

import pytest
from faults import Asked, Faults

FILE = Path(__file__).parents[1] / "golden" / "calls.json"
BUCKET, KEY = "BUCKET", "KEY"  # in a row's resource
EVALUATOR = Path(sys.prefix, "judges", "node_modules")  # made by `make .venv/.judges`
JUDGE = Path(__file__).parents[1] / "iam" / "judge.cjs"

# (method, of an object, what its query names) -> the action; and the key's, as every object is
# encrypted with it: docs.aws.amazon.com/AmazonS3/latest/userguide/UsingKMSEncryption.html.
ACTIONS = {
    ("HEAD", False, ""): ("s3:ListBucket",),
    ("GET", False, "list-type"): ("s3:ListBucket",),
    ("GET", False, "location"): ("s3:GetBucketLocation",),
    ("GET", False, "uploads"): ("s3:ListBucketMultipartUploads",),
    ("POST", False, "delete"): ("s3:DeleteObject",),
    ("HEAD", True, ""): ("s3:GetObject",),
    ("GET", True, ""): ("s3:GetObject", "kms:Decrypt"),
    ("GET", True, "uploadId"): ("s3:ListMultipartUploadParts",),
    ("PUT", True, ""): ("s3:PutObject", "kms:GenerateDataKey"),
    ("POST", True, "uploads"): ("s3:PutObject", "kms:GenerateDataKey"),
    ("PUT", True, "partNumber uploadId"): ("s3:PutObject", "kms:GenerateDataKey", "kms:Decrypt"),
    ("POST", True, "uploadId"): ("s3:PutObject", "kms:Decrypt"),
    ("DELETE", True, "uploadId"): ("s3:AbortMultipartUpload",),
    ("DELETE", True, ""): ("s3:DeleteObject",),
}
LISTING = {"prefix", "delimiter", "max-keys"}  # condition keys, where the query has them
PAGING = {"encoding-type", "continuation-token"}  # no action or condition key asks for these
PLAIN = re.compile(  # headers that need no action of their own, as e.g. those of ACLs and copies do
    "x-amz-(date|content-sha256|api-version|security-token|meta-.*|sdk-.*|checksum-.*)"
)
CALLERS = {"aiobotocore/": "s3fs", "Boto3/": "boto3"}


class Call(NamedTuple):
    """A call with what is of one run alone taken out."""

    caller: str
    action: str
    resource: str
    keys: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        keys = ", ".join(f"{name}={value}" for name, value in self.keys)
        return f"{self.action} on {self.resource} with {keys or 'no keys'}, by {self.caller}"


class Recorder(Faults):
    """Forward every request, and keep it."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.seen: list[Asked] = []

    def answered(self, asked: Asked) -> None:
        self.seen.append(asked)


def calls(seen: list[Asked], bucket: str, run: str) -> list[Call]:
    """Return each call once, sorted."""
    return sorted({call for asked in seen for call in calls_of(asked, bucket, run)})


def calls_of(asked: Asked, bucket: str, run: str) -> list[Call]:
    """Return what IAM is asked about a request; a request of no known kind fails the test."""
    address = urlsplit(asked.path)
    place, _, key = unquote(address.path)[1:].partition("/")
    place = BUCKET if place == bucket else place
    query = dict(parse_qsl(address.query, keep_blank_values=True))
    headers = {name.lower(): value for name, value in asked.headers.items()}
    form = " ".join(sorted(query.keys() - LISTING - PAGING))
    odd = [name for name in headers if name.startswith("x-amz-") and not PLAIN.fullmatch(name)]
    known = ACTIONS.get((asked.method, bool(key), form))
    what = f"{asked.method} {asked.path} with {odd or 'plain headers'}"
    assert known and not odd, f"no IAM action is known here for {what}"
    agent = headers.get("user-agent", "")
    (caller,) = [name for mark, name in CALLERS.items() if agent.startswith(mark)] or [agent]
    s3, *kms = known

    keys = {f"s3:{name}": query[name] for name in LISTING & query.keys()}
    if "prefix" in query:
        keys["s3:prefix"] = general(query["prefix"], run)
    found = []
    if "if-match" in headers:  # S3 compares what is there
        keys["s3:if-match"] = "<etag>"
        found.append(Call(caller, "s3:GetObject", f"{place}/{general(key, run)}"))
    if "if-none-match" in headers:
        keys["s3:if-none-match"] = headers["if-none-match"]
    targets = names_in(asked.body) if form == "delete" else [key]
    for each in targets:
        resource = f"{place}/{general(each, run)}" if each else place
        found.append(Call(caller, s3, resource, tuple(sorted(keys.items()))))
    via = (("kms:ViaService", "s3.us-west-2.amazonaws.com"),)
    found += [Call(caller, action, KEY, via) for action in kms]
    if key and asked.status == 404 and s3 == "s3:GetObject":  # else the answer is 403
        found.append(Call(caller, "s3:ListBucket", place))
    return found


def names_in(deletion: bytes) -> list[str]:
    """Return the keys that a DeleteObjects names."""
    elements = ElementTree.fromstring(deletion).iter()
    return [str(each.text) for each in elements if each.tag.endswith("Key")]


def general(key: str, run: str) -> str:
    """Take out of a key, or of a prefix, what other runs call otherwise."""
    key = re.sub(rf"(?<=/){re.escape(run)}(?=/|$)", "<run>", key)
    key = re.sub(r"step-\d{8}(\.\d+)?(?=/|$)", "<step>", key)
    key = re.sub(r"[0-9a-f]{16,}", "<hex>", key)
    key = re.sub(r"(?<=/tokens/<hex>/)[0-9a-f]{2}(?=/)", "<hex>", key)
    return re.sub(r"[^/]+$", "<file>", key)


def golden() -> dict[Call, str | None]:
    """Return the statement by which each known call is allowed."""
    rows = json.loads(FILE.read_text()) if FILE.exists() else []
    return {
        Call(row["caller"], row["action"], row["resource"], tuple(row["keys"].items())): row[
            "allowed by"
        ]
        for row in rows
    }


# A log is stored again each minute of an attempt: a short one is stored once.
LOG = "BUCKET/runs/<run>/logs/<file>"
SOMETIMES = {Call("boto3", "s3:PutObject", LOG, (("s3:if-match", "<etag>"),))}


def same_as_golden(found: dict[Call, str | None]) -> None:
    """Compare with the file; with GOLDEN=write in the environment, write it."""
    if os.environ.get("GOLDEN") == "write":
        rows = [
            json.dumps({**call._asdict(), "keys": dict(call.keys), "allowed by": by})
            for call, by in sorted(found.items())
        ]
        FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    known, how = golden(), f"{FILE.name} differs; if meant so, run with GOLDEN=write"
    new = [f"new: {call}" for call in found.keys() - known.keys()]
    gone = [f"no longer made: {call}" for call in known.keys() - found.keys() - SOMETIMES]
    other = [
        f"allowed by {by}, not {known[call]}: {call}"
        for call, by in found.items()
        if call in known and known[call] != by
    ]
    assert not new + gone + other, "\n".join([how, *new, *gone, *other])


def judge(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return {"result", "by": [Sid]} of each simulation, as iam-simulate describes one."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed, on which the evaluator of IAM policies runs")
    assert EVALUATOR.is_dir(), "the evaluator of IAM policies is absent: make .venv/.judges"
    done = subprocess.run(
        ["node", str(JUDGE)],
        input=json.dumps(asked),
        env={**os.environ, "NODE_PATH": str(EVALUATOR)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
