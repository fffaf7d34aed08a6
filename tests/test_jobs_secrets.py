"""Check that secrets travel as references, and are read from AWS's own protocol (moto)."""

from __future__ import annotations

import json
import os

import boto3
import pytest

from rayapp.jobs.secrets import VARIABLE, SecretError, encode, load, problems_of


def test_references_are_read_where_the_process_runs(
    s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    region = {"region_name": "us-west-2"}
    vault = boto3.client("secretsmanager", **region)
    plain = vault.create_secret(Name="hub", SecretString="hf_abc")["ARN"]
    fields = vault.create_secret(Name="many", SecretString='{"wandb": "w1", "n": 5}')["ARN"]
    ssm = boto3.client("ssm", **region)
    ssm.put_parameter(Name="/team/key", Value="k1", Type="SecureString")
    ssm.put_parameter(Name="flat", Value="k2", Type="SecureString")
    arn = "arn:aws:ssm:us-west-2:123456789012:parameter"
    secrets = {"HUB": plain, "WANDB": f"{fields}#wandb", "KEY": f"{arn}/team/key"}
    secrets |= {"FLAT": f"{arn}/flat", "ALREADY": plain}
    assert problems_of(secrets) == []
    monkeypatch.setenv(VARIABLE, encode(secrets))
    monkeypatch.setenv("ALREADY", "mine")
    for name in ("HUB", "WANDB", "KEY", "FLAT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    load()
    found = {name: os.environ[name] for name in secrets}
    assert found == {"HUB": "hf_abc", "WANDB": "w1", "KEY": "k1", "FLAT": "k2", "ALREADY": "mine"}

    for wrong, why in {
        f"{fields}#absent": "no JSON object with a field absent",
        f"{plain}#x": "no JSON object with a field x",
        plain.replace("hub", "gone"): "cannot be read from",
        f"{arn}/not/there": "cannot be read from",
    }.items():
        monkeypatch.setenv(VARIABLE, encode({"NEW": wrong}))
        with pytest.raises(SecretError, match=why) as error:
            load()
        assert "hf_abc" not in str(error.value)


def test_a_value_is_no_reference() -> None:
    (problem,) = problems_of({"HF_TOKEN": "hf_secret_value"})
    assert problem.startswith("secrets.HF_TOKEN is not a reference")
    assert "hf_secret_value" not in problem
    assert json.loads(encode({"B": "2", "A": "1"})) == {"A": "1", "B": "2"}


def test_without_references_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    load()
