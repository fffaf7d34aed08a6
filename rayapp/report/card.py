"""The model card of a run: README.md in the exported folder, as the Hugging Face hub shows it.

write_card(open_storage("runs/demo"))         # README.md and loss.svg, made of the run's folder

Its text is page/card.md. A README.md that somebody else has written is left as it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import yaml

from rayapp.config.fields import IMAGES
from rayapp.config.lora import method
from rayapp.data.kinds import takes_template
from rayapp.data.report import DataReport
from rayapp.observe import words
from rayapp.observe.figures import label, text
from rayapp.observe.plain import redacted
from rayapp.observe.run_folder import MODEL, DamagedFile
from rayapp.observe.words import task_rows
from rayapp.report.chart import evenly, smooth, svg
from rayapp.report.folder import ReportedRun, read
from rayapp.report.pages import environment
from rayapp.storage import Storage, StorageError

CARD, CURVE = "README.md", "loss.svg"
MADE = "<!-- made by rayapp from the run's folder; remove this line to keep your own text -->"
ADAPTER = "adapter_config.json"
HUB_ID = r"[\w-][\w.-]*/[\w.-]+"
# The folders of absolute paths and of URLs, which a card leaves out.
FOLDERS = re.compile(r"(?<![\w./-])(?:~|[a-z][a-z0-9+.-]*:)?/+(?:[^\s/'\"`]+/+)*(?=[^\s/])")
OF_GGUF = re.compile(r"/model-(.+)-[0-9a-f]{12}$")  # what the folder of a GGUF file was made of
TABLE_STEPS = 8
OF_TRAIN = ("tokens_per_step", "images_per_step", "optimizer", "lr", "schedule", "warmup_steps",
            "weight_decay", "precision")  # fmt: skip

logger = logging.getLogger("rayapp.report")


def write_card(storage: Storage) -> None:
    """Write the card of a run that has exported a model; log a warning if that fails."""
    folder = storage / MODEL
    try:
        if folder.exists(CARD) and MADE not in folder.read(CARD).decode("utf-8", "replace"):
            logger.info("%s/%s is not rayapp's, and stays", folder.url, CARD)
            return
        run = read(storage)
        folder.write(CURVE, curve(run).encode())
        folder.write(CARD, card(run, adapter=folder.exists(ADAPTER)).encode(errors="replace"))
    except (DamagedFile, StorageError) as error:
        logger.warning("the model card is not written: %s", error)


def card(run: ReportedRun, adapter: bool) -> str:
    """Return the text of the card, without keys and passwords."""
    # Where and on what it ran is left out.
    config = {name: dict(values) for name, values in run.config.items() if name != "cluster"}
    config.get("run", {}).pop("storage", None)
    losses = zip(run.columns["step"].tolist(), smooth(run.columns["loss"]).tolist(), strict=True)
    template = environment().get_template("card.md")
    page = template.render(
        run=run,
        adapter=adapter,
        chat=takes_template(_kind(run)),
        made=MADE,
        curve=CURVE,
        front=_yaml(front_of(run, adapter)),
        what=FOLDERS.sub("", _what(run)),
        data=[[FOLDERS.sub("", cell) for cell in each] for each in _data(run)],
        question=_question(run),
        training=list(_training(run)),
        losses=[[f"{s:,.0f}", text("loss", loss)] for s, loss in evenly([*losses], TABLE_STEPS)],
        results=list(_results(run)),
        samples=[(_fence("".join(each)), *each) for each in run.result.get("samples") or ()],
        config=FOLDERS.sub("", _yaml(config)),
    )
    return redacted(page) + "\n"


def _yaml(values: object) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _fence(text: str) -> str:
    """Return a fence of a block of code that is longer than any in the text."""
    return "`" * (1 + max((len(found) for found in re.findall("`+", text)), default=2))


def front_of(run: ReportedRun, adapter: bool) -> dict[str, object]:
    """Return the card's metadata, by the hub's names; what is not known is left out."""
    base: Any = run.plan.get("base", {})
    images = run.unit is IMAGES
    lora = run.config.get("model", {}).get("lora")
    front = {
        "base_model": base.get("id"),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-classification" if images else "text-generation",
        **{name: base.get(name) for name in ("license", "license_name", "license_link")},
        "datasets": [found[0] for path in _paths(run) if (found := re.match(HUB_ID, path))],
        "tags": ["rayapp", *(["lora"] if lora else []), *([] if images else [_kind(run)])],
    }
    return {name: value for name, value in front.items() if value}


def _paths(run: ReportedRun) -> list[str]:
    data = run.config.get("data", {})
    return list(data.get("mixture") or [data.get("path", "")])


def _kind(run: ReportedRun) -> str:
    return str(run.config.get("data", {}).get("kind", "text"))


def _what(run: ReportedRun) -> str:
    """Say in a sentence or two what was trained, and from what."""
    section = run.config.get("model", {})
    lora: Any = section.get("lora")
    base: Any = run.plan.get("base", {})
    how = "All weights were trained"
    if lora:
        how = f"{method(lora)} of rank {lora.get('rank')} was trained"
    count = run.plan.get("parameters")
    size = f" ({words.amount(count)} parameters)" if count else ""
    start = "from random weights" if base.get("random") else "from its weights"
    if section.get("init_from"):
        start = f"from the checkpoint `{section['init_from']}`"
    elif base.get("name") not in (None, section.get("path")):
        start = f"from the adapter `{section.get('path')}`"
    name = base.get("id") or base.get("name") or section.get("path")
    if of_gguf := OF_GGUF.search(str(base.get("name", ""))):
        start += f", as the quantised file `{of_gguf[1]}` holds them"
    licence = base.get("license_name") or base.get("license")
    terms = f"The base's licence is {licence}." if licence else "The base states no licence."
    return f"{how} on the base `{name}`{size}, {start}, with rayapp. {terms}"


def _question(run: ReportedRun) -> str:
    """Return what a user may ask: an item of a task, a prompt of eval.prompts, or a greeting."""
    tasks = (run.result.get("tasks") or {}).values()
    asked = [each["asked"] for task in tasks for each in task.get("shown", ())]
    asked += [prompt for prompt, _ in run.result.get("samples") or ()]
    return next((text for text in asked if text), "Hello")


def _data(run: ReportedRun) -> Iterator[list[str]]:
    """Yield a row for each source of the data; none if plan.json has no data."""
    data: Any = run.plan.get("data") or {}
    parts: Any = run.plan.get("parts", {})
    several = data.get("sources", {})
    for path in _paths(run) if data else ():
        digest = parts.get(f"{path} files" if several else "files", words.UNKNOWN)
        yield [f"`{path}`", str(digest), *_counts(several.get(path, data))]


def _counts(data: DataReport) -> list[str]:
    """Return records, unusable ones, what is trained on, held out, and the share of repeats."""
    bad = sum(data.get("bad", {}).values())
    amounts = [words.number(data.get("records"), 12), f"{bad:,}"]
    if "train" in data:
        train, held = data["train"], data["eval"]
        amounts.append(f"{train['documents']:,} documents, {train['tokens']:,} tokens")
        amounts.append(f"{held['documents']:,} documents")
    else:
        images = data.get("images", {})
        amounts += [f"{images.get('train', 0):,} images", f"{images.get('eval', 0):,} images"]
    return [*amounts, words.share(data.get("duplicates"))]


def _training(run: ReportedRun) -> Iterator[list[str]]:
    train = run.config.get("train", {})
    yield [label("step"), text("step", run.step)]
    yield ["epochs", words.number(run.last("epoch"), 4)]
    if run.num_lines:
        yield [f"{run.unit.many} that bear loss", f"{int(run.counted[-1]):,}"]
    yield from ([name, str(train[name])] for name in OF_TRAIN if name in train)
    if stops := run.plan.get("stops"):
        yield ["a generation ends at", ", ".join(f"`{name}` ({i})" for name, i in stops.items())]
    yield [label("workers"), text("workers", run.last("workers"))]
    yield ["time", words.duration(run.wall_s)]
    yield from ([name, version] for name, version in run.versions.items())


def _results(run: ReportedRun) -> Iterator[list[str]]:
    unit = run.unit.loss
    of_last = f"mean of the last {run.num_recent} steps"
    yield [f"training loss, {unit}, {of_last}", text("loss", run.recent("loss"))]
    for name, what in (
        ("eval_loss", f"held-out loss, {unit}"),
        ("eval_loss_per_byte", "held-out loss, nats per byte"),
        ("eval_top1", "held-out top-1"),
    ):
        if (value := run.held_figure(name)) is not None:
            yield [what, text(name, value)]
    for name, items, what, before, after in task_rows(run.result.get("tasks") or {}):
        told = after.replace("\n", "; difference ")
        yield [f"{name}, {what} of {items} items, before and after", f"{before}; {told}"]
    if check := run.result.get("export_check"):
        told = f"names and shapes of all tensors are equal (not opened: {check['why']})"
        if check["rows"]:
            difference = f"differ by {check['difference']:.1g} of their norm"
            told = f"its logits on {check['rows']} rows {difference}"
        yield ["this folder against the trained model", told]


def curve(run: ReportedRun) -> str:
    """Return the training loss and held-out losses as an SVG file."""
    held = (run.held_values("step"), run.held_values("eval_loss"))
    series = {"loss": (run.columns["step"], run.columns["loss"]), "held-out loss": held}
    drawn = svg(f"loss, {run.unit.loss}; dots: held out", series) or "<svg></svg>"
    return drawn.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" color="#808080"', 1)
