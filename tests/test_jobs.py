"""Check what is sent to a cluster, what is refused before, and what a cluster's refusals become."""

from __future__ import annotations

import io
import json
import os
import random
import shlex
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayapp.config import Config, ConfigError, load
from rayapp.config.arguments import read
from rayapp.jobs import JobError, JobsClient, SubmitOptions, client, package, prepare
from rayapp.jobs.client import address_of
from rayapp.jobs.private import secret_problems
from rayapp.jobs.remote import is_of

ROOT = Path(__file__).parent.parent
ARN = "arn:aws:secretsmanager:us-west-2:123456789012:secret:hub-AbC123"


def config(**overrides: str) -> Config:
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    return load(None, {"run.name": "demo", "run.storage": "s3://bucket/runs", **names})


class Starting:
    """Ray's client of a cluster whose agent for jobs comes up after two answers."""

    def __init__(self, reason: str) -> None:
        self.reason, self.asked = reason, 0

    def list_jobs(self) -> list[Any]:
        return []

    def submit_job(self, **_: Any) -> str:
        self.asked += 1
        if self.asked <= 2:
            raise RuntimeError(f"Request failed with status code 500: {self.reason}")
        return "demo"


def test_a_cluster_that_has_just_started_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "POLL_S", 0.01)
    order = prepare(config(), SubmitOptions())
    starting: Any = Starting("No available agent to submit job, please try again later.")
    assert JobsClient("http://head:8265", starting).submit(order) == "demo"
    assert starting.asked == 3
    refusing: Any = Starting("the runtime environment is invalid")
    with pytest.raises(JobError, match="runtime environment"):
        JobsClient("http://head:8265", refusing).submit(order)
    assert refusing.asked == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_entrypoint_is_the_config(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a shell and the command make of it is the config again."""
    monkeypatch.chdir(tmp_path)  # where the files of examples/ are not: they are no local data
    wanted = load(str(path), {"run.storage": "s3://bucket/runs"})
    words = shlex.split(prepare(wanted, SubmitOptions()).entrypoint)
    assert words[:4] == ["exec", "python", "-m", wanted.MODULE]
    found, _ = read(words[4:], {}, type(wanted))
    assert found == wanted


def test_the_process_that_ray_stops_is_the_driver(tmp_path: Path) -> None:
    """Not a shell that starts it: a shell stopped in that moment leaves a driver that trains."""
    (tmp_path / "python").write_text("#!/bin/sh\necho $$\n")
    (tmp_path / "python").chmod(0o755)
    entrypoint = prepare(config(), SubmitOptions()).entrypoint
    driver = subprocess.Popen(
        entrypoint, shell=True, env={"PATH": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    )
    assert driver.communicate()[0] == f"{driver.pid}\n"


def test_nothing_in_a_config_reaches_the_shell() -> None:
    hostile = ["'; touch /tmp/x; '", "$(id) `id` ${HOME}", 'a "b" \\ c\nnew line', "--train.lr=9"]
    wanted = config(
        eval__prompts=json.dumps(hostile), data__mixture='{"s3://b/a b": 2.5}', train__max_steps="9"
    )
    words = shlex.split(prepare(wanted, SubmitOptions()).entrypoint)
    found, _ = read(words[4:], {})
    assert found == wanted and list(found.eval.prompts) == hostile


HARMLESS = ("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "RAY_AUTH_TOKEN_PATH", "PWD", "MAX_TOKENS")


def test_what_a_cluster_could_not_run_is_refused_before() -> None:
    options = SubmitOptions(
        pip=("ring==1.0", "loose>=2", "also"),
        env=dict.fromkeys(HARMLESS, "/x") | {"HF_TOKEN": "hf_abc", "OPENAI_API_KEY": "x"},
        secrets={"HF_TOKEN": ARN, "PLAIN": "hf_abc"},
    )
    with pytest.raises(ConfigError) as error:
        prepare(config(run__storage="runs"), options)
    problems = error.value.problems
    starts = [problem.split(" ", 1)[0] for problem in problems]
    assert starts == [
        "run.storage=runs", "env.HF_TOKEN", "env.OPENAI_API_KEY", "pip=loose>=2", "pip=also",
        "secrets.PLAIN",
    ]  # fmt: skip
    assert "hf_abc" not in str(error.value)
    assert "Set loose==VERSION" in problems[3]


HUB = f"hf_{'AbCdEfGhIjKlMnOpQrStUvWxYz01234567'}"  # not whole in this file, which is searched


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (f"env.{name}", "x")
            for name in (
                "AWS_ACCESS_KEY_ID",
                "PGPASS",
                "AUTH",
                "GH_PAT",
                "DB_PWD",
                "SSH_PASSPHRASE",
            )
        ),
        ("env.DATABASE_URL", "postgres://ada:word@host/db"),
        ("env.MLFLOW_TRACKING_URI", "https://ada:word@host"),
        ("env.ANY", HUB),
        ("env.ANY", f"ghp_{'0123456789abcdefghij' * 2}"),
        ("env.ANY", "AKIAIOSFODNN7EXAMPLE"),
        ("env.ANY", "-----BEGIN RSA PRIVATE KEY-----"),
        ("tags.ANY", HUB),
        ("pip", f"mine @ git+https://ada:{HUB}@host/mine"),
        ("run.storage", "s3://AKIAIOSFODNN7EXAMPLE:wJalr/K7M@bucket/runs"),
        ("data.path", "https://ada:word@host/data.jsonl"),
        ("eval.prompts", f'["The token is {HUB}", "b"]'),
    ],
)
def test_no_secret_is_in_what_ray_shows_of_a_job(field: str, value: str) -> None:
    section, _, name = field.partition(".")
    given: Any = {section: (value,) if section == "pip" else {name: value}}
    fields = {} if section in ("env", "tags", "pip") else {field.replace(".", "__"): value}
    options = SubmitOptions() if fields else SubmitOptions(**given)
    with pytest.raises(ConfigError) as error:
        prepare(config(**fields), options)
    (problem,) = error.value.problems
    assert problem.startswith(f"{field} ") and value not in problem


def test_what_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "project"
    for name in ("code.py", "data/train.jsonl", "data/secret.jsonl", ".venv/big", "out/model"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("data/secret.jsonl\nout/\n")
    kept = prepare(config(data__path="data/train.jsonl"), SubmitOptions(working_dir="project"))
    assert kept.package is not None
    env = kept.runtime_env(str(tmp_path))
    assert Path(env["working_dir"]).read_bytes() == kept.package
    with zipfile.ZipFile(io.BytesIO(kept.package)) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
    assert files == {"code.py", "data/train.jsonl", ".gitignore"}
    prepare(config(data__path="data"), SubmitOptions(working_dir="project"))

    def refused(path: str, working_dir: str | None = "project") -> str:
        with pytest.raises(ConfigError) as error:
            prepare(config(data__path=path), SubmitOptions(working_dir=working_dir))
        (problem,) = error.value.problems
        return problem

    ignored = refused("data/secret.jsonl")
    assert ignored.startswith(
        "data.path=data/secret.jsonl is not in the package: it is git-ignored"
    )
    assert "it is git-ignored" in refused("out/model")
    (tmp_path / "elsewhere.txt").write_text("x")
    assert "it is not in project" in refused("elsewhere.txt")
    assert "is on this machine alone" in refused("elsewhere.txt", None)
    with pytest.raises(ConfigError, match="working_dir=nowhere is not there"):
        prepare(config(), SubmitOptions(working_dir="nowhere"))
    prepare(config(data__path="org/hub-id"), SubmitOptions())  # a hub id is nowhere here
    prepare(config(data__path="/fsx/data"), SubmitOptions())  # all nodes may share it

    (folder / "weights.bin").write_bytes(random.Random(0).randbytes(3 * 2**20))
    monkeypatch.setattr(package, "LIMIT_MIB", 2)
    with pytest.raises(ConfigError) as error:
        prepare(config(), SubmitOptions(working_dir="project"))
    assert "is too large: 3 MiB packed, of 2 MiB" in str(error.value)
    assert "weights.bin (3 MiB)" in str(error.value)


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (".env", "A=b"),
        (".env.local", "A=b"),
        (".netrc", "machine h login u password p"),
        ("keys/id_ed25519", "anything"),
        ("tls/server.key", "anything"),
        (".aws/credentials", "[default]"),
        (".ssh/config", "Host h"),
        (".cache/huggingface/token", "hf_abc"),
        ("infra/terraform.tfstate", "{}"),
        ("tls/both.pem", KEY),
        ("notes.txt", KEY),
        ("book.ipynb", json.dumps({"cells": [KEY], "picture": "x" * 2**18})),
        ("my-project-1234.json", json.dumps({"type": "service_account", "private_key": KEY})),
        ("notes.txt", f"token: {HUB}"),
        ("code/login.py", f'login("{HUB}")'),
        ("settings.ini", f"aws_secret_access_key = {'aB/3' * 10}"),
        *(
            (name, "anything")
            for name in (
                "prod.env",
                ".rayapp/cluster.token",
                ".config/gh/hosts.yml",
                "terraform.tfvars",
                ".cargo/credentials.toml",
                "stored_tokens",
                "secrets.yaml",
                "credentials.json",
                ".modal.toml",
                ".databrickscfg",
                ".vault-token",
                "kubeconfig",
                ".my.cnf",
                "id_ed25519.bak",
                "id_rsa~",
                "deploy_rsa",
                ".aws/config",
                ".azure/x",
                ".kube/config",
                ".docker/config.json",
                ".config/gcloud/credentials.db",
                ".pgpass",
                ".npmrc",
                ".pypirc",
                ".bash_history",
                "prod.kubeconfig",
                "client_secret_1.json",
                "hf_token",
                "serviceAccountKey.json",
                "api_key.txt",
                "a.kdbx",
                "a.p12",
                "a.jks",
                "kaggle.json",
                "google-credentials.json",
                "secrets.prod.yaml",
                ".terraform.d/credentials.tfrc.json",
            )
        ),
    ],
)
def test_a_folder_with_secrets_is_not_packed(tmp_path: Path, path: str, text: str) -> None:
    folder = tmp_path / "project"
    for name, content in {
        "code.py": "x = 1",
        ".env.example": "A=",
        "ca.pem": "-----BEGIN CERT",
    }.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    options = SubmitOptions(working_dir=str(folder))
    assert prepare(config(), options).package is not None
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)
    with pytest.raises(ConfigError) as error:
        prepare(config(), options)
    (problem,) = error.value.problems
    assert problem.startswith(f"working_dir={folder} is not safe to send: {path} may hold secrets")
    assert "\n" not in problem
    (folder / ".rayignore").write_text(f"{path}\n")
    assert prepare(config(), options).package is not None


def test_what_only_looks_like_a_secret_is_packed(tmp_path: Path) -> None:
    """Data that quote a key, and the names of a language model's and a project's usual files."""
    quoting = {"data.jsonl": KEY, "train.csv": HUB, "big.txt": KEY + "x" * 2**17, "README.md": KEY}
    names = [
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "merges.txt", "tokens.txt", "token.json", "wiki.train.tokens",
        "secrets.jsonl", "config.json", "secrets.py", "credentials.py", "auth.py", "auth.json",
        "token.py", "keys.py", "keystore.py", "test_rsa.py", "rsa.py", "id_rsa.pub", "ca.crt",
        "public.pem", ".env.example", ".env.template", "sample.env", "environment.yml",
        "terraform.tfvars.example", "terraform.tfvars.json", "variables.tf", "hosts.yml",
        "secret_santa.json", "credentials_schema.json", "external-secrets.yaml", "kubeconfig.py",
        "docs/secrets.md", ".gitignore", "docker/config.json", "gh/hosts.yml",
        "huggingface/tokenizer.json", "src/secrets/main.py",
    ]  # fmt: skip
    example = "AKIAIOSFODNN7EXAMPLE hf_xxxxxxxxxxxxxxxxxxxxxxxxxx"
    for name, text in (dict.fromkeys(names, example) | quoting).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    package = prepare(config(), SubmitOptions(working_dir=str(tmp_path))).package
    assert package is not None
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        assert {*names, *quoting} <= set(archive.namelist())


def test_nothing_of_the_checkout_looks_like_a_secret() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name in filter(None, listed.stdout.decode().split("\0")):
            archive.write(ROOT / name, name)
    assert secret_problems(ROOT, made.getvalue()) == []


def test_a_link_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "a.py").write_text("x = 1")
    (folder / "same.py").symlink_to("code/a.py")
    outside.mkdir()
    (outside / "passwords.txt").write_text("p")
    options = SubmitOptions(working_dir=str(folder))
    assert prepare(config(), options).package is not None, "links within are fine"
    (folder / "code" / "out").symlink_to(outside)
    (folder / "file").symlink_to(outside / "passwords.txt")
    with pytest.raises(ConfigError) as error:
        prepare(config(), options)
    (problem,) = error.value.problems
    assert f"code/out -> {outside}, file -> {outside}/passwords.txt lead out" in problem
    (folder / ".rayignore").write_text("out/\nfile\n")
    package = prepare(config(), options).package
    assert package is not None
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        assert not any("passwords" in name or name == "file" for name in archive.namelist())


def test_a_checkout_is_sent_without_what_no_job_needs() -> None:
    _, names = package._pack(ROOT)
    folders = {name.split("/")[0] for name in names}
    assert {"rayapp", "configs", "cluster", "examples"} <= folders
    assert not folders & {"tests", "docs", "bench", "infra"}


def test_what_is_no_text_is_refused_by_name() -> None:
    options = SubmitOptions(env={"N": 1}, tags={"on": True})  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as error:
        prepare(config(), options)
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "env.N is not text",
        "tags.on is not text",
    ]


def test_secrets_go_by_reference_and_a_stop_has_time_to_save() -> None:
    options = SubmitOptions(secrets={"S": ARN})
    variables = prepare(config(), options).runtime_env("/nowhere")["env_vars"]
    assert json.loads(variables["RAYAPP_SECRETS"]) == {"S": ARN}
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) == 600
    options = SubmitOptions(env={"RAY_JOB_STOP_WAIT_TIME_S": "900"})
    variables = prepare(config(), options).runtime_env("/nowhere")["env_vars"]
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "900"


def test_the_address_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    assert address_of() == ("http://127.0.0.1:8265", "by default")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert address_of()[1] == "by default"
    monkeypatch.setenv("RAY_ADDRESS", "http://10.0.0.1:8265/")
    assert address_of() == ("http://10.0.0.1:8265", "RAY_ADDRESS")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://ray.example")
    assert address_of() == ("https://ray.example", "RAY_API_SERVER_ADDRESS")
    assert address_of("127.0.0.1:1") == ("http://127.0.0.1:1", "as asked")
    with pytest.raises(
        ConfigError, match="address=ray://h:10001 is not an address of the Jobs API"
    ):
        address_of("ray://h:10001")


@pytest.fixture
def old_cluster() -> Iterator[str]:
    """A dashboard that says it is Ray 2.50."""

    class Dashboard(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"version": "4", "ray_version": "2.50.0", "ray_commit": "x"}')

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Dashboard)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_another_ray_and_no_ray(old_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is asked for is taken, whatever the environment says."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(JobError, match=r"runs Ray 2.50.0, and this rayapp runs Ray 2.60"):
        JobsClient.at(old_cluster)
    with pytest.raises(JobError, match=r"no Ray cluster answers at http://127.0.0.1:9 \(RAY_API"):
        JobsClient.at()
    assert os.environ["RAY_API_SERVER_ADDRESS"] == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("run_url", "found"),
    [
        ("s3://b/runs/demo", True),
        ("s3://b/runs/demo/", True),
        ("s3://b/runs/other", False),
        ("gs://b/runs/demo", False),
        (None, None),
    ],
)
def test_whether_a_job_is_of_a_run(run_url: str | None, found: bool | None) -> None:
    info: Any = SimpleNamespace(run_url=run_url)
    assert is_of(info, "s3://b/runs/demo") is found
