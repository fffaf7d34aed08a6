"""Generate text with a run's model, and stream it in pieces.

    for text in generate("s3://bucket/runs/demo", "Once upon a time", max_tokens=100):
        print(text, end="", flush=True)
    model = load("runs/demo"); "".join(generate(model, "Hello", chat=True))    # loaded once

A run's model/ is a whole model, or adapters that peft puts on their base model. From s3:// it is
copied to a temporary folder first.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rayapp.config import ConfigError
from rayapp.data.kinds import takes_template
from rayapp.data.tokens import prompt_ids
from rayapp.observe import status
from rayapp.observe.run_folder import CONFIG, MODEL
from rayapp.storage import Storage, local_copy, open_storage

if TYPE_CHECKING:
    import torch

WHOLE, ADAPTER = "config.json", "adapter_config.json"
GENERATION = "generation_config.json"

Message: TypeAlias = dict[str, str]


@dataclass(frozen=True)
class Settings:
    """Settings of generation."""

    max_tokens: int = 256
    temperature: float = 0.7
    """0 takes the most likely token each time."""
    chat: bool | None = None
    """Whether to apply the chat template to prompts; None: if the run was trained on chats."""
    system: str | None = None
    """The system's message before a prompt that is a text; None: that of the run's chats."""
    prompt: str = ""
    """What `talk` answers; empty: it reads prompts from standard input."""


def generate(
    run: str | Loaded,
    prompt: str | Sequence[Message],
    *,
    max_tokens: int = Settings.max_tokens,
    temperature: float = Settings.temperature,
    chat: bool | None = None,
    system: str | None = None,
) -> Generator[str, None, None]:
    """Yield the continuation of a prompt, or the answer to it, in pieces as they come.

    `run` is a run's folder or s3:// URL, or what `load` returned. `chat` says whether to apply the
    tokenizer's chat template to the prompt; None: if the run was trained on chats. It is always
    applied to a list of messages. `system` is the system's message before a prompt; None: the one
    with which all chats of the run's training began, if they had the same.

    Raises:
        ConfigError: there is no such run or no model in it yet, or the prompt does not fit.
    """
    with ExitStack() as stack:
        model = stack.enter_context(load(run)) if isinstance(run, str) else run
        yield from model.stream(prompt, Settings(max_tokens, temperature, chat, system))


@dataclass
class Loaded:
    """A run's model in memory; as a context manager it deletes temporary copies at the end."""

    model: Any
    tokenizer: Any
    chat: bool
    """The run was trained on chats, and the tokenizer has a chat template."""
    copies: ExitStack
    system: str = ""
    """The system's message with which all chats of the training began."""

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.copies.close()

    def stream(
        self, prompt: str | Sequence[Message], settings: Settings
    ) -> Generator[str, None, None]:
        """Yield the model's text after a prompt; see `generate`."""
        ids = self._ids(prompt, settings).to(self.model.device)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        max_new = settings.max_tokens if limit is None else limit - ids.shape[1]
        max_new = min(max_new, settings.max_tokens)
        if max_new < 1:
            what = f"the model has room for {limit}. Shorten it"
            raise ConfigError([f"--prompt of {ids.shape[1]} tokens is too long: {what}"])
        # Set all three, as the model's own generation_config.json may have other values.
        drawn: dict[str, object] = {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        if settings.temperature == 0:
            drawn = dict.fromkeys(drawn)
        drawn["do_sample"] = settings.temperature != 0
        yield from _stream(self.model, self.tokenizer, ids, {"max_new_tokens": max_new, **drawn})

    def _ids(self, prompt: str | Sequence[Message], settings: Settings) -> torch.Tensor:
        """Return the prompt's token ids: [1, tokens]."""
        import torch

        asked = self.chat if settings.chat is None else settings.chat
        chat = asked or not isinstance(prompt, str)
        if chat and not self.tokenizer.chat_template:
            why = "the model's tokenizer has no chat template"
            raise ConfigError([f"--chat=true is not possible: {why}. Leave it out"])
        system = self.system if settings.system is None else settings.system
        return torch.tensor([prompt_ids(self.tokenizer, prompt, chat, system)])


def talk(model: Loaded, settings: Settings) -> None:
    """Answer `settings.prompt`; without one, answer each line of standard input.

    If standard input is a terminal, converse.
    """
    if settings.prompt:
        _answer(model, settings.prompt, settings)
    elif not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                _answer(model, line.rstrip("\n"), settings)
    else:
        _converse(model, settings)


def _answer(model: Loaded, prompt: str | Sequence[Message], settings: Settings) -> str:
    parts = []
    for text in model.stream(prompt, settings):
        parts.append(text)
        print(text, end="", flush=True)
    print(flush=True)
    return "".join(parts)


def _converse(model: Loaded, settings: Settings) -> None:
    """Read prompts until Ctrl-D and answer them; Ctrl-C ends an answer.

    With the chat template, the model is given all messages so far, else only the last prompt.
    """
    import readline  # noqa: F401, gives input() line editing and a history

    chat = model.chat if settings.chat is None else settings.chat
    print("Ctrl-C ends an answer, Ctrl-D the conversation", file=sys.stderr)
    system = model.system if settings.system is None else settings.system
    begin = [{"role": "system", "content": system}] if system else []
    messages = list[Message](begin)
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not prompt.strip():
            continue
        asked = [*messages, {"role": "user", "content": prompt}]
        try:
            answer = _answer(model, asked if chat else prompt, settings)
        except KeyboardInterrupt:
            print()
            continue
        except ConfigError as error:  # no room left: forget the conversation so far
            print(error, file=sys.stderr)
            messages = list(begin)
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def load(run: str) -> Loaded:
    """Load the model that a run has exported, on a GPU if there is one.

    Raises:
        ConfigError: there is no such run, or no model in it yet, or its base cannot be read.
        StorageError: it cannot be read.
    """
    storage = exported(run)
    folder = storage / MODEL
    adapter = folder.exists(ADAPTER)
    config: Any = status.read_sections(storage) or {}
    if config.get("task") == "vision":
        why = "it trains an image classifier, which writes no text"
        raise ConfigError([f"RUN={run} is no language model: {why}. Give a run of rayapp finetune"])
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    with ExitStack() as stack:
        path = local_copy(folder, stack)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        if adapter:
            model = _adapted(run, path, stack)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype="auto", trust_remote_code=False
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kind = str(config.get("data", {}).get("kind"))
        chats = bool(tokenizer.chat_template) and takes_template(kind)
        system = status.read_plan(storage).get("system", "")
        return Loaded(model.to(device).eval(), tokenizer, chats, stack.pop_all(), system)


def exported(run: str) -> Storage:
    """Return the folder of a run that has exported a model.

    Raises:
        ConfigError: there is no such run, or no model in it yet.
    """
    if "/" not in run and not Path(run).exists() and Path("runs", run).is_dir():
        run = f"runs/{run}"  # the name of a run, as the other commands take it
    storage = open_storage(run)
    if not any((storage / MODEL).exists(name) for name in (ADAPTER, WHOLE)):
        raise ConfigError([_why_none(run, storage)])
    return storage


def _why_none(run: str, storage: Storage) -> str:
    try:
        now = status.read(storage)
    except status.NoRun:
        return (
            f"RUN={run} is no run: it has no {CONFIG}. Give the folder that "
            "`python -m rayapp.finetune` printed, <run.storage>/<run.name>"
        )
    of = f" of {now.num_steps}" if now.num_steps else ""
    why = f"it is {now.status} at step {now.step}, and a model is exported at the end. "
    why += "Run the same command again to go on"
    config = status.read_sections(storage) or {}
    if now.live:
        why = f"it is {now.status}, at step {now.step}{of}, and exports at the end. Wait for it"
    elif config.get("checkpoint", {}).get("export") is False:
        why = "checkpoint.export was false. Run the config again with checkpoint.export=true and "
        why += "another run.name"
    return f"RUN={run} is without a model: {why}"


def base_of(run: str, path: str, stack: ExitStack) -> str:
    """Return a local folder with the base model of the adapters in `path`.

    Raises:
        ConfigError: it cannot be read, or has no weights.
    """
    from rayapp import model

    base = json.loads(Path(path, ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"]
    try:
        source = model.resolve(base)
    except ValueError as error:
        raise ConfigError([f"RUN={run} has adapters without their base: {error}"]) from error
    if source.storage is None:
        why = "they were drawn when the run began. Train adapters on a model folder"
        what = f"has adapters on the preset {base}, which has no weights"
        raise ConfigError([f"RUN={run} {what}: {why}"])
    return local_copy(source.storage, stack)


def _adapted(run: str, path: str, stack: ExitStack) -> Any:
    import transformers

    from rayapp.model.adapter import adapted

    hf = transformers.AutoModelForCausalLM.from_pretrained(
        base_of(run, path, stack), dtype="auto", trust_remote_code=False
    )
    if Path(path, GENERATION).is_file():  # not in what earlier versions wrote
        hf.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return adapted(hf, path)


def _stream(
    model: Any, tokenizer: Any, ids: torch.Tensor, settings: dict[str, object]
) -> Generator[str, None, None]:
    """Generate in a thread and yield the text.

    If the caller stops iterating, generation ends after the current token. An error of the thread
    is raised here.
    """
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

    left, failed = threading.Event(), []

    class Left(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), left.is_set(), device=input_ids.device)

    class Streamer(TextIteratorStreamer):
        def put(self, value: torch.Tensor) -> None:
            if self.next_tokens_are_prompt or int(value) not in stops:
                super().put(value)

    stops = model.generation_config.eos_token_id  # one of them may not be special
    stops = stops if isinstance(stops, list) else [stops]
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def work() -> None:
        try:
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([Left()]),
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
                **settings,
            )
        except BaseException as error:  # raised again in the reading thread
            failed.append(error)
            streamer.end()

    thread = threading.Thread(target=work, name="generate", daemon=True)
    thread.start()
    try:
        yield from (text for text in streamer if text)
    finally:
        left.set()
        thread.join()
    if failed:
        raise failed[0]
