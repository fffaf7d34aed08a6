"""The figures and tables of a report, as text; figures and rows that are not known are left out.

headline(run)[0]                # Tile("Held-out loss", "3.2014", "nats per token")
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from rayapp.config.fields import IMAGES
from rayapp.config.lora import method
from rayapp.data.report import DataReport
from rayapp.observe import words
from rayapp.observe.figures import label, text
from rayapp.observe.goodput import ENDED, WORKERS
from rayapp.observe.records import Evaluated, EventFields
from rayapp.observe.run_folder import CONFIG
from rayapp.observe.words import BARS, UNKNOWN
from rayapp.report.chart import evenly
from rayapp.report.folder import BY_SOURCE, ReportedRun

MOST_ROWS = 12  # of the table of answers
MOST_OF_PROMPT = 160  # characters


@dataclass(frozen=True)
class Tile:
    """One figure, with its label and perhaps a detail."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class TableBar:
    """A row of a table with a bar: `share` of the whole, `width` of the longest bar, both 0-1."""

    label: str
    share: float
    width: float
    cells: list[str]
    key: str = ""


# ---- The run ----------------------------------------------------------------------------------


def headline(run: ReportedRun) -> list[Tile]:
    """Return the figures at the top of a run's page that are known."""
    unit, total = run.unit, run.plan.get("steps")
    per_byte, per_worker = run.recent("loss_per_byte"), run.rate(unit.per_s_per_gpu)
    recent = f"mean of the last {run.num_recent:,} steps"
    mean = recent if per_byte is None else f"{text('loss', per_byte)} per byte; {recent}"
    each = "" if per_worker is None else f"{text(unit.per_s, per_worker)} per worker"
    steps = [f"of {total:,}" if total else "", words.duration(run.wall_s) if run.wall_s else ""]
    tiles = [
        *_held_tiles(run),
        Tile("Training loss", text("loss", run.recent("loss")), mean),
        Tile(run.own_loss, text("loss", run.recent("own_loss")), f"of train.loss; {recent}"),
        _tile(unit.per_s, run.rate(unit.per_s), each),
        _tile("mfu", run.rate("mfu"), "of the hardware's peak FLOP/s"),
        _tile("goodput", run.account.goodput.get("step"), "of the time in steps"),
        _tile("cost_usd", run.account.cost_usd, _cost_note(run)),
        Tile("Steps", text("step", run.step or None), "; ".join(filter(None, steps))),
    ]
    return [tile for tile in tiles if tile.value != UNKNOWN]


def _tile(name: str, value: float | None, detail: str) -> Tile:
    return Tile(label(name)[0].upper() + label(name)[1:], text(name, value), detail)


def _held_tiles(run: ReportedRun) -> list[Tile]:
    """Return the exported model's held-out loss; for images also top-1 and top-5 accuracy."""
    if run.held_model is None:
        return []
    loss, step = run.held_figure("eval_loss"), f"step {run.held_model['step']:,}"
    if run.unit is IMAGES:
        top5 = f"top-5 {words.share(run.held_figure('eval_top5'))}, {step}"
        top1 = _tile("eval_top1", run.held_figure("eval_top1"), top5)
        return [top1, _tile("eval_loss", loss, run.unit.loss)]
    per_byte = text("loss", run.held_figure("eval_loss_per_byte"))
    per = run.unit.loss if run.unit.divisor else f"{per_byte} per byte"
    return [_tile("eval_loss", loss, f"{per}, {step}")]


def _cost_note(run: ReportedRun) -> str:
    """Return the price of a million tokens or images, else of an hour, and what S3 costs."""
    usd, rate = run.account.cost_usd, run.account.usd_per_hour
    parts = [f"{words.dollars(rate)} per hour" if rate else "no price is known"]
    if usd is not None and run.num_lines and run.counted[-1]:
        parts = [f"{words.dollars(1e6 * usd / float(run.counted[-1]))} per 1M {run.unit.many}"]
    stored = run.result.get("storage") or {"gib": 0.0, "usd_per_month": None}
    if (usd := stored.get("usd")) is not None:
        parts.append(f"{words.dollars(usd)} for checkpoints in S3")
    if (month := stored["usd_per_month"]) is not None:
        parts.append(f"{words.dollars(month)} a month for what S3 keeps of it")
    return "; ".join(parts)


