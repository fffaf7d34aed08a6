"""Check a fine-tuning run before Ray starts, and report all problems in one message.

    ready = check(config, cores, gpus)      # raises ConfigError with every problem
    ready = settle(ready, gpus=True)        # no `auto` is left in what the workers compute

Nothing here starts an actor or holds a resource. Of the data, only the names, sizes, headers and
first records of files are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayapp import model
from rayapp.config import Config, ConfigError
from rayapp.config.fields import RecordKind
from rayapp.data import first_records, shapes, sources, tokens
from rayapp.data.chat import reads
from rayapp.data.kinds import are_labelled, are_pairs, takes_template
from rayapp.data.rendering import Renderer
from rayapp.data.task_items import TaskRecords, read_records
from rayapp.driver import checks, command
from rayapp.driver.growth import schedule_problem
from rayapp.driver.ray_session import fastest_precision
from rayapp.finetune import auto
from rayapp.finetune.code_check import as_begun, code_digests, code_problems, columns_of_loss
from rayapp.finetune.model_parts import model_shape, technique_problems
from rayapp.finetune.start import shape_problem, with_adapter, with_new_tokens, with_origin
from rayapp.model.gguf import in_folder, needs_folder
from rayapp.observe.run_folder import PREPARED
from rayapp.planner.trained import is_made, length_problem, tokenizer_of, tokens_of, vocabulary_of
from rayapp.presets import OWN
from rayapp.storage import Storage, StorageError, open_storage
from rayapp.train.planning import forecast

MAX_NAMED = 3  # tokens without an embedding, in a message
# What a tokenizer that has loaded may yet fail at; in a run of letters, by the steps of a pattern.
PROBE = f"{'a' * 40}! and 1 more\n"


@dataclass(frozen=True)
class Input:
    """One source of training data with its resolved kind and format."""

    path: str
    weight: float
    kind: RecordKind
    source: sources.DataSource
    eval_source: sources.DataSource | None
    """Held-out data of the same kind from data.eval_path."""
    unused: tuple[str, ...] = ()
    """Columns that nothing is made of."""
    values: tuple[str, ...] = ()
    """Columns whose numbers train.loss takes."""


@dataclass(frozen=True)
class CheckedLanguageRun(command.CheckedRun):
    """What the checks read and resolved."""

    config: Config
    inputs: tuple[Input, ...]
    model: model.ModelSource
    tokenizer: Any
    """None if it is still to be made: trained on the data, or of bytes."""
    template: str = ""
    """The chat template that data.chat_template names."""
    tasks: tuple[TaskRecords, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's code that changes what is trained, by config field."""
    auto: tuple[str, ...] = ()
    """The fields of train that the command leaves at `auto`."""

    @property
    def parts(self) -> dict[str, object]:
        parts = dict[str, object]()
        for entry in self.inputs:
            of = f"{entry.path} " if self.config.data.mixture else ""
            held_out = entry.eval_source
            parts[f"{of}files"] = entry.source.digest()
            parts[f"{of}eval_files"] = held_out.digest() if held_out is not None else None
        return parts


def absolute(config: Config) -> Config:
    """Make local paths absolute, those of a mixture and of tasks too; see `checks.absolute`."""
    local = checks.absolute_path
    config = checks.absolute(config, {"data.chat_template": (tokens.CHATML, tokens.TRAINING)})
    mixture = {str(local(path)): share for path, share in config.data.mixture.items()}
    tasks = {
        name: task.model_copy(update={"path": local(task.path)})
        for name, task in config.eval.tasks.items()
    }
    return config.with_fields("data", mixture=mixture).with_fields("eval", tasks=tasks)


def check(config: Config, local_cores: int | None, local_gpus: int) -> CheckedLanguageRun:
    """Check storage, data, model and number of workers, and whether the planned memory fits.

    `local_cores` is None where the workers run on a running cluster.

    Raises:
        ConfigError: with every problem found.
    """
    config = absolute(config)
    problems = checks.shared_problems(config, local_cores, local_gpus)
    run = open_storage(config.run.storage) / config.run.name
    code = code_digests(config, run, problems)
    taken = columns_of_loss(config) if code or config.train.loss is None else ()
    inputs = _inputs(config, taken, problems)
    tasks = _tasks(config, problems)
    kinds = {entry.kind for entry in inputs}
    config, base, tokenizer = _model(config, kinds, problems)
    if not problems and base is not None:
        config, tokenizer = with_new_tokens(config, base, tokenizer, problems)
    problems += _objective_problems(config, inputs, base)
    template = _template(config, tokenizer, problems)
    own = tokens.CHAT_TEMPLATE if tokenizer is None else str(tokenizer.chat_template)
    inputs = tuple(_without_read(entry, template or own) for entry in inputs)
    if problems:
        raise ConfigError(problems)
    assert inputs and base is not None
    inputs = tuple(_as_begun(entry, run) for entry in inputs)
    if len(inputs) == 1:
        config = config.with_fields("data", kind=inputs[0].kind, format=inputs[0].source.format)
    ids = None if tokenizer is None else tokens.num_ids(tokenizer)
    shape = model_shape(base, config, ids)
    if problem := checks.plan_problem(config, lambda each: forecast(each, shape)):
        raise ConfigError([problem])
    if wrong := code_problems(config, shape):
        raise ConfigError(wrong)
    if problem := schedule_problem(config, run) or shape_problem(config, run, shape):
        raise ConfigError([problem])
    return CheckedLanguageRun(config, run, inputs, base, tokenizer, template, tasks, code)


