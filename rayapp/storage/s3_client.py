"""Send requests to S3, retry transient failures, and explain the others to the user."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from rayapp.storage.base import StorageError

log = logging.getLogger("rayapp.storage")
T = TypeVar("T")

retry_s = 120.0  # seconds that a request is retried, from its first failure
first_pause_s = 0.2  # seconds before the second try; doubled each time, up to 20
s3_attempts = 10  # attempts that botocore makes within one of ours
probe_timeout_s = 3.0  # seconds to connect, and to read, for check_writable


def send(
    what: str,
    url: str,
    request: Callable[[Any], T],
    answers: dict[str, T] | None = None,
    patient: bool = True,
    attempts: int | None = None,
) -> T:
    """Send a request, which must be safe to repeat, until it succeeds.

    `answers` maps expected S3 error codes to the values to return for them. `attempts` is how often
    botocore tries within one of ours. Without `patient` only botocore retries, once, with short
    timeouts.
    Raises: FileNotFoundError; StorageError at once, or after retry_s of transient failures.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    failures = (BotoCoreError, ClientError, ConnectionError, HTTPError, ResponseParserError)
    bucket = url.split("/")[2]
    failed_at = None
    for attempt in itertools.count(1):
        try:
            client = _made(patient, attempts or s3_attempts)
        except (BotoCoreError, ValueError) as error:  # ValueError: a malformed endpoint
            raise StorageError(what, url, *_s3_reason(error, bucket)) from error
        try:
            return request(client)
        except failures as error:
            code = error_code(error)
            if answers is not None and code in answers:
                return answers[code]
            if code == "NoSuchKey":
                raise FileNotFoundError(errno.ENOENT, "no such file", url) from None
            if code in STALE:
                _forget(client)
            why, fix = _s3_reason(error, bucket)
            if not patient or not _is_transient(error):
                raise StorageError(what, url, why, fix) from error
            failed_at = failed_at or time.monotonic()
            spent_s = time.monotonic() - failed_at
            pause_s = min(20.0, first_pause_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
            if spent_s + pause_s > retry_s:
                why = f"{why} (gave up after {attempt} tries in {spent_s:.0f} s)"
                outage = StorageError(what, url, why, fix)
                outage.outage = True
                raise outage from error
            log.warning("%s %s: %s; try %d in %.1f s", what, url, why, attempt + 1, pause_s)
            time.sleep(pause_s)
    raise AssertionError("unreachable")


_clients: dict[object, Any] = {}
_clients_lock = threading.Lock()


def _made(patient: bool, attempts: int) -> Any:
    """Return the client of boto3 that was made in this process for the current AWS_ variables.

    A client must not cross a fork, hence the process id in the key.
    """
    import boto3
    from botocore.config import Config

    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (os.getpid(), patient, attempts, probe_timeout_s, environment)
    with _clients_lock:
        if key not in _clients:
            config = Config(**settings_of(patient, attempts))
            _clients[key] = boto3.Session().client("s3", config=config)
            _clients[key].meta.events.register_first("needs-retry.s3", _log_failure)
        return _clients[key]


def settings_of(patient: bool, attempts: int = s3_attempts) -> dict[str, Any]:
    """Return the arguments of botocore's Config."""
    adaptive = {"mode": "adaptive", "total_max_attempts": attempts}
    quick = {"mode": "standard", "total_max_attempts": 2}
    return {
        "retries": adaptive if patient else quick,
        "connect_timeout": 10 if patient else probe_timeout_s,
        "read_timeout": 60 if patient else probe_timeout_s,
        "max_pool_connections": 32,
        "tcp_keepalive": True,
    }


def _forget(client: Any) -> None:
    """Drop a client, so that the next request makes one that reads renewed credentials."""
    with _clients_lock:
        for key in [key for key, known in _clients.items() if known is client]:
            del _clients[key]


Answer: TypeAlias = dict[str, Any]
"""Fields of a request or an answer of S3, which botocore leaves untyped."""


def proven(answer: Answer, field: str = "ETag") -> Answer:
    """Return an answer that has a field S3 always sends; else raise ConnectionError.

    A proxy's log-in page is a 200 too.
    """
    if not answer.get(field) and answer.get(field) is not False:
        raise ConnectionError(f"the answer has no {field}, so it is not S3's")
    return answer


def place_of(url: str) -> dict[str, str]:
    """Return the bucket and the key of an object's URL."""
    return {"Bucket": url.split("/")[2], "Key": url.split("/", 3)[3]}


def head(key: dict[str, str], client: Any) -> Answer:
    """Send a HEAD; if it is refused, send a GET, whose answer contains the reason."""
    from botocore.exceptions import ClientError

    try:
        return proven(client.head_object(**key))
    except ClientError as error:
        if error.response["Error"]["Code"] in ("400", "403"):
            try:
                client.get_object(**key, Range="bytes=0-0")
            except ClientError as reason:
                if error_code(reason) in STALE:
                    raise reason from error
        raise


def _log_failure(
    response: Any = None,
    caught_exception: Exception | None = None,
    operation: Any = None,
    attempts: int = 0,
    **_: Any,
) -> None:
    """Log failed attempts that botocore retries itself; it calls this after every attempt."""
    why: object = caught_exception
    if response is not None and (response[0].status_code >= 500 or response[0].status_code == 429):
        why = f"{response[0].status_code} {response[1].get('Error', {}).get('Code', '')}"
    if why is not None:
        log.warning("%s attempt %d failed: %s", operation.name, attempts, why)


def error_code(error: BaseException | None) -> str:
    """Return the S3 error code, '' if S3 did not answer; of a HEAD, by its status."""
    from botocore.exceptions import ClientError

    code = str(error.response["Error"].get("Code")) if isinstance(error, ClientError) else ""
    return {"404": "NoSuchKey", "403": "AccessDenied", "412": "PreconditionFailed"}.get(code, code)


def status_of(error: Any) -> int:
    """Return the HTTP status of a botocore ClientError; 0 if it has none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
UNSTEADY = {"InternalError", "ServiceUnavailable", "RequestTimeout"}
STALE = {"ExpiredToken", "RequestTimeTooSkewed"}  # renewed or corrected within minutes
CONTENDED = {"OperationAborted", "ConditionalRequestConflict"}


def _is_transient(error: Exception) -> bool:
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, boto.ClientError):
        passing = THROTTLED | UNSTEADY | STALE | CONTENDED
        return error_code(error) in passing or status_of(error) in (429, 500, 502, 503, 504)
    lost = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, ConnectionError)
    # urllib3's errors, which botocore lets through while it reads the body of a refused download.
    spoilt = (HTTPError, ResponseParserError, boto.FlexibleChecksumError)
    return isinstance(error, (*lost, *spoilt, boto.CredentialRetrievalError))


S3_REASONS = {  # code -> (why, what to do)
    "NoSuchBucket": (
        "the bucket {bucket} does not exist",
        "Create it with `aws s3 mb s3://{bucket}` or correct the name",
    ),
    "AccessDenied": (
        "access denied",
        "Allow s3:ListBucket on {bucket} and s3:Get-, Put- and DeleteObject on {bucket}/*",
    ),
    "InvalidAccessKeyId": ("the access key is not known", "Check AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": ("the secret key is wrong", "Check AWS_SECRET_ACCESS_KEY"),
    "ExpiredToken": ("the credentials have expired", "Log in again"),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "Set the clock"),
    "PermanentRedirect": ("the bucket is in another region", "Set AWS_REGION to its region"),
    "AuthorizationHeaderMalformed": ("the region is wrong", "Set AWS_REGION to the bucket's"),
}


def _s3_reason(error: Exception, bucket: str) -> tuple[str, str]:
    """Return (why, what to do) of an S3 failure, for the user."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return "no AWS credentials were found", "Set AWS_PROFILE, run `aws login`, or use a role"
    if isinstance(error, (boto.HTTPClientError, boto.ConnectionError, HTTPError)):
        why = f"the S3 endpoint cannot be reached: {str(error).rstrip('.')}"
        return why, "Check the network, AWS_ENDPOINT_URL_S3 and AWS_REGION"
    if isinstance(error, ConnectionError | ResponseParserError):
        why = " ".join(str(error).split()).rstrip(".")
        return why, "Check AWS_ENDPOINT_URL_S3 and whether a proxy stands before it"
    code = error_code(error)
    if code not in S3_REASONS:
        return str(error).rstrip("."), ""
    why, fix = S3_REASONS[code]
    return why.format(bucket=bucket), fix.format(bucket=bucket)