def subtitle(run: ReportedRun) -> str:
    """Return model, data, workers, instance and precision in one line."""
    model, data = run.config.get("model", {}), run.config.get("data", {})
    parameters, lora = run.plan.get("parameters"), model.get("lora")
    workers = run.last("workers")
    parts = [
        str(run.plan.get("base", {}).get("id") or model.get("path", "")),
        f"{words.amount(parameters)} parameters" if parameters else "",
        f"{method(lora)} rank {lora.get('rank')}" if isinstance(lora, dict) else "",
        f"from {model['init_from']}" if model.get("init_from") else "",
        f"on {data['path']}" if "path" in data and not data.get("mixture") else "",
        f"on a mixture of {len(data['mixture'])}" if data.get("mixture") else "",
        f"{workers:.0f} worker{'s' if workers > 1 else ''}" if workers else "",
        _instance(run) or "",
        str(run.config.get("train", {}).get("precision", "")),
    ]
    return " · ".join(part for part in parts if part)


def _instance(run: ReportedRun) -> str | None:
    """Return the instance type of a run's machines: of a list, what the last attempt was on."""
    named = run.config.get("cluster", {}).get("instance")
    if isinstance(named, str):
        return named
    return run.newest(WORKERS, "event").get("instance") or (", ".join(named) if named else None)


def environment(run: ReportedRun) -> list[tuple[str, str]]:
    """Return the run's folder, versions, machines, price and times, by label, if known."""
    first: EventFields = run.events[0] if run.events else cast(EventFields, {})
    rate, command = run.account.usd_per_hour, run.started.get("command")
    ended = [event["time"] for event in run.events if event["event"] == ENDED]
    rows = [
        ("folder", run.url),
        *run.versions.items(),
        ("instance", _instance(run) or UNKNOWN),
        ("nodes", words.number(run.newest(WORKERS, "event").get("nodes"), 12)),
        ("workers", text("workers", run.last("workers"))),
        ("attempts", words.number(run.last("attempt"), 12)),
        ("price", UNKNOWN if rate is None else f"{words.dollars(rate)} per hour"),
        ("git commit", str(run.started.get("commit") or UNKNOWN)),
        ("command", f"python {command}" if command else UNKNOWN),
        ("started by", str(run.started.get("user") or UNKNOWN)),
        ("first command on", str(first.get("host") or UNKNOWN)),
        ("first command at", words.moment(run.events[0]["time"] if run.events else None)),
        ("ended at", words.moment(ended[-1] if ended and run.result else None)),
        ("data fingerprint", str(run.plan.get("fingerprint", UNKNOWN))),
    ]
    return [(name, shown) for name, shown in rows if shown != UNKNOWN]


def repeat(run: ReportedRun) -> list[str]:
    """Return the commands that repeat a run with the config in its folder; empty without one."""
    if run.config_yaml is None:
        return []
    commit = run.started.get("commit")
    module = "rayapp.vision" if run.unit is IMAGES else "rayapp.finetune"
    config = shlex.quote(f"{run.url}/{CONFIG}")
    fetch = [f"aws s3 cp {config} {CONFIG}"] if run.url.startswith("s3://") else []
    name = shlex.quote(f"--run.name={run.name}-again")
    return [
        *([f"git checkout {commit.removesuffix('+')}"] if commit else []),
        *fetch,
        f"python -m {module} {CONFIG if fetch else config} {name}",
    ]


# ---- Data -------------------------------------------------------------------------------------


def _counted(counts: Mapping[str, int], whole: int) -> list[TableBar]:
    most = max([1, *counts.values()])
    return [
        TableBar(name, count / whole, count / most, [f"{count:,}", words.share(count / whole)])
        for name, count in counts.items()
    ]


def lengths(counts: dict[str, int]) -> list[TableBar]:
    """Return a histogram of documents by length in tokens, empty bins between others included.

    >>> [(bar.label, bar.cells[0]) for bar in lengths({"2^3": 1, "2^5": 40})]
    [('8 to 15', '1'), ('16 to 31', '0'), ('32 to 63', '40')]
    """
    by_power = {int(name.removeprefix("2^")): count for name, count in counts.items()}
    powers = range(min(by_power, default=0), max(by_power, default=-1) + 1)
    bins = {f"{2**p:,} to {2 ** (p + 1) - 1:,}" if p else "1": by_power.get(p, 0) for p in powers}
    return _counted(bins, max(1, sum(bins.values())))


def bad_rows(data: DataReport) -> list[TableBar]:
    """Return the unusable records by reason, the most frequent first."""
    bad = sorted(data.get("bad", {}).items(), key=lambda item: -item[1])
    return _counted(dict(bad), max(data.get("records", 0), 1))