def _as_begun(entry: Input, run: Storage) -> Input:
    held_out = entry.eval_source and as_begun(entry.eval_source, run)
    return replace(entry, source=as_begun(entry.source, run), eval_source=held_out)


def settle(ready: CheckedLanguageRun, gpus: bool) -> CheckedLanguageRun:
    """Replace train.precision=auto, take what a begun run keeps, check the techniques there.

    Raises:
        ConfigError: the workers cannot do what is asked.
    """
    config = auto.as_begun(ready.config, ready.run)
    if config.train.precision == "auto":
        config = config.with_fields("train", precision=fastest_precision(gpus))
    if wrong := technique_problems(config, ready.model, "cuda" if gpus else "cpu"):
        raise ConfigError(wrong)
    fields = ("micro_batch", "compile")
    left = tuple(name for name in fields if getattr(ready.config.train, name) is None)
    return replace(ready, config=config, auto=left)


def vocabulary_problem(config: Config, base: model.ModelSource, tokenizer: Any) -> str | None:
    """Return a problem if the tokenizer has ids that the model has no embedding for.

    `tokenizer` is None if it is still to be made.
    """
    own = base.config.get_text_config().vocab_size
    name = tokenizer_of(config, own, base.preset)
    ids = tokens_of(name) if tokenizer is None else tokens.num_ids(tokenizer)
    embeddings = vocabulary_of(config, own, base.preset, ids)
    if ids is None or embeddings is None or ids <= embeddings:
        return None
    names = {} if tokenizer is None else {i: t for t, i in tokenizer.get_vocab().items()}
    beyond = [f", {i} for {names[i]!r}" for i in sorted(names) if i >= embeddings]
    return (
        f"model.tokenizer={name} is too large for the model: it has {len(names) or ids} tokens "
        f"with ids up to {ids - 1}{''.join(beyond[:MAX_NAMED])}, and {config.model.path} has "
        f"embeddings for {embeddings}. Set model.tokenizer to the one the model was trained with"
    )


def _inputs(config: Config, values: tuple[str, ...], problems: list[str]) -> tuple[Input, ...]:
    """Check every source; give data.eval_path to the first source of the same kind."""
    field = "data.mixture" if config.data.mixture else "data.path"
    unknown = [name for name in config.data.columns if name not in shapes.NAMES]
    if unknown:
        problems.append(
            f"data.columns={unknown[0]} is unknown: no record has such a column. Give your columns "
            f"by the names of known ones: {', '.join(shapes.NAMES)}"
        )
    inputs = []
    for path, weight in config.data.weights.items():
        if found := _source(config, path, field, values, problems):
            source, first = found
            inputs.append(Input(path, weight, first.kind, source, None, first.unused, values))
    if config.data.eval_path is None:
        return tuple(inputs)
    found = _source(config, config.data.eval_path, "data.eval_path", values, problems)
    if found is None or len(inputs) < len(config.data.weights):
        return tuple(inputs)
    eval_source, first = found
    owner = next((number for number, entry in enumerate(inputs) if entry.kind == first.kind), None)
    if owner is None:
        problems.append(
            f"data.eval_path={config.data.eval_path} is of another kind: it holds {first.kind}, "
            f"but {inputs[0].path} holds {inputs[0].kind}. Give held-out data of the same kind"
        )
    else:
        inputs[owner] = replace(inputs[owner], eval_source=eval_source)
    return tuple(inputs)


