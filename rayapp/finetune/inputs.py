"""What training needs before it starts: tokenizer, rows, their order, and the plan of the run."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress

from rayapp import model
from rayapp.config import Config, ConfigError
from rayapp.data import prepare, tokens
from rayapp.finetune import checks
from rayapp.finetune.training import model_shape
from rayapp.order import Order
from rayapp.storage import open_storage

PREPARED = ".prepared"  # beside the runs, shared by all that use the same data
TOKENIZER_SAMPLE_BYTES = 16 * 2**20


def shared_tokenizer(ready: checks.Ready, console: Console) -> tuple[str, Any]:
    """Return (folder that every node can read, tokenizer), trained here if that is asked for."""
    config = ready.config
    root = open_storage(config.run.storage) / PREPARED
    tokenizer = ready.tokenizer
    name = config.model.tokenizer or f"bpe:{ready.model.config.vocab_size}"
    if tokenizer is None and name == "bytes":
        tokenizer = tokens.byte_tokenizer()
    if tokenizer is None:
        trained = root / f"tokenizer-{name.replace(':', '-')}-{ready.source.digest()}"
        if not trained.exists("tokenizer.json"):
            console.print(f"training a tokenizer ({name}) on the data", highlight=False)
            texts = prepare.sample_texts(ready.source, config.data.kind, TOKENIZER_SAMPLE_BYTES)
            tokens.save_tokenizer(tokens.train_bpe(texts, int(name.partition(":")[2])), trained)
        return trained.url, tokens.load_tokenizer(trained.url)
    folder = root / f"tokenizer-{tokens.tokenizer_digest(tokenizer)}"
    if not folder.list():
        tokens.save_tokenizer(tokenizer, folder)
    return folder.url, tokenizer


def prepare_rows(
    ready: checks.Ready, config: Config, tokenizer_url: str, tokenizer: Any, console: Console
) -> prepare.Prepared:
    """Make or find the rows.

    Raises:
        ConfigError: more records are unusable than data.bad_rows allows, or nothing is left.
    """
    data = config.data
    pad = tokenizer.pad_token_id
    recipe = prepare.Recipe(
        source=ready.source,
        eval_source=ready.eval_source,
        kind=data.kind,
        tokenizer_url=tokenizer_url,
        tokenizer_digest=tokens.tokenizer_digest(tokenizer),
        pad_id=pad if pad is not None else (tokenizer.eos_token_id or 0),
        seq_len=data.seq_len,
        pack=data.pack,
        truncate=data.truncate,
        eval_fraction=data.eval_fraction,
    )
    root = open_storage(config.run.storage) / PREPARED
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("preparing data", total=ready.source.num_bytes)
        prepared = prepare.prepare(
            recipe,
            root,
            data.workers,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    problems = []
    if prepared.bad_share > data.bad_rows:
        shown = "; ".join(f"{place} {why}" for place, why in prepared.examples)
        problems.append(
            f"data.path={data.path} is unusable in {prepared.bad_share:.1%} of its "
            f"{prepared.records} records: {shown}. Mend them, or allow more with data.bad_rows "
            f"(now {data.bad_rows:.1%})"
        )
    elif not prepared.counts["train"]["target_tokens"]:
        problems.append(
            f"data.path={data.path} is empty: no token of its {prepared.records} records bears loss"
        )
    if problems:
        raise ConfigError(problems)
    return prepared


def order_of(config: Config, prepared: prepare.Prepared) -> Order:
    rows, rows_per_step = prepared.num_rows("train"), config.rows_per_step
    if config.train.max_steps is None:
        return Order.for_epochs(
            rows, rows_per_step, config.train.micro_batch, config.run.seed, config.train.epochs or 1
        )
    return Order.for_steps(
        rows, rows_per_step, config.train.micro_batch, config.run.seed, config.train.max_steps
    )


def count_parameters(ready: checks.Ready, config: Config, vocabulary: int) -> int:
    shape = model_shape(ready.model, config, vocabulary)
    return model.num_parameters(model.build(shape, loss=lambda *a, **k: None))  # type: ignore[arg-type]


def plan_of(
    config: Config, prepared: prepare.Prepared, order: Order, parameters: int
) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "fingerprint": prepared.fingerprint,
        "steps": order.num_steps,
        "rows_per_step": order.rows_per_step,
        "micro_batches_per_step": order.rows_per_step // config.train.micro_batch,
        "tokens": order.num_steps * config.train.tokens_per_step,
        "epochs": order.num_steps * order.rows_per_step / order.num_rows,
        "data": prepared.report(),
    }
