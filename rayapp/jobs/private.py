"""Find what a package must not contain: secrets, by file name or content, and links out of it.

Ray packs every file that neither .gitignore nor .rayignore names, hidden files included, and
follows links. Ray keeps the package, and whoever can submit a job to the cluster can read it.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

from rayapp.observe.plain import TOKEN

# The files of gitleaks' and gitrob's rules, and those in which tools keep what they log in with.
PRIVATE = re.compile(
    r"""(.*/)?(
    (\.aws|\.azure|\.gnupg|\.huggingface|\.kube|\.password-store|\.rayapp|\.secrets|\.ssh
      |\.terraform(\.d)?|\.config/(doctl|gcloud|gh|glab-cli|hub|op|rclone))(/.*)?
    |\.circleci/cli\.yml|(\.codex|\.composer|containers)/auth\.json|\.dbt/profiles\.yml
    |\.docker/config\.json|\.gradle/gradle\.properties|huggingface/token|\.m2/settings.*\.xml
    |\.ray/auth_token|sops/age/keys\.txt|\.snowflake/.+\.toml|\.snowsql/config
    |\.env|\.env[._-](?!(defaults?|dist|example|sample|template)$).+|\.envrc
    |(.+\.)?(local|prod|production|secrets?|staging)\.env
    |[._]netrc|\.?pgpass(\.conf)?|\.my(login)?\.cnf|\.npmrc|\.pypirc|\.docker(cfg|configjson)
    |\.boto|\.s3cfg|\.passwd-s3fs|\.?rclone\.conf|\.databrickscfg|\.modal\.toml|kaggle\.json
    |\.git-credentials|\.htpasswd|\.\w+_history|\.?vault[-_](token|pass(word)?)(\.txt)?
    |\.?terraform\.?rc|\.comet\.config|clearml\.conf|\.ftpconfig|sftp(-config)?\.json
    |\.?(access|auth|gh|github|hf)_token(\.txt)?|stored_tokens|\.?(\w+_)?api_?keys?(\.(json|txt))?
    |(rootkey|.*accesskeys?)\.csv|client_secret_.+\.json|service[-_]?account([-_]?key)?\.json
    |\.?(([a-z0-9]+[-_])?(credentials?|creds)|((app|aws|client|db)[-_])?secrets?)
      ([._-](dev|local|prod|production|staging))?
      (\.(cfg|conf|csv|env|ini|json|properties|tfrc\.json|toml|txt|ya?ml))?
    |application_default_credentials\.json|(.+[.-])?kubeconfig(-[\w-]+)?(\.(conf|json|ya?ml))?
    |(.+\.)?tfvars|.+\.tfstate(\..+)?|.+\.publishsettings|ssh_host_\w+_key
    |.+_(dsa|ecdsa|ed25519|rsa)(_sk)?|id_(dsa|ecdsa|ed25519|rsa)(_sk)?[._~-](?!pub$).*
    |.+\.(agilekeychain|jks|kdbx?|key|keystore|p12|p8|pfx|pkcs12|ppk)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File|AGE-SECRET-KEY-1")
CREDENTIAL = re.compile(
    TOKEN.pattern.encode() + rb"|(?i:secret_?access_?key)\W{1,5}[A-Za-z0-9/+]{40}\b"
    rb"|client-key-data: *[A-Za-z0-9+/=]{64}"
)
PLACEHOLDER = re.compile(rb"EXAMPLE|[xX]{8}")
QUOTE_KEYS = (".md", ".py")
DATA = (".arrow", ".csv", ".jsonl", ".parquet", ".tsv")
SEARCHED_BYTES = 64 * 2**10  # a larger file is data, but for a notebook with its pictures
NOTEBOOK_BYTES = 16 * 2**20
SHOWN = 5  # names in a message


def link_problems(folder: Path, excludes: list[str], gitignore: bool) -> list[str]:
    """Return a line that names the links out of a folder that Ray's packing would follow."""
    from ray._private.runtime_env import packaging

    root, links = folder.absolute(), list[str]()

    def is_ignored(path: Path) -> bool:
        inner = path.relative_to(root).parts[:-1]
        for count in range(len(inner) + 1):
            above = root.joinpath(*inner[:count])
            for match in packaging.get_excludes_from_ignore_files(above, gitignore):
                if match(path) or match(path / "any"):  # `name/` matches only what is inside
                    return True
        return False

    def leaves(path: Path) -> bool:
        if not path.is_symlink() or path.resolve().is_relative_to(root.resolve()):
            return False
        if not is_ignored(path):
            links.append(f"{path.relative_to(root)} -> {path.resolve()}")
        return True

    skipped = [packaging._get_excludes(root, excludes), leaves]
    packaging._dir_travel(root, skipped, lambda path: None, gitignore)
    why = "lead out of the folder, and their targets would be sent too"
    return _unsafe(folder, links, why, "or copy the files that the run needs")


def secret_problems(folder: Path, package: bytes) -> list[str]:
    """Return a line that names the files of a zipped folder that may hold secrets."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        names = [
            info.filename
            for info in files
            if PRIVATE.fullmatch(info.filename) or _holds_secret(archive, info)
        ]
    why = "may hold secrets, and everyone who can see the cluster can read the package"
    return _unsafe(folder, names, why, "and pass what the run needs by secrets")


def _holds_secret(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    """Say whether a file holds a private key or a token; Python and Markdown may quote a key."""
    name = info.filename.lower()
    limit = NOTEBOOK_BYTES if name.endswith(".ipynb") else SEARCHED_BYTES
    if info.file_size > limit or name.endswith(DATA):
        return False
    data = archive.read(info)
    if not name.endswith(QUOTE_KEYS) and KEY.search(data):
        return True
    return any(not PLACEHOLDER.search(found[0]) for found in CREDENTIAL.finditer(data))


def _unsafe(folder: Path, names: list[str], why: str, fix: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    named = ", ".join(sorted(names)[:SHOWN]) + more
    what = f"working_dir={folder} is not safe to send: {named} {why}"
    return [f"{what}. List them in .rayignore, {fix}"]
