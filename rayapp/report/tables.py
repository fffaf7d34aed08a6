"""The figures and tables of a report, as text; figures and rows that are not known are left out.

headline(run)[0]                # Figure("held-out loss", "3.2014", "nats per token")
"""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config.fields import IMAGES
from rayapp.config.lora import method
from rayapp.data.report import DataReport
from rayapp.observe import words
from rayapp.observe.goodput import WORKERS
from rayapp.observe.records import band_of
from rayapp.observe.run_folder import DONE
from rayapp.observe.words import UNKNOWN
from rayapp.report.folder import ReportedRun

CAUSES = {
    "step": "steps that count",
    "data_wait": "waiting for data",
    "checkpoint_stall": "checkpoint stalls",
    "evaluation": "evaluation",
    "start": "start",
    "waiting": "waiting for room",
    "recovery": "recovery",
    "lost_work": "steps done in vain",
    "export": "samples and export",
    "other": "other",
}

SOURCES_HEAD = [
    *("path", "share of rows", "documents", "tokens", "fill", "unusable"),
    *("trained on, tokens", "loss", "held-out loss"),
]


@dataclass(frozen=True)
class Figure:
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


def headline(run: ReportedRun) -> list[Figure]:
    """Return the figures at the top of a run's page that are known."""
    return [figure for figure in _headline(run) if figure.value != UNKNOWN]


def _headline(run: ReportedRun) -> list[Figure]:
    rate = None if run.account is None else run.account.usd_per_hour
    price = f"{words.dollars(rate)} per hour" if rate else "no price is known"
    total = run.plan.get("steps")
    per_byte, per_worker = run.recent("loss_per_byte"), run.rate(run.unit.per_s_per_gpu)
    recent = f"mean of the last {run.num_recent:,} steps"
    return [
        *_held_figures(run),
        Figure(
            "Training loss",
            words.fixed(run.recent("loss"), 4),
            recent if per_byte is None else f"{words.fixed(per_byte, 4)} per byte; {recent}",
        ),
        Figure(run.own_loss, words.fixed(run.recent("own_loss"), 4), f"of train.loss; {recent}"),
        Figure(
            f"{run.unit.many.capitalize()}/s",
            words.amount(run.rate(run.unit.per_s)),
            "" if per_worker is None else f"{words.amount(per_worker)} per worker",
        ),
        Figure("MFU", words.share(run.rate("mfu")), "of the hardware's peak FLOP/s"),
        Figure("Goodput", words.share((run.goodput or {}).get("step")), "of the time in steps"),
        Figure("Cost", words.dollars(run.cost_usd), _cost_note(run, _usd_per_1m(run) or price)),
        Figure(
            "Steps",
            words.number(run.step or None, 12),
            "; ".join(
                [
                    *([f"of {total:,}"] if total else []),
                    *([words.duration(run.wall_s)] if run.wall_s is not None else []),
                ]
            ),
        ),
    ]


def _cost_note(run: ReportedRun, price: str) -> str:
    stored = run.storage or {"gib": 0.0, "usd_per_month": None}
    parts = [price]
    if (usd := stored.get("usd")) is not None:
        parts.append(f"{words.dollars(usd)} for checkpoints in S3")
    if (month := stored["usd_per_month"]) is not None:
        parts.append(f"{words.dollars(month)} a month for what S3 keeps of it")
    return "; ".join(filter(None, parts))


def _held_figures(run: ReportedRun) -> list[Figure]:
    """Return the last held-out loss; for images also top-1 and top-5 accuracy."""
    held = run.held[-1] if run.held else None
    loss = words.fixed(held.loss if held else None, 4)
    if run.unit is IMAGES:
        top1 = words.share(held.top1 if held else None)
        detail = f"top-5 {words.share(held.top5)}, step {held.step:,}" if held else ""
        return [Figure("Top-1", top1, detail), Figure("Held-out loss", loss, "nats per image")]
    detail = f"{words.fixed(held.per_byte, 4)} per byte, step {held.step:,}" if held else ""
    return [Figure("Held-out loss", loss, detail)]


def _usd_per_1m(run: ReportedRun) -> str:
    """Return the cost of a million tokens or images as text; empty if it is not known."""
    if run.cost_usd is None or not run.num_lines or not run.counted[-1]:
        return ""
    price = words.dollars(1e6 * run.cost_usd / float(run.counted[-1]))
    return f"{price} per 1M {run.unit.many}"


