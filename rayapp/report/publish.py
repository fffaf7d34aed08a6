"""Publish a run's exported model on the Hugging Face hub.

    done = publish(open_storage("runs/demo"), "org/name", base=None, public=False)
    done.url, done.sent, done.kept

huggingface_hub's upload_folder sends the files: it skips those that the repository has, and a
second call goes on where the first was cut off. It is given a folder of links to the export, in
which the files that can name a place of this machine are rewritten. The card's metadata hold the
run's id, by which a repository of the run is known again.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import huggingface_hub as hub
import yaml
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from rayapp.config import ConfigError
from rayapp.model.files import INDEX
from rayapp.model.source import FRONT, LICENCES, front_matter
from rayapp.observe.plain import redacted
from rayapp.observe.records import Plan
from rayapp.observe.run_folder import MODEL, RUN_ID
from rayapp.report.card import ADAPTER, CARD, CURVE, HUB_ID, MADE, card, curve, front_of
from rayapp.report.folder import ReportedRun, read
from rayapp.storage import Storage, StorageError, local_copy, open_input, read_json

RUN = "rayapp_run"  # in the card's metadata: the id of the run
NAMES = ("base_model_name_or_path", "_name_or_path", "name_or_path")  # fields of JSON files
PATHS = (*NAMES, "tokenizer_file", "vocab_file", "special_tokens_map_file")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", INDEX)
BINARY = (".safetensors", ".model", ".png", ".jpg")
STALE = ["model*.safetensors", "adapter_*", INDEX, "config.json"]  # of an earlier export


class PublishError(RuntimeError):
    """The hub has not taken the model; says why and what to do."""


@dataclass(frozen=True)
class Publication:
    """What was done; the files are named as the repository has them, with their bytes."""

    url: str
    private: bool
    sent: dict[str, int]
    kept: dict[str, int]
    notes: list[str]


def publish(
    storage: Storage, target: str, *, base: str | None = None, public: bool = False
) -> Publication:
    """Send the model in a run's folder to the repository `target` of the hub.

    `base` is the hub id of the model that the run started from, "none" if the hub has none; it is
    needed if the run knows the base as a folder.

    Raises:
        ConfigError: it is not possible as asked; nothing was sent.
        PublishError: the hub does not answer, or refuses.
    """
    if not re.fullmatch(HUB_ID, target):
        raise ConfigError([f"TARGET={target} is not valid: it is no hub id. Give org/name"])
    if hub.get_token() is None:
        why = "neither HF_TOKEN nor a login on this machine has one"
        raise ConfigError([f"a token of the hub is missing: {why}. Run hf auth login"])
    if not sys.stderr.isatty():
        disable_progress_bars()
    api, run = hub.HfApi(), read(storage)
    with ExitStack() as stack, _explained(target, api.endpoint):
        source = Path(local_copy(storage / MODEL, stack))
        known, licence, notes = _base(run, source, base, api)
        own = storage.read(RUN_ID).decode().strip() if storage.exists(RUN_ID) else run.name
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        based = replace(run, plan=cast(Plan, {**run.plan, "base": known}))
        _stage(based, own, source, licence, folder)
        _refuse_places(folder, [storage.url, _name(run), os.path.expanduser("~/")])
        before = _claimed(api, target, own, public)
        api.upload_folder(
            repo_id=target,
            folder_path=folder,
            commit_message=f"{run.name}, step {run.step}",
            delete_patterns=STALE,
        )
        private, after = bool(api.model_info(target).private), _files(api, target)
        sizes = {name: path.stat().st_size for name, path in _walk(folder).items()}
        if lost := [name for name in sizes if name not in after or after[name][1] != sizes[name]]:
            raise PublishError(f"{target} lacks {', '.join(lost)}: does a .gitignore exclude them?")
        kept = {name: sizes[name] for name in sizes if before.get(name) == after[name]}
        sent = {name: size for name, size in sizes.items() if name not in kept}
        return Publication(f"{api.endpoint}/{target}", private, sent, kept, notes)


@contextmanager
def _explained(target: str, endpoint: str) -> Iterator[None]:
    """Raise what huggingface_hub raises as a PublishError that says what to do."""
    again = "The same command goes on where this one ended"
    try:
        yield
    except (ConfigError, PublishError, StorageError):
        raise
    except Exception as error:  # huggingface_hub raises types of three packages
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = " ".join(redacted(str(getattr(error, "server_message", None) or error)).split())
        organisation = target.partition("/")[0]
        cure = {
            401: "The token is not valid. Run hf auth login, or set HF_TOKEN",
            403: f"The token has no right to write to {organisation}. Give it one in its settings",
        }.get(status or 0, f"Is {endpoint} within reach, and HF_HUB_OFFLINE unset? {again}")
        raise PublishError(f"cannot publish to {target}: {why:.300}. {cure}") from error


def _name(run: ReportedRun) -> str:
    """Return what the run started from: a hub id, a path or URL, or a preset."""
    base: Any = run.plan.get("base", {})
    return str(base.get("name") or run.config.get("model", {}).get("path", ""))


def _base(
    run: ReportedRun, source: Path, asked: str | None, api: Any
) -> tuple[dict[str, Any], dict[str, bytes], list[str]]:
    """Return the base by the card's names, its LICENSE by name, and what is not as wished.

    Raises: ConfigError: the base is not on the hub, or is another model there.
    """
    base: dict[str, Any] = dict(run.plan.get("base", {}))
    name, adapter = _name(run), (source / ADAPTER).exists()
    random = base.get("random") or "/" not in name
    if adapter and (random or asked == "none"):
        why = "whoever opens it would have no weights to put it on"
        cure = "Train with model.lora.merge=true, and publish the merged model"
        raise ConfigError([f"RUN={run.url} is an adapter without a base on the hub: {why}. {cure}"])
    local = open_input(name) if _is_place(name) else None
    if asked is None and local and not random:
        why = f"the run knows its base as {name}, which is no id of the hub"
        cure = "Set --base=org/name" + ("" if adapter else ", or --base=none if the hub has none")
        raise ConfigError([f"--base is missing: {why}. {cure}"])
    if random or asked == "none":
        files = [name for name in LICENCES if local is not None and local.exists(name)]
        return base | {"id": None}, {name: local.read(name) for name in files if local}, []
    base["id"] = asked or name
    try:
        info = api.model_info(base["id"])
    except RepositoryNotFoundError:
        why = "the hub has no such model, or the token may not see it"
        raise ConfigError([f"--base={base['id']} is unknown: {why}. Set --base=org/name"]) from None
    shape = local if adapter else open_input(str(source))
    ours = (read_json(shape, "config.json") if shape else None) or {}
    kinds = [values.get("model_type") for values in (ours, info.config or {})]
    if None not in kinds and kinds[0] != kinds[1]:
        why = f"it is of model_type {kinds[1]}, and the run's base of {kinds[0]}"
        raise ConfigError([f"--base={base['id']} is another model: {why}. Set the run's base"])
    told = info.card_data.to_dict() if info.card_data else {}
    base |= {key: told[key] for key in ("license", "license_name", "license_link") if key in told}
    licence, notes = dict[str, bytes](), list[str]()
    for file in [each.rfilename for each in info.siblings or () if each.rfilename in LICENCES]:
        try:
            licence[file] = Path(api.hf_hub_download(base["id"], file)).read_bytes()
        except GatedRepoError:
            notes.append(f"{file} of {base['id']} is not sent: the token has no access to it")
    return base, licence, notes


def _stage(
    run: ReportedRun, own: str, source: Path, licence: Mapping[str, bytes], folder: Path
) -> None:
    """Lay the files to be sent into a folder: links, and in place of some what may be sent."""
    files, adapter = _walk(source), (source / ADAPTER).exists()
    base: Any = run.plan.get("base", {})
    made = {name: data for name, data in licence.items() if name not in files}
    text = files[CARD].read_text(encoding="utf-8") if CARD in files else MADE
    if MADE in text:
        text, made[CURVE] = card(run, adapter), curve(run).encode()
    front = {**front_of(run, adapter), **front_matter(text), RUN: own}
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    made[CARD] = f"---\n{head}---\n{FRONT.sub('', text)}".encode()

    def public(values: dict[str, Any]) -> dict[str, Any]:
        told = {key for key in PATHS if _is_place(values.get(key))}
        kept = {key: value for key, value in values.items() if key not in told}
        return kept | {key: base.get("id") for key in NAMES if key in told}

    for name, path in files.items():
        if name.endswith(".json") and name not in {*VOCABULARIES, *made}:
            values = json.loads(path.read_bytes(), object_hook=public)
            if name == ADAPTER:
                values[NAMES[0]] = base.get("id")
            if values != json.loads(path.read_bytes()):
                made[name] = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in made:
            (folder / name).symlink_to(path)
    for name, data in made.items():
        (folder / name).write_bytes(data)


def _walk(folder: Path) -> dict[str, Path]:
    """Return the files of a folder by their names in it, without hidden ones."""
    paths = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: path for name, path in paths.items() if not re.match(r"(.*/)?\.", name)}


def _is_place(value: object) -> bool:
    return isinstance(value, str) and re.match(r"/|~|\w+://", value) is not None


def _refuse_places(folder: Path, places: list[str]) -> None:
    """Refuse files that name a place of this machine.

    Raises: ConfigError: with each place.
    """
    host = socket.gethostname()  # of one that is a plain word, it is not known what it stands for
    sought = [re.escape(place) for place in places if _is_place(place) and len(place) > 2]
    sought += [] if host.isalpha() else [rf"\b{re.escape(host)}\b"]
    problems = []
    for name, path in _walk(folder).items():
        if name in VOCABULARIES or name.endswith(BINARY):
            continue
        text = path.read_bytes().decode(errors="replace")
        if found := re.search("|".join(sought), text):
            line = text.count("\n", 0, found.start()) + 1
            why = "it is a place of this machine, which everybody who opens the model would see"
            problems.append(f"{MODEL}/{name}, line {line}, has {found[0]}: {why}. Take it out")
    if problems:
        raise ConfigError(problems)


def _claimed(api: Any, target: str, own: str, public: bool) -> dict[str, tuple[str, int]]:
    """Create the repository, or make sure that it is this run's; return the files in it.

    Raises: ConfigError: it has content from elsewhere, or everybody sees it.
    """
    try:
        info = api.model_info(target)
    except RepositoryNotFoundError:
        api.create_repo(target, private=not public)
        return {}
    if not info.private and not public:
        why = "it exists, and everybody sees it"
        raise ConfigError([f"TARGET={target} is public: {why}. Add --public, or take another name"])
    files = _files(api, target)
    others = [name for name in files if name != ".gitattributes"]
    if others and (info.card_data is None or info.card_data.to_dict().get(RUN) != own):
        why = f"{others[0]} and others there are not of this run ({RUN} of {CARD} is not {own})"
        raise ConfigError([f"TARGET={target} has other content: {why}. Take another name"])
    return files


def _files(api: Any, target: str) -> dict[str, tuple[str, int]]:
    """Return the digests and sizes of the files in a repository."""
    tree = api.list_repo_tree(target, recursive=True)
    return {each.path: (each.blob_id, each.size) for each in tree if hasattr(each, "blob_id")}
