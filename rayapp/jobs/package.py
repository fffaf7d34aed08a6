"""Build what is sent to a cluster: an entrypoint, a runtime environment, and perhaps a folder.

The config is passed as overrides in the entrypoint, so the dashboard shows what runs, and a run
without local files uploads nothing. Local code and data go in `working_dir`, which is zipped and
checked on this machine before anything is sent.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayapp.config import ConfigError, RunConfig
from rayapp.jobs.private import KEY, link_problems, secret_problems
from rayapp.jobs.secrets import VARIABLE, encode, problems_of
from rayapp.observe.events import job_variables
from rayapp.observe.plain import NO_BARS, redacted

LIMIT_MIB = 100  # largest upload the dashboard accepts (Ray 2.60, DASHBOARD_CLIENT_MAX_SIZE)
RUN_KEY = "rayapp.run"  # in a job's metadata: the run's folder
NAME_KEY = "job_name"  # in a job's metadata: the name in Ray's dashboard
TAG_PREFIX = "rayapp.tag."
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # seconds from SIGTERM, on which a run saves, to SIGKILL
STOP_WAIT_S = 600  # a save of 70B parameters to S3 takes minutes; Ray's own default is 3
SKIPPED = (  # lines of workers that need no action; Ray's log files keep them
    r"class name: 'PreemptionWatcher'",
    r"PreemptionWatcher: preemption detected",  # the run says so itself
    r"The hostname of the client socket cannot be retrieved",  # a network without names
    r"Failed to query Ray Train Controller actor state",  # without a dashboard
    r"Dataset \S+ execution finished in",
    r"PYTHON worker processes have been started on node",  # a small machine
    r"torchao/_C_|Detected no triton|register_constant\(\)",  # torchao's import without a GPU
)
QUIET = {  # keeps other lines out of the run's own output
    "RAY_DEDUP_LOGS_SKIP_REGEX": "|".join(SKIPPED),
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    NO_BARS: "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it has a logger print once more what a worker prints
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::DeprecationWarning",
    "TOKENIZERS_PARALLELISM": "false",
}
PINNED = re.compile(r"^[A-Za-z0-9._\[\],-]+(==|\s*@\s*)\S+$")
LOOKS_SECRET = re.compile(  # the name of a variable, unless it is that of a file
    r"(?!.*_(DIR|FILE|PATH)$)((^|_)(AUTH|KEY|PASS|PASSWD|PAT)$|_PWD$|TOKEN(_|$)|(ACCESS|API|PRIVATE)_?KEY"
    r"|CREDENTIAL|PASSPHRASE|PASSWORD|PGPASS|SECRET)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SubmitOptions:
    """What a submission has beside the config: its runtime environment, and its driver's needs."""

    working_dir: str | None = None
    """Folder to upload as the job's working directory; None: nothing is uploaded."""
    pip: tuple[str, ...] = ()
    """Pinned requirements that the cluster's image lacks."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; whoever can see the job can read them."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment variables by reference: ARNs of Secrets Manager or of SSM parameters."""
    driver_cpus: float = 0.0
    """Logical CPUs that Ray reserves for the driver; 0 lets it run on the head."""
    driver_memory_gib: float = 0.0
    """Memory that Ray reserves for the driver, in GiB; 0: none."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Stored in the job's metadata."""


@dataclass(frozen=True)
class Submission:
    """A checked and packed job: what `JobsClient.submit` takes."""

    run_url: str
    name: str
    entrypoint: str
    options: SubmitOptions
    package: bytes | None
    """The zipped working directory; None: there is none."""
    is_run: bool = True
    """Whether the job trains the run; one that does not (preflight) may start while it is live."""

    def runtime_env(self, folder: str) -> dict[str, object]:
        """Return Ray's runtime environment; write the package into `folder`, to be uploaded."""
        options = self.options
        variables = {STOP_WAIT: str(STOP_WAIT_S), **QUIET, **job_variables(), **options.env}
        if options.secrets:
            variables[VARIABLE] = encode(options.secrets)
        env: dict[str, object] = {"env_vars": variables}
        if options.secrets:  # Ray calls the hook in worker processes; the driver calls load itself
            env["worker_process_setup_hook"] = "rayapp.jobs.secrets.load"
        if options.pip:
            env["pip"] = list(options.pip)
        if self.package is not None:
            path = Path(folder) / "working_dir.zip"
            path.write_bytes(self.package)
            env["working_dir"] = str(path)
        return env

    def metadata(self) -> dict[str, str]:
        """Return the job's metadata: name, run folder (of a run) and tags."""
        tags = {TAG_PREFIX + name: value for name, value in self.options.tags.items()}
        return {NAME_KEY: self.name, **({RUN_KEY: self.run_url} if self.is_run else {}), **tags}