def instance_of(run: ReportedRun) -> str | None:
    """Return the instance type of a run's machines: of a list, what the last attempt was on."""
    named = run.config.get("cluster", {}).get("instance")
    last = [event.get("instance") for event in run.events if event["event"] == WORKERS]
    known = (named if isinstance(named, str) else None) or (last[-1] if last else None)
    return known or (", ".join(named) if named else None)


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
        instance_of(run) or "",
        str(run.config.get("train", {}).get("precision", "")),
    ]
    return " · ".join(part for part in parts if part)


def planned(run: ReportedRun) -> list[list[str]]:
    """Return planned against measured figures: name, plan, measured, ratio, verdict, band.

    What was neither planned nor measured is left out.
    """
    measured = {
        "peak_gib": run.highest("peak_gib"),
        "step_s": _typical_step_s(run),
        run.unit.per_s: run.rate(run.unit.per_s),
        run.unit.per_s_per_gpu: run.rate(run.unit.per_s_per_gpu),
        "mfu": run.rate("mfu"),
        "hours": None if run.wall_s is None or run.status != DONE else run.wall_s / 3600.0,
        "cost_usd": run.cost_usd if run.status == DONE else None,
    }
    names = {
        "peak_gib": "peak memory, GiB",
        "step_s": "step, s",
        run.unit.per_s: f"{run.unit.many}/s",
        run.unit.per_s_per_gpu: f"{run.unit.many}/s per worker",
        "mfu": "MFU, 0-1",
        "hours": "hours of the whole run",
        "cost_usd": "cost, USD",
    }
    rows = []
    for name, label in names.items():
        band, value = band_of(run.plan, name), measured[name]
        if band is None:
            if value is not None:
                rows.append([label, "", words.number(value), "", "", ""])
            continue
        ratio = "" if value is None or not band["value"] else f"{value / band['value']:.2f}"
        verdict = ""
        if value is not None:
            inside = band["low"] <= value <= band["high"]
            verdict = "within" if inside else ("below" if value < band["low"] else "above")
        both = [words.number(band["value"]), "" if value is None else words.number(value)]
        width = f"{words.number(band['low'])} to {words.number(band['high'])}"
        rows.append([label, *both, ratio, verdict, width])
    return [*rows, *_calibrated(run)]


def _calibrated(run: ReportedRun) -> list[list[str]]:
    """Return the row of the step time: predicted from the first ten steps, and measured after."""
    seconds = run.result.get("step_s")
    foretold_s = seconds["calibrated"] if seconds else None
    rest_s = seconds["measured"] if seconds else None
    if foretold_s is None or rest_s is None:
        return []
    ratio = f"{rest_s / foretold_s:.2f}" if foretold_s else ""
    label = "step, s, predicted by its first ten"
    return [[label, words.number(foretold_s), words.number(rest_s), ratio, "", ""]]


def _typical_step_s(run: ReportedRun) -> float | None:
    """Return the mean seconds of a step after warm-up, without checkpoint stall and evaluation."""
    busy_s = run.busy_s[run.warm_up :]
    return float(busy_s.mean()) if len(busy_s) else None


def goodput(run: ReportedRun) -> list[TableBar]:
    """Return the share of each cause that took time, with its duration and cost."""
    shares = run.goodput or {}
    bars = []
    for cause, label in {**CAUSES, **{name: name for name in shares if name not in CAUSES}}.items():
        value = shares.get(cause, 0.0)
        if not value:
            continue
        time = None if run.wall_s is None else value * run.wall_s
        cost = None if run.cost_usd is None else value * run.cost_usd
        cells = [words.share(value), words.duration(time)]
        cells += [] if cost is None else [words.dollars(cost)]
        bars.append(TableBar(label, value, value / max(shares.values()), cells, cause))
    return bars


def interruptions(run: ReportedRun) -> list[list[str]]:
    """Return each interruption: time, kind, reason, step, lost steps, time to the next step."""
    return [
        [
            words.moment(interruption.get("time")),
            str(interruption.get("kind", UNKNOWN)),
            str(interruption.get("reason", UNKNOWN)),
            words.number(interruption.get("step"), 12),
            words.number(interruption.get("lost_steps"), 12),
            words.duration(interruption.get("to_first_step_s")),
        ]
        for interruption in run.interruptions
    ]


