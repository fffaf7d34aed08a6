"""The model card of a run: README.md in the exported folder, as the Hugging Face hub shows it.

write_card(open_storage("runs/demo"))         # README.md and loss.svg, made of the run's folder

A README.md that somebody else has written is left as it is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import yaml

from rayapp.config.fields import IMAGES
from rayapp.config.lora import method
from rayapp.data.kinds import takes_template
from rayapp.data.report import DataReport
from rayapp.observe import words
from rayapp.observe.origin import redacted
from rayapp.observe.run_files import DamagedFile
from rayapp.observe.run_folder import MODEL
from rayapp.observe.task_scores import rows
from rayapp.report.curves import smooth, thin, window_of
from rayapp.report.folder import ReportedRun, read
from rayapp.storage import Storage, StorageError

CARD, CURVE = "README.md", "loss.svg"
MADE = "<!-- made by rayapp from the run's folder; remove this line to keep your own text -->"
ADAPTER = "adapter_config.json"
FOLDER = 'folder = "."  # this folder, or its id on the hub\n'
HUB_ID = r"[\w-][\w.-]*/[\w.-]+"
# The folders of absolute paths and of URLs, which a card leaves out.
FOLDERS = re.compile(r"(?<![\w./-])(?:~|[a-z][a-z0-9+.-]*:)?/+(?:[^\s/'\"`]+/+)*(?=[^\s/])")
POINTS, TABLE_STEPS = 120, 8
WIDTH, HEIGHT, MARGIN = 480, 160, 6

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
        text = redacted(card(run, adapter=folder.exists(ADAPTER)))
        folder.write(CARD, text.encode(errors="replace"))
    except (DamagedFile, StorageError) as error:
        logger.warning("the model card is not written: %s", error)


def card(run: ReportedRun, adapter: bool) -> str:
    """Return the text of the card."""
    front = yaml.safe_dump(front_of(run, adapter), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{front}---\n{MADE}",
        f"# {run.name}",
        FOLDERS.sub("", _what(run)),
        "## Use",
        _use(run, adapter),
        "## Data",
        *(FOLDERS.sub("", part) for part in _data(run)),
        "## Training",
        _table(["", ""], _training(run)),
        f"![loss by step]({CURVE})",
        _table(["step", "training loss"], _losses(run)),
        "## Results",
        _table(["", ""], _results(run)),
        *_samples(run),
        FOLDERS.sub("", _config(run)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def front_of(run: ReportedRun, adapter: bool) -> dict[str, object]:
    """Return the card's metadata, by the hub's names; what is not known is left out."""
    base: Any = run.plan.get("base", {})
    images = run.unit is IMAGES
    lora = run.config.get("model", {}).get("lora")
    front = {
        "base_model": base.get("id"),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-classification" if images else "text-generation",
        "license": base.get("license"),
        "license_name": base.get("license_name"),
        "license_link": base.get("license_link"),
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
    licence = base.get("license_name") or base.get("license")
    terms = f"The base's licence is {licence}." if licence else "The base states no licence."
    return f"{how} on the base `{name}`{size}, {start}, with rayapp. {terms}"


def _use(run: ReportedRun, adapter: bool) -> str:
    """Return a snippet that loads the folder."""
    library, name = "transformers", "AutoModelForCausalLM"
    if adapter:
        library, name = "peft", "AutoPeftModelForCausalLM"
    if run.unit is IMAGES:
        name = "AutoModelForImageClassification"
        return _code(
            f"from {library} import {name}\n\n{FOLDER}model = {name}.from_pretrained(folder)"
        )
    stops = run.plan.get("stops", {})  # peft takes the base's generation_config.json
    ends = f" eos_token_id={[*stops.values()]}," if adapter and stops else ""
    return _code(
        "from transformers import AutoTokenizer\n"
        f"from {library} import {name}\n\n"
        f"{FOLDER}tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        f"model = {name}.from_pretrained(folder)\n"
        + (
            'chat = [{"role": "user", "content": "Hello"}]\n'
            "inputs = tokenizer.apply_chat_template(\n"
            '    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True\n'
            ")\n"
            if takes_template(_kind(run))
            else 'inputs = tokenizer("Hello", return_tensors="pt")\n'
        )
        + "ids = model.generate(\n"
        '    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],\n'
        f"    max_new_tokens=50,{ends}\n"
        ")\n"
        "print(tokenizer.decode(ids[0]))"
    )


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _data(run: ReportedRun) -> Iterator[str]:
    data = run.plan.get("data")
    if data is None:
        return
    parts: Any = run.plan.get("parts", {})
    several = data.get("sources", {})
    rows = []
    for path in _paths(run):
        digest = parts.get(f"{path} files" if several else "files", words.UNKNOWN)
        rows.append([f"`{path}`", str(digest), *_counts(several.get(path, data))])
    head = ["source", "digest of the files", "records", "unusable", "trained on", "held out"]
    yield _table([*head, "repeats"], rows)
    yield f"The fingerprint of the prepared rows is `{run.plan.get('fingerprint')}`."


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
    yield ["steps", words.number(run.step, 12)]
    yield ["epochs", words.number(run.last("epoch"), 4)]
    unit = run.unit.many
    if run.num_lines:
        yield [f"{unit} that bear loss", f"{int(run.counted[-1]):,}"]
    names = ("tokens_per_step", "images_per_step", "optimizer", "lr", "schedule", "warmup_steps")
    for name in (*names, "weight_decay", "precision"):
        if name in train:
            yield [name, str(train[name])]
    if stops := run.plan.get("stops"):
        yield ["a generation ends at", ", ".join(f"`{name}` ({i})" for name, i in stops.items())]
    yield ["workers", words.number(run.last("workers"), 12)]
    yield ["time", words.duration(run.wall_s)]
    for name, version in run.versions.items():
        yield [name, version]


def _losses(run: ReportedRun) -> list[list[str]]:
    """Return the smoothed training loss at a few steps."""
    if not run.num_lines:
        return []
    loss, steps = smooth(run.columns["loss"], window_of(run.num_lines)), run.columns["step"]
    at = np.unique(np.linspace(0, run.num_lines - 1, TABLE_STEPS).astype(int))
    return [[f"{int(steps[i]):,}", words.fixed(float(loss[i]), 4)] for i in at]


def _results(run: ReportedRun) -> Iterator[list[str]]:
    held = run.held[-1] if run.held else None
    unit = run.unit.loss
    yield [f"training loss, {unit}", words.fixed(run.last("loss"), 4)]
    if held is not None:
        yield [f"held-out loss, {unit}", words.fixed(held.loss, 4)]
    if held is not None and held.per_byte is not None:
        yield ["held-out loss, nats per byte", words.fixed(held.per_byte, 4)]
    if held is not None and held.top1 is not None:
        yield ["held-out top-1", words.share(held.top1)]
    for name, items, what, before, after in rows(run.result.get("tasks") or {}):
        yield [f"{name}, {what} of {items} items, before and after", f"{before}; {after}"]
    check: Any = run.result.get("export_check")
    if check and check["rows"]:
        difference = f"differ by {check['difference']:.1g} of their norm"
        text = f"its logits on {check['rows']} rows {difference}"
        yield ["this folder against the trained model", text]
    elif check:
        text = f"names and shapes of all tensors are equal (not opened: {check['why']})"
        yield ["this folder against the trained model", text]


def _samples(run: ReportedRun) -> Iterator[str]:
    samples = run.result.get("samples") or []
    if samples:
        yield "## Samples"
    for prompt, text in samples:
        lengths = [len(found) for found in re.findall("`+", prompt + text)]
        fence = "`" * (1 + max(lengths, default=2))
        between = "\n" if takes_template(_kind(run)) else ""
        yield f"{fence}text\n{prompt}{between}{text}\n{fence}"


def _config(run: ReportedRun) -> str:
    """Return the config in a block that is folded; where and on what it ran is left out."""
    sections = {name: dict(values) for name, values in run.config.items() if name != "cluster"}
    sections.get("run", {}).pop("storage", None)
    text = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    fence = "````"
    summary = "<details><summary>The whole config</summary>"
    return f"{summary}\n\n{fence}yaml\n{text}{fence}\n\n</details>"


def _table(head: list[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    """Return a Markdown table; empty without rows."""
    lines = [head, ["---"] * len(head), *rows]
    if len(lines) == 2:
        return ""
    cells = (" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in r) for r in lines)
    return "\n".join(f"| {line} |" for line in cells)


def curve(run: ReportedRun) -> str:
    """Return the smoothed training loss, and held-out losses as dots, as a small SVG."""
    count = run.num_lines
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
    if not count:
        return f"{head}</svg>"
    loss, steps = smooth(run.columns["loss"], window_of(count)), run.columns["step"]
    kept = thin([loss], POINTS)
    kept = kept[np.isfinite(loss[kept])]
    held = [(each.step, each.loss) for each in run.held]
    xs = np.array([*steps[kept], *(step for step, _ in held)], float)
    ys = np.array([*loss[kept], *(value for _, value in held)], float)
    if not len(ys):
        return f"{head}</svg>"
    low, high, last = ys.min(), ys.max(), max(float(xs.max()), 1.0)
    x = MARGIN + (WIDTH - 2 * MARGIN) * xs / last
    y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (ys - low) / max(high - low, 1e-12)
    places = [f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    line = " ".join(places[: len(kept)])
    dots = "".join(
        '<circle cx="{}" cy="{}" r="3" fill="#c2410c"/>'.format(*place.split(","))
        for place in places[len(kept) :]
    )
    title = f"loss from {high:.4g} to {low:.4g} over {last:.0f} steps; dots are held-out losses"
    stroke = 'fill="none" stroke="#2563eb" stroke-width="1.5"'
    return f'{head}<title>{title}</title><polyline {stroke} points="{line}"/>{dots}</svg>\n'