def prepare(
    config: RunConfig, options: SubmitOptions, module: str | None = None, flags: Sequence[str] = ()
) -> Submission:
    """Check that a config can run on a cluster, zip its working directory, return the submission.

    `module` is the Python module that the job runs, by default the one that trains. `flags` are
    appended to its command line, after the config's overrides.

    Raises:
        ConfigError: with every problem.
    """
    problems = [*_storage_problems(config), *_environment_problems(config, options)]
    package = None
    names: set[str] = set()
    if options.working_dir is not None:
        folder = Path(options.working_dir).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                [
                    *problems,
                    f"working_dir={options.working_dir} is not there: there is no such folder",
                ]
            )
        package, names = _pack(folder)
        problems += [*secret_problems(folder, package), *_size_problems(folder, package)]
    problems += _path_problems(config, options, names)
    if problems:
        raise ConfigError(problems)
    arguments = [f"--{name}={value}" for name, value in config.to_overrides().items()]
    is_run = module is None
    module = module or config.MODULE
    command = ["python", "-m", module, *arguments, *flags]
    return Submission(
        run_url=f"{config.run.storage}/{config.run.name}",
        name=config.run.name if is_run else module.rpartition(".")[2],
        # exec: Ray runs this by a shell. Without it, a stop while the shell starts Python ends the
        # shell alone: the job is STOPPED, and its driver trains on.
        entrypoint=f"exec {shlex.join(command)}",
        options=options,
        package=package,
        is_run=is_run,
    )


def _storage_problems(config: RunConfig) -> list[str]:
    storage = config.run.storage
    if "://" in storage or os.path.isabs(storage):
        return []
    return [
        f"run.storage={storage} is relative: on a cluster, that folder is deleted with the job. "
        "Set s3://bucket/prefix, or an absolute path that all nodes share"
    ]


def _environment_problems(config: RunConfig, options: SubmitOptions) -> list[str]:
    texts = {"env": options.env, "secrets": options.secrets, "tags": options.tags}
    problems = [
        f"{kind}.{name} is not text: its value is of type {type(value).__name__}. Put it in quotes"
        for kind, values in texts.items()
        for name, value in values.items()
        if not isinstance(value, str)
    ]
    if problems:
        return problems
    problems = [
        f"env.{name} looks like a secret: everyone who can see the job can read its environment "
        f"variables. Set secrets.{name} to the ARN of a secret or of an SSM parameter"
        for name, value in options.env.items()
        if LOOKS_SECRET.search(name) or redacted(value) != value or KEY.search(value.encode())
    ]
    shown = {**config.to_overrides(), **{f"tags.{k}": v for k, v in options.tags.items()}}
    problems += [
        f"{name} holds a password or token: everyone who can see the job can read its command "
        "line, tags and pip. Leave it out, and give access by a role or by secrets"
        for name, value in {**shown, "pip": ",".join(options.pip)}.items()
        if redacted(value) != value
    ]
    problems += [
        f"pip={requirement} is not pinned: all nodes of a run must have the same version. "
        f"Set {re.split('[<>=!~ ]', requirement)[0]}==VERSION"
        for requirement in options.pip
        if not PINNED.match(requirement)
    ]
    return problems + problems_of(options.secrets)


def _path_problems(config: RunConfig, options: SubmitOptions, packed: set[str]) -> list[str]:
    """Return a line for each local file that the config needs and the cluster would not have."""
    problems = []
    tree = config.model_dump()
    paths = [(name, tree[name.split(".")[0]][name.split(".")[1]]) for name in config.PATH_FIELDS]
    paths += [("data.mixture", path) for path in tree["data"].get("mixture") or {}]
    tasks = (tree["eval"].get("tasks") or {}).items()
    paths += [(f"eval.tasks.{name}.path", task["path"]) for name, task in tasks]
    base = Path(options.working_dir or ".").expanduser()
    for name, path in paths:
        if not path or "://" in path or os.path.isabs(path) or path.startswith("~"):
            continue  # a URL, or an absolute path, which may be shared by all nodes
        if not (Path(path).exists() or (base / path).exists()):
            continue  # a hub id, a preset, a glob
        if options.working_dir is None:
            problems.append(
                f"{name}={path} is on this machine alone: the cluster cannot read it. Set "
                "working_dir to a folder that holds it, or s3://"
            )
        elif not any(name == path or name.startswith(path.rstrip("/") + "/") for name in packed):
            ignored = (base / path).exists()
            why = "it is git-ignored" if ignored else f"it is not in {options.working_dir}"
            problems.append(
                f"{name}={path} is not in the package: {why}, and so is not uploaded. "
                "Un-ignore it, put it on s3://, or set RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1"
            )
    return problems


def _pack(folder: Path) -> tuple[bytes, set[str]]:
    """Zip a folder as Ray would, obeying .gitignore and .rayignore; return the zip and its names.

    Raises:
        ConfigError: links in it lead elsewhere.
    """
    import logging

    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import create_package

    excludes = ray_constants.get_runtime_env_default_excludes()
    gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    if problems := link_problems(folder, excludes, gitignore):
        raise ConfigError(problems)
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary) / "working_dir.zip"
        create_package(
            str(folder),
            target,
            include_gitignore=gitignore,
            excludes=excludes,
            logger=logging.getLogger("rayapp.jobs"),
        )
        with zipfile.ZipFile(target) as archive:
            names = set(archive.namelist())
        return target.read_bytes(), names


def _size_problems(folder: Path, package: bytes) -> list[str]:
    import io

    if len(package) <= LIMIT_MIB * 2**20:
        return []
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        largest = sorted(archive.infolist(), key=lambda info: -info.compress_size)[:3]
    shown = ", ".join(f"{info.filename} ({info.compress_size / 2**20:.0f} MiB)" for info in largest)
    return [
        f"working_dir={folder} is too large: {len(package) / 2**20:.0f} MiB packed, of "
        f"{LIMIT_MIB} MiB that a cluster takes; the largest are {shown}. Put data on s3://, or "
        "name what is not needed in .rayignore"
    ]
