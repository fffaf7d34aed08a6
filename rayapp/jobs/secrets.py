"""Secrets by reference: a job carries ARNs, and each of its processes reads the values from AWS.

    RAYAPP_SECRETS={"HF_TOKEN": "arn:aws:secretsmanager:us-west-2:123456789012:secret:hf-AbC123"}
    load()          # HF_TOKEN is now in the environment of this process, and nowhere else

Ray stores a job's environment variables and shows them to whoever may see the job. An ARN may be
seen: AWS gives its value to the role of the nodes alone. `arn:...:secret:NAME#field` reads one
field of a secret that is a JSON object.
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
    """Return the value of VARIABLE: the references as JSON."""
    return json.dumps(dict(secrets), sort_keys=True)


def problems_of(secrets: Mapping[str, str]) -> list[str]:
    """Return a line for each entry that is not an ARN; the line does not show its value."""
    return [
        f"secrets.{name} is not a reference: it must be the ARN of a secret of Secrets Manager or "
        "of an SSM parameter, never the value. Store it there, and set its ARN"
        for name, value in secrets.items()
        if not ARN.match(value)
    ]


def load() -> None:
    """Set the environment variables that VARIABLE refers to, except those that are set already.

    Raises:
        SecretError: a reference cannot be read.
    """
    for name, arn in json.loads(os.environ.get(VARIABLE, "{}")).items():
        if name not in os.environ:
            os.environ[name] = _value(name, arn)


def _value(name: str, arn: str) -> str:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    match = ARN.match(arn)
    if match is None:
        raise SecretError(f"secret {name} cannot be read: {VARIABLE} holds no ARN for it")
    plain = arn.partition("#")[0]
    try:
        client = boto3.client(match["service"], region_name=match["region"])
        if match["service"] == "ssm":
            path = match["what"].removeprefix("parameter/")
            path = f"/{path}" if "/" in path else path  # ARNs drop the first slash of a path
            text = client.get_parameter(Name=path, WithDecryption=True)["Parameter"]["Value"]
        else:
            text = client.get_secret_value(SecretId=plain)["SecretString"]
    except (BotoCoreError, ClientError) as error:
        raise SecretError(f"secret {name} cannot be read from {plain}: {error}") from error
    if match["field"] is None:
        return str(text)
    try:
        return str(json.loads(text)[match["field"]])
    except (ValueError, KeyError, TypeError):
        raise SecretError(
            f"secret {name} cannot be read from {plain}: it is no JSON object with a field "
            f"{match['field']}"
        ) from None
