"""Secrets by reference: a job carries ARNs, and each of its processes reads their values itself.

    RAYAPP_SECRETS={"HF_TOKEN": "arn:aws:secretsmanager:us-west-2:123456789012:secret:hf-AbC123"}
    load()          # HF_TOKEN is now in the environment of this process, and nowhere else

A job's environment is stored by Ray and shown to whoever may see the job. A reference may be seen;
what it stands for is given by AWS to the role of the nodes alone. `arn:...:secret:NAME#field` takes
a field of a secret that is a JSON object.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

VARIABLE = "RAYAPP_SECRETS"
ARN = re.compile(
    r"^arn:aws[a-z-]*:(?P<service>secretsmanager|ssm):(?P<region>[a-z0-9-]+):\d{12}:"
    r"(?P<what>secret:[^#\s]+|parameter/[^#\s]+)(#(?P<field>[^#\s]+))?$"
)


class SecretError(RuntimeError):
    """A secret cannot be read; the message names it, never its value."""


def encode(secrets: Mapping[str, str]) -> str:
    """Return what VARIABLE holds."""
    return json.dumps(dict(secrets), sort_keys=True)


def problems_of(secrets: Mapping[str, str]) -> list[str]:
    """Return what is wrong with references, a line each; a value is not shown."""
    return [
        f"secrets.{name} is not a reference: it must be the ARN of a secret of Secrets Manager or "
        "of an SSM parameter, never the value. Store it there, and set its ARN"
        for name, value in secrets.items()
        if not ARN.match(value)
    ]


def load() -> None:
    """Read what VARIABLE refers to into this process's environment, where it is not set already.

    Raises:
        SecretError: a reference cannot be read.
    """
    for name, arn in json.loads(os.environ.get(VARIABLE, "{}")).items():
        if name not in os.environ:
            os.environ[name] = _value(name, arn)


def _value(name: str, arn: str) -> str:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    found = ARN.match(arn)
    if found is None:
        raise SecretError(f"secret {name} cannot be read: {VARIABLE} holds no ARN for it")
    plain = arn.partition("#")[0]
    try:
        client = boto3.client(found["service"], region_name=found["region"])
        if found["service"] == "ssm":
            path = found["what"].removeprefix("parameter/")
            path = f"/{path}" if "/" in path else path  # a name with a path begins with it
            text = client.get_parameter(Name=path, WithDecryption=True)["Parameter"]["Value"]
        else:
            text = client.get_secret_value(SecretId=plain)["SecretString"]
    except (BotoCoreError, ClientError) as error:
        raise SecretError(f"secret {name} cannot be read from {plain}: {error}") from error
    if found["field"] is None:
        return str(text)
    try:
        return str(json.loads(text)[found["field"]])
    except (ValueError, KeyError, TypeError):
        raise SecretError(
            f"secret {name} cannot be read from {plain}: it is no JSON object with a field "
            f"{found['field']}"
        ) from None