def lengths(counts: dict[str, int]) -> list[TableBar]:
    """Return a histogram of documents by length in tokens, empty bins between others included.

    >>> [(bar.label, bar.cells[0]) for bar in lengths({"2^3": 1, "2^5": 40})]
    [('8 to 15', '1'), ('16 to 31', '0'), ('32 to 63', '40')]
    """
    by_power = {int(name.removeprefix("2^")): count for name, count in counts.items()}
    total, most = max(1, sum(by_power.values())), max([1, *by_power.values()])
    return [
        TableBar(
            f"{2**power:,} to {2 ** (power + 1) - 1:,}" if power else "1",
            by_power.get(power, 0) / total,
            by_power.get(power, 0) / most,
            [f"{by_power.get(power, 0):,}", words.share(by_power.get(power, 0) / total)],
        )
        for power in range(min(by_power, default=0), max(by_power, default=-1) + 1)
    ]


def bad_rows(data: DataReport) -> list[TableBar]:
    """Return the unusable records by reason, the most frequent first."""
    bad: dict[str, int] = data.get("bad", {})
    total, most = max(data.get("records", 0), 1), max([1, *bad.values()])
    return [
        TableBar(reason, count / total, count / most, [f"{count:,}", words.share(count / total)])
        for reason, count in sorted(bad.items(), key=lambda item: -item[1])
    ]


def data_facts(run: ReportedRun) -> list[Figure]:
    """Return the figures of the prepared data; none if plan.json has no data."""
    data = run.plan.get("data", {})
    if not data:
        return []
    if run.unit is IMAGES:
        return _image_facts(run, data)
    train, held = data["train"], data["eval"]
    return [
        Figure("Documents", words.amount(train["documents"]), f"{held['documents']:,} held out"),
        Figure("Tokens", words.amount(train["tokens"]), f"{words.amount(held['tokens'])} held out"),
        Figure("Rows", words.amount(train["rows"]), f"{held['rows']:,} held out"),
        Figure("Fill", words.share(data["fill"]), "of the rows is no padding"),
        Figure("Bears loss", words.share(data["loss_share"]), "of the tokens"),
        Figure("Epochs", words.number(run.plan.get("epochs"), 3), "as planned"),
        Figure("Repeats", words.share(data["duplicates"]), "of the documents repeat another"),
        Figure(
            "Cut",
            words.amount(train["truncated"]),
            f"truncated ({words.amount(train['cut_tokens'])} tokens); {train['split']:,} split",
        ),
    ]


def _image_facts(run: ReportedRun, data: DataReport) -> list[Figure]:
    counts, every = data["images"], list(data["class_counts"].values()) or [0]
    return [
        Figure("Images", words.amount(counts["train"]), f"{counts['eval']:,} held out"),
        Figure("Classes", f"{data['classes']:,}", f"{min(every):,} to {max(every):,} images each"),
        Figure("Bytes", words.amount(data["bytes"]), "of all images"),
        Figure("Epochs", words.number(run.plan.get("epochs"), 3), "as planned"),
        Figure("Repeats", words.share(data["duplicates"]), "of the images repeat another"),
    ]


def classes(run: ReportedRun) -> list[TableBar]:
    """Return the accuracy of each class, the lowest first."""
    classified = run.result.get("classes")
    every = classified["each"] if classified else []
    shares = [(right / count if count else 0.0, name, count, right) for name, count, right in every]
    return [
        TableBar(
            name, share, share, [f"{right:,} of {count:,}", words.share(share if count else None)]
        )
        for share, name, count, right in sorted(shares)
    ]


def confusions(run: ReportedRun) -> list[list[str]]:
    """Return the pairs of classes most often confused: true class, predicted class, images."""
    classified = run.result.get("classes")
    return [
        [true, taken, f"{n:,}"] for true, taken, n in (classified["confused"] if classified else [])
    ]


def sources(run: ReportedRun) -> list[list[str]]:
    """Return the parts of a mixture, as SOURCES_HEAD names the cells."""
    parts = run.plan.get("data", {}).get("sources", {})
    mixture = run.config.get("data", {}).get("mixture") or {}
    whole = sum(mixture.values())
    return [
        [
            path,
            words.share(mixture[path] / whole if path in mixture else None),
            words.amount(part["train"]["documents"]),
            words.amount(part["train"]["tokens"]),
            words.share(part["fill"]),
            words.number(sum(part["bad"].values()), 12),
            words.amount(run.sources[path].tokens) if path in run.sources else words.UNKNOWN,
            words.fixed(run.sources[path].loss, 4) if path in run.sources else words.UNKNOWN,
            words.fixed(run.sources[path].held_out, 4) if path in run.sources else words.UNKNOWN,
        ]
        for path, part in parts.items()
    ]