def _objective_problems(
    config: Config, inputs: tuple[Input, ...], base: model.ModelSource | None
) -> list[str]:
    """Return why train.objective cannot be used with these records or this model."""
    objective, problems = config.train.objective, list[str]()
    for entry in inputs:
        labelled = are_labelled(entry.kind)
        which = "kto" if labelled else "dpo" if are_pairs(entry.kind) else "sft"
        if (objective == "sft", objective == "kto") != (which == "sft", labelled):
            needs = "chosen and rejected" if objective != "kto" else "prompt, completion and label"
            fix = "" if objective == "sft" else f", or name the columns {needs} in data.columns"
            problems.append(
                f"train.objective={objective} is in conflict: the records of {entry.path} are "
                f"{entry.kind}. Set train.objective={which}, or data.kind to another kind{fix}"
            )
    windows = config.data.window_bytes is not None
    if windows and base is not None and config.reference(base.adapter) == "computed before":
        problems.append(
            f"data.window_bytes={config.data.window_bytes} is in conflict: train.objective="
            f"{objective} computes the reference's log-probabilities of all rows before the first "
            "step, unless new adapters leave the model intact. Remove data.window_bytes, or set "
            "model.lora"
        )
    return problems


def _tasks(config: Config, problems: list[str]) -> tuple[TaskRecords, ...]:
    found = []
    for name, task in config.eval.tasks.items():
        records, wrong = read_records(name, task)
        problems += wrong
        found += [records] if records is not None else []
    return tuple(found)


def _without_read(entry: Input, template: str) -> Input:
    """Return a source without the fields of messages in `unused` that the chat template reads."""
    fields = {name for name in entry.unused if name.startswith("messages.")}
    read = {name for name in fields if reads(template, name.removeprefix("messages."))}
    return replace(entry, unused=tuple(name for name in entry.unused if name not in read))


def _source(
    config: Config, path: str, field: str, values: tuple[str, ...], problems: list[str]
) -> tuple[sources.DataSource, first_records.Inspected] | None:
    data = config.data
    try:
        source = sources.find(path, data.format)
        found = first_records.inspect(path, source, data.kind, data.bad_rows, data.columns, values)
        problems += [line.replace("data.path=", f"{field}=", 1) for line in found.problems]
        return source, found
    except (sources.SourceError, StorageError) as error:
        problems.append(checks.source_problem(error, path, field))
        return None


def _model(
    config: Config, kinds: set[RecordKind], problems: list[str]
) -> tuple[Config, model.ModelSource | None, Any]:
    """Return the config with the settings of the model's adapter, the model and its tokenizer."""
    path, scratch = config.model.path, config.model.from_scratch
    try:
        if needs_folder(path, scratch):
            if problems:  # it takes long, and may need what is wrong
                return config, None, None
            root = open_storage(config.run.storage) / PREPARED
            path = in_folder(path, root, scratch)
            config = config.with_fields("model", path=path)
        base = model.resolve(path)
        scratch = scratch or (base.preset and path == OWN)
        wrong = model.problems(base, from_scratch=scratch)
    except (ValueError, StorageError) as error:
        problems.append(str(error))
        return config, None, None
    if not wrong:
        config, wrong = with_adapter(config, base)
    if not wrong:
        run = open_storage(config.run.storage) / config.run.name
        config, wrong = with_origin(config, run, base.preset)
    problems += wrong
    tokenizer = None if wrong else _tokenizer(config, base, kinds, problems)
    return config, base, tokenizer


def _tokenizer(
    config: Config, base: model.ModelSource, kinds: set[RecordKind], problems: list[str]
) -> Any:
    """Return the tokenizer, None if it is still to be made; check that it fits model and data."""
    limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if problem := length_problem(config, limit):
        problems.append(problem)
    name = config.model.tokenizer or config.model.path
    if is_made(tokenizer_of(config, 0, base.preset)):
        if problem := vocabulary_problem(config, base, None):
            problems.append(problem)
        return None
    try:
        tokenizer = tokens.load_tokenizer(name)
        Renderer(tokenizer, "text").document(PROBE)
    except BaseException as error:  # tokenizers' panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        problems.append(
            f"model.tokenizer={name} is not a tokenizer: {why}. Copy "
            "its tokenizer.json and tokenizer_config.json anew, or set bpe:4096 to train one"
        )
        return None
    if problem := vocabulary_problem(config, base, tokenizer):
        problems.append(problem)
    found = tokenizer.chat_template  # a text, or several by name
    default = found.get("default") if isinstance(found, dict) else found
    templated = next(filter(takes_template, kinds), None)
    if templated and not default and not config.data.chat_template:
        which = f" named default (but {', '.join(found)})" if found else ""
        problems.append(
            f"data.kind={templated} is without a template: {name} has no chat_template{which}. Set "
            "data.chat_template=chatml, model.tokenizer to another, or data.kind=prompt if the "
            "records can be prompts"
        )
    return tokenizer


def _template(config: Config, tokenizer: Any, problems: list[str]) -> str:
    name = config.data.chat_template
    if name is None or problems:
        return ""
    try:
        return tokens.template_of(name, tokenizer)
    except (tokens.TemplateError, StorageError, UnicodeDecodeError) as error:
        text = str(error)
        named = text.startswith("data.chat_template=")
        problems.append(text if named else f"data.chat_template={name} is not readable: {text}")
        return ""