def data_facts(run: ReportedRun) -> list[Tile]:
    """Return the figures of the prepared data; none if plan.json has no data."""
    data, amount, share = run.plan.get("data", {}), words.amount, words.share
    if not data:
        return []
    epochs = Tile("Epochs", words.number(run.plan.get("epochs"), 3), "as planned")
    repeats = share(data["duplicates"])
    if run.unit is IMAGES:
        counts, every = data["images"], list(data["class_counts"].values()) or [0]
        each = f"{min(every):,} to {max(every):,} images each"
        return [
            Tile("Images", amount(counts.get("train")), f"{counts.get('eval', 0):,} held out"),
            Tile("Classes", f"{data['classes']:,}", each),
            Tile("Bytes", amount(data["bytes"]), "of all images"),
            epochs,
            Tile("Repeats", repeats, "of the images repeat another"),
        ]
    train, held = data["train"], data["eval"]
    cut = f"truncated ({amount(train['cut_tokens'])} tokens); {train['split']:,} split"
    return [
        Tile("Documents", amount(train["documents"]), f"{held['documents']:,} held out"),
        Tile("Tokens", amount(train["tokens"]), f"{amount(held['tokens'])} held out"),
        Tile("Rows", amount(train["rows"]), f"{held['rows']:,} held out"),
        Tile("Fill", share(data["fill"]), "of the rows is no padding"),
        Tile("Bears loss", share(data["loss_share"]), "of the tokens"),
        epochs,
        Tile("Repeats", repeats, "of the documents repeat another"),
        Tile("Cut", amount(train["truncated"]), cut),
    ]


def classes(run: ReportedRun) -> list[TableBar]:
    """Return the accuracy of each class, the lowest first."""
    bars, classified = [], run.result.get("classes")
    for name, count, right in classified["each"] if classified else ():
        share = right / count if count else 0.0
        cells = [f"{right:,} of {count:,}", words.share(share if count else None)]
        bars.append(TableBar(name, share, share, cells))
    return sorted(bars, key=lambda bar: (bar.share, bar.label))


def confusions(run: ReportedRun) -> list[list[str]]:
    """Return the pairs of classes most often confused: true class, predicted class, images."""
    classified = run.result.get("classes")
    confused = classified["confused"] if classified else []
    return [[true, taken, f"{count:,}"] for true, taken, count in confused]


def sources(run: ReportedRun) -> list[list[str]]:
    """Return the parts of a mixture: how much there is, was trained on, and their losses."""
    mixture = run.config.get("data", {}).get("mixture") or {}
    kept, rows = run.columns["skipped"] != 1, []
    for path, part in run.plan.get("data", {}).get("sources", {}).items():
        whole = sum(mixture.values())
        tokens, losses = (
            run.steps[f"{name}/{path}"] if path in mixture else np.array([]) for name in BY_SOURCE
        )
        recent = np.flatnonzero(~np.isnan(losses))[-run.num_recent :]
        summed = tokens[recent].sum()
        held = [each for line in run.held if (each := line.get("eval_loss_by_source"))]
        rows.append(
            [
                path,
                words.share(mixture[path] / whole if path in mixture else None),
                words.amount(part["train"]["documents"]),
                words.amount(part["train"]["tokens"]),
                words.share(part["fill"]),
                f"{sum(part['bad'].values()):,}",
                words.amount(float(np.nansum(tokens[kept])) if len(tokens) else None),
                text("loss", float((losses * tokens)[recent].sum() / summed) if summed else None),
                text("loss", held[-1].get(path) if held else None),
            ]
        )
    return rows


def experts(run: ReportedRun) -> list[list[str]]:
    """Return a row for each layer of a mixture of experts, since the workers last started."""
    return [
        [
            f"{layer}",
            f"expert {tokens.index(most)}",
            words.share(most / whole),
            f"{len(tokens) * most / whole:,.2f}",
            f"{tokens.count(0)} of {len(tokens)}",
            "".join(BARS[(8 * count - 1) // most] if count else " " for count in tokens),
        ]
        for layer, tokens in enumerate(run.result.get("experts") or ())
        for whole, most in [(max(sum(tokens), 1), max(tokens))]
    ]


# ---- Answers to eval.prompts ------------------------------------------------------------------


def head_of_answers(held: Sequence[Evaluated]) -> list[str]:
    """Return the head of the table of answers: the step, and each prompt; empty without answers."""
    prompts = (
        prompt if len(prompt) <= MOST_OF_PROMPT else f"{prompt[:MOST_OF_PROMPT]}…"
        for prompt in _prompts(held)
    )
    return ["step", *prompts] if _prompts(held) else []


def answers(held: Sequence[Evaluated]) -> list[list[str]]:
    """Return a row for each of at most MOST_ROWS evaluations: its step, and each prompt's answer.

    Of more, the first, the last and others evenly between them are taken.
    """
    prompts, rows = _prompts(held), []
    for line in evenly([each for each in held if each.get("eval_samples")], MOST_ROWS):
        said = dict(line["eval_samples"])
        rows.append([f"{line['step']:,}", *(said.get(prompt, "").rstrip() for prompt in prompts)])
    return rows


def _prompts(held: Sequence[Evaluated]) -> list[str]:
    return list(
        dict.fromkeys(prompt for each in held for prompt, _ in each.get("eval_samples") or ())
    )
