"""Prepare what training needs: the tokenizer, the rows, their order, and the plan of the run."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

from rich.console import Console

from rayapp import model
from rayapp.config import Config, ConfigError
from rayapp.data import tokens
from rayapp.data.kinds import KINDS, takes_template
from rayapp.data.prepared import Prepared, mixed, parts_of_mixture, repacked
from rayapp.data.prepared_windows import Preparation
from rayapp.data.recipe import RowRecipe
from rayapp.data.rendering import Renderer
from rayapp.data.task_items import TaskItems, items_of
from rayapp.data.token_rows import step_rows
from rayapp.data.tokens import TRAINING
from rayapp.driver import command
from rayapp.driver.growth import describe, refuse_other_data, stages_of
from rayapp.driver.placement import on_what_is_there
from rayapp.finetune import auto, plan_lines, preview, source_rows
from rayapp.finetune.check import CheckedLanguageRun, Input, check, settle
from rayapp.finetune.ends import described, ends_of_data, generation_config, names_of
from rayapp.finetune.model_parts import model_shape
from rayapp.model import names
from rayapp.model.source import published
from rayapp.observe import metrics
from rayapp.observe.activity import Phases
from rayapp.observe.records import Base, Plan
from rayapp.observe.result import RunFailed as RunFailed
from rayapp.observe.run_folder import METRICS, PLAN, PREPARED
from rayapp.observe.status import read_plan
from rayapp.order import Order, combine, fingerprint
from rayapp.planner.trained import tokenizer_of
from rayapp.storage import Storage, open_storage
from rayapp.train.checkpoint.marker import latest, steps_done
from rayapp.train.planning import forecast
from rayapp.train.spec import LanguageSpec, RunSpec

KIND = "rayapp.finetune"
TOKENIZER_SAMPLE_BYTES = 16 * 2**20


def prepare(
    ready: CheckedLanguageRun, gpus: bool, console: Console, phases: Phases
) -> tuple[LanguageSpec, Preparation | None]:
    """Prepare the rows, `describe` the run in its folder, print the plan, and return the spec.

    Return the preparation of the windows that follow too, if some do.
    """
    config = ready.config
    phases.begin("preparing the tokenizer")
    tokenizer_url, tokenizer = shared_tokenizer(ready, phases)
    first = (steps_done(ready.run) + 1) * config.rows_per_step
    tasks = _tasks(ready, tokenizer)
    prepared, rest = prepare_rows(ready, tokenizer_url, tokenizer, phases, first)
    phases.end("data")
    phases.begin("planning")
    shape = model_shape(ready.model, config, tokens.num_ids(tokenizer))
    of_data = prepared.fingerprint, prepared.turn_rows
    stages = stages_of(ready.run, *of_data, config.rows_per_step)
    order = order_of(config.with_micro_batch(1), prepared, stages)
    config = auto.chosen(config, shape, ready.run, gpus, console, order.num_steps)
    order = replace(order, micro_batch=config.micro_batch)
    check_order(ready.run, prepared, order)
    parameters, trainable, by_name = count_parameters(shape, config)
    there = on_what_is_there(config)
    planned = forecast(there, shape, steps=order.num_steps, on_cpu=not gpus)
    vocabulary = shape.get_text_config().vocab_size
    settled = replace(ready, config=config)
    plan = plan_of(settled, prepared, order, parameters, tokenizer_url, vocabulary)
    plan["trainable_parameters"] = trainable
    if ready.code:
        plan["code"] = dict(ready.code)
    plan["rendered"] = preview.rendered(ready, tokenizer)
    plan["system"] = preview.system_of(ready)
    ends = ends_of_data(prepared, tokenizer)
    stops = generation_config(config, ready.model, shape, tokenizer, ends).eos_token_id or []
    plan["stops"] = names_of(stops, tokenizer)
    describe(ready.run, config, cast(Plan, (planned.as_dict() if planned else {}) | plan))
    plan_lines.plan(console, config, prepared, order, parameters, trainable, by_name)
    plan_lines.unused(console, {entry.path: entry.unused for entry in ready.inputs})
    plan_lines.records(console, plan["rendered"])
    plan_lines.ends(console, described(ends, config, tokenizer, stops))
    phases.end("plan")
    spec = RunSpec(KIND, config, prepared, order, ready.run.url, tokenizer_url, ready.auto)
    return replace(spec, tasks=tasks, system=plan["system"]), rest


def _tasks(ready: CheckedLanguageRun, tokenizer: Any) -> tuple[TaskItems, ...]:
    """Return the tasks with their items' tokens.

    Raises:
        ConfigError: a record cannot be rendered.
    """
    data, made, problems = ready.config.data, list[TaskItems](), list[str]()
    for task in ready.tasks:
        renderer = Renderer(tokenizer, task.kind, "", data.reasoning, data.special_tokens)
        items, wrong = items_of(task, renderer)
        problems += wrong
        made += [items] if items is not None else []
    if problems:
        raise ConfigError(problems)
    return tuple(made)


def prepare_beforehand(ready: CheckedLanguageRun, phases: Phases) -> Prepared:
    """Prepare all rows that the run needs.

    Raises:
        ConfigError: as `prepare_rows`.
    """
    phases.begin("preparing the tokenizer")
    url, tokenizer = shared_tokenizer(ready, phases)
    return prepare_rows(ready, url, tokenizer, phases)[0]


def shared_tokenizer(ready: CheckedLanguageRun, phases: Phases) -> tuple[str, Any]:
    """Return (URL of the tokenizer's folder in run.storage, tokenizer); train it if need be.

    A tokenizer that was already trained on the same data is loaded.
    """
    config = ready.config
    root = open_storage(config.run.storage) / PREPARED
    tokenizer = ready.tokenizer
    own = ready.model.config.get_text_config().vocab_size
    name = tokenizer_of(config, own, ready.model.preset)
    trained = None
    if tokenizer is None and name == "bytes":
        tokenizer = tokens.byte_tokenizer()
    if tokenizer is None:
        trained = _trained_tokenizer(ready, root, name, phases)
        tokenizer = tokens.load_tokenizer(trained.url)
    if ready.template and config.data.chat_template != TRAINING:
        tokenizer = copy.copy(tokenizer)  # that of the cache keeps its own
        tokenizer.chat_template = ready.template
    elif trained is not None:
        return trained.url, tokenizer
    folder = root / f"tokenizer-{tokens.tokenizer_digest(tokenizer)}"
    if not folder.list():
        tokens.save_tokenizer(tokenizer, folder)
    return folder.url, tokenizer


def _trained_tokenizer(
    ready: CheckedLanguageRun, root: Storage, name: str, phases: Phases
) -> Storage:
    """Return the folder of a tokenizer that is trained on the data, and train it if it is new."""
    digests = {entry.path: (entry.weight, entry.source.digest()) for entry in ready.inputs}
    data = fingerprint(digests) if len(digests) > 1 else ready.inputs[0].source.digest()
    trained = root / f"tokenizer-{name.replace(':', '-')}-{data}"
    if not trained.exists("tokenizer.json"):
        phases.begin(f"training a tokenizer ({name}) on the data")
        made = preview.made_tokenizer(ready, name, TOKENIZER_SAMPLE_BYTES)
        tokens.save_tokenizer(made, trained)
    return trained


def prepare_rows(
    ready: CheckedLanguageRun,
    tokenizer_url: str,
    tokenizer: Any,
    phases: Phases,
    first: int | None = None,
) -> tuple[Prepared, Preparation | None]:
    """Make the rows of every source, or take those of an earlier run.

    With `first`, return when so many rows are made, if the others can follow: the second value
    makes these.

    Raises:
        ConfigError: data cannot be read, more records are unusable than data.bad_rows allows, or
            nothing is left.
    """
    config = ready.config
    root = open_storage(config.run.storage) / PREPARED
    recipes = {e.path: _recipe(ready, e, tokenizer_url, tokenizer) for e in ready.inputs}
    recipes = _begun(ready, recipes)
    count = config.data.packings
    if count > 1:
        (recipe,) = recipes.values()
        recipes = {f"packing {n + 1} of {count}": replace(recipe, packing=n) for n in range(count)}
    rest: Preparation | None = None
    problems: list[str] = []
    if config.data.window_bytes is not None and config.train.max_steps is not None:
        made, rest = source_rows.prepare_windows(config, recipes, root, phases, first)
    else:
        made = source_rows.prepare_each(config, recipes, root, phases, problems)
    problems += source_rows.unusable_sources(config, made)
    if problems:
        raise ConfigError(problems)
    if count > 1:
        return repacked(root, list(made.values())), rest
    mixture = config.data.mixture
    joined = mixed(root, made, mixture) if mixture else made[config.data.path]
    return joined, rest


def _recipe(
    ready: CheckedLanguageRun, entry: Input, tokenizer_url: str, tokenizer: Any
) -> RowRecipe:
    data, pad = ready.config.data, tokenizer.pad_token_id
    templated = takes_template(entry.kind)
    return RowRecipe(
        source=entry.source,
        eval_source=entry.eval_source,
        kind=entry.kind,
        tokenizer_url=tokenizer_url,
        tokenizer_digest=tokens.tokenizer_digest(tokenizer),
        pad_id=pad if pad is not None else (tokenizer.eos_token_id or 0),
        seq_len=data.seq_len,
        pack=data.pack,
        truncate=data.truncate,
        eval_fraction=0.0 if data.eval_path else data.eval_fraction,
        columns=data.columns,
        template=ready.template if templated and data.chat_template == TRAINING else "",
        reasoning=data.reasoning if templated else "train",
        special_tokens=data.special_tokens,
        window_bytes=data.window_bytes,
        values=entry.values,
    )


def _begun(ready: CheckedLanguageRun, recipes: dict[str, RowRecipe]) -> dict[str, RowRecipe]:
    """Return the recipes with which this run has begun: of the version before, or these."""
    data, (newest, _) = ready.config.data, latest(ready.run)
    began: object = None
    if newest is not None:
        began = newest.state["cursor"]["fingerprint"]
    elif ready.run.exists(PLAN):
        began = read_plan(ready.run).get("fingerprint")
    else:
        return recipes
    before = {p: replace(each, version=KINDS[each.kind].version - 1) for p, each in recipes.items()}
    parts = {path: recipe.parts() for path, recipe in before.items()}
    if data.mixture:
        joined = parts_of_mixture(parts, data.mixture)
    else:
        joined = parts[data.path] | ({"packings": data.packings} if data.packings > 1 else {})
    return before if fingerprint(joined) == began else recipes


def order_of(config: Config, prepared: Prepared, stages: tuple[tuple[int, int], ...] = ()) -> Order:
    """Return the order of the run's rows; `stages` are those of a run that has grown."""
    rows, train, seed = prepared.turn_rows, config.train, config.run.seed
    sizes = (config.rows_per_step, config.micro_batch, seed)
    if prepared.weights:
        assert train.max_steps is not None, "the config refuses a mixture without max_steps"
        order = Order.for_mixture(prepared.sizes, prepared.weights, *sizes, train.max_steps)
    elif train.max_steps is None:
        order = Order.for_epochs(rows, *sizes, train.epochs or 1, stages, prepared.packings)
    else:
        order = Order.for_steps(rows, *sizes, train.max_steps)
        order = replace(order, stages=stages, packings=prepared.packings)
    return replace(order, windows=prepared.windows_rows, follow=prepared.follow)


def count_parameters(shape: Any, config: Config) -> tuple[int, int, list[str]]:
    """Return the numbers of a model's parameters and of trained ones, and what patterns name.

    Tied parameters count once; adapters count as trained alone.
    """
    lm = model.build(shape, loss=model.no_loss, attention="eager")
    whole = model.num_parameters(lm)
    if config.model.lora is not None:
        model.add_adapters(lm, config.model.lora, range(len(config.model.new_tokens)))
    by_name, _ = names.described(config, lm.hf)
    return whole, sum(p.numel() for p in lm.parameters() if p.requires_grad), by_name


def base_of(ready: CheckedLanguageRun) -> Base:
    """Return what is known of the model that the run starts from."""
    source = ready.model
    random = source.preset or ready.config.model.from_scratch
    base: Base = {"name": source.base, "random": random}
    return base if random else {**base, **published(source)}


def plan_of(
    ready: CheckedLanguageRun,
    prepared: Prepared,
    order: Order,
    parameters: int,
    tokenizer_url: str,
    vocabulary: int,
) -> Plan:
    """Return the fields of plan.json that do not come from the planner."""
    config = ready.config
    return {
        "base": base_of(ready),
        "tokenizer": tokenizer_url,
        "vocabulary": vocabulary,
        "parameters": parameters,
        "fingerprint": prepared.fingerprint,
        "prepared": prepared.folders,
        "parts": prepared.parts,
        "steps": order.num_steps,
        "rows_per_step": order.rows_per_step,
        "micro_batches_per_step": config.micro_batches_per_step,
        "tokens": order.num_steps * config.train.tokens_per_step,
        "epochs": order.num_steps * order.rows_per_step / prepared.epoch_rows,
        "data": prepared.report(),
    }


def check_order(run: Storage, prepared: Prepared, order: Order) -> None:
    """Compare the rows of the last step done with its digest in metrics.jsonl.

    Raises:
        ConfigError: the data are others, or that step would have had other rows.
    """
    refuse_other_data(run, prepared.parts)
    line, (newest, _) = metrics.last(run), latest(run)
    if line is None or newest is None or newest.step != line["step"]:
        return
    rows = step_rows(prepared.rows("train"), order, line["step"] - 1, 0, 1)
    if combine([rows.digest()]) != line["batch_digest"]:
        raise ConfigError(
            [
                f"{run.url}/{METRICS} is of other rows: step {line['step']} had the digest "
                f"{line['batch_digest']} and would have {combine([rows.digest()])}. Set the data "
                "back to what they were, or another run.name"
            ]
        )


finetune = command.Kind(check, settle, prepare, auto.after_failure).run
