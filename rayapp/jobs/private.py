"""Find what a package must not contain: secrets, by file name or content, and links out of it.

Ray packs every file that neither .gitignore nor .rayignore names, hidden files included, and
follows links. Ray keeps the package, and whoever can submit a job to the cluster can read it.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

NAMES = re.compile(
    r"\.env|\.env\.(?!(example|sample|template|dist)$).+|\.envrc|[._]netrc|\.pgpass|\.pypirc|\.npmrc"
    r"|\.git-credentials|\.htpasswd|\.dockercfg|\.boto|\.s3cfg"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.+\.(key|p12|pfx|jks|keystore|kdbx|ppk)|.+\.tfstate(\..+)?"
    r"|application_default_credentials\.json",
    re.IGNORECASE,
)
FOLDERS = {".aws", ".azure", ".gnupg", ".huggingface", ".kube", ".ssh", ".terraform"}
ENDS = (".docker/config.json", ".ray/auth_token", "huggingface/token", ".streamlit/secrets.toml")
KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY")
KEY_BYTES = 64 * 2**10  # larger files are not searched for a private key
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
    if not links:
        return []
    return [
        f"working_dir={folder} is not safe to send: {_some(sorted(links))} lead out of the "
        "folder, and their targets would be sent too. List them in .rayignore, or copy the files "
        "that the run needs"
    ]


def secret_problems(folder: Path, package: bytes) -> list[str]:
    """Return a line that names the files of a zipped folder that may hold secrets."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        files = [info for info in archive.infolist() if not info.is_dir()]
        names = [
            info.filename for info in files if _is_named(info.filename) or _has_key(archive, info)
        ]
    if not names:
        return []
    return [
        f"working_dir={folder} is not safe to send: {_some(sorted(names))} may hold secrets, and "
        "everyone who can see the cluster can read the package. List them in .rayignore, and pass "
        "what the run needs by secrets"
    ]


def _is_named(path: str) -> bool:
    *folders, name = path.split("/")
    return (
        NAMES.fullmatch(name) is not None
        or any(folder.lower() in FOLDERS for folder in folders)
        or any(f"/{path}".lower().endswith(f"/{end}") for end in ENDS)
    )


def _has_key(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    """Say whether a file holds a private key; .py, .md and .ipynb may quote one and are skipped."""
    if info.file_size > KEY_BYTES or info.filename.endswith((".py", ".md", ".ipynb")):
        return False
    return KEY.search(archive.read(info)) is not None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
