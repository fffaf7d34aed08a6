"""Write the tables of docs/numbers.md and the row of README from the files in bench/gpu/.

python bench/gpu_tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE / "gpu"
PAGE, README = HERE.parent / "docs" / "numbers.md", HERE.parent / "README.md"
BEGIN, END = "<!-- bench/gpu -->", "<!-- end of bench/gpu -->"
ROW = "| on one "  # the begin of README's row
OURS = ("llama3.2-1b, eager, 2 x 4096", "llama3.2-1b, compiled, 2 x 4096")
THEIRS = (
    "llama3.2-1b, transformers' own step, 2 x 4096",
    "llama3.2-1b, transformers' Trainer with FSDP2, 2 x 4096",
)


def reports() -> list[dict[str, Any]]:
    """Return the kept files, the newest first."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("*.json")]
    return sorted(files, key=lambda report: report["date"], reverse=True)


def tables() -> str:
    """Return a table of figures and a list of checks for each card and date."""
    return "\n".join(line for report in reports() for line in _table(report))


def _table(report: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    commit = f"commit {report['commit']}, " if report["commit"] else ""
    lines = [
        f"### {report['gpus']} x {report['card']}, {report['date']}",
        "",
        f"{commit}driver {report['driver']}, {versions}. {report.get('note', '')}".strip(),
        "",
        "| | tokens/s | MFU | wall ms | device ms | idle ms | peak GiB | plan: tokens/s | GiB "
        "| published |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    checks, others = [], []
    for name, found in report["rows"].items():
        if "passed" in found:
            checks.append(
                f"- {name}: {'pass' if found['passed'] else '**fail**'}, {found['detail']}"
            )
        elif "tokens_per_s" in found or "images_per_s" in found:
            lines.append(_line(name, found))
        else:
            word = "skipped" if "skipped" in found else "failed"
            others.append(f"- {name}: {word}, {found[word]}")
    return [*lines, "", *checks, *others, ""]


def _line(name: str, found: dict[str, Any]) -> str:
    plan, published = found.get("plan", {}), found.get("published")
    rate = found.get("tokens_per_s") or found["images_per_s"]
    cells = [
        name,
        f"{rate:,.0f}" + ("" if "tokens_per_s" in found else " images"),
        _number(found.get("mfu"), ".1%"),
        _number(found.get("wall_ms"), ".0f"),
        _number(found.get("device_ms"), ".0f"),
        ", ".join(f"{each} {ms:.1f}" for each, ms in found.get("idle_ms", {}).items()),
        _number(found.get("peak_gib"), ".2f"),
        _number(plan.get("tokens_per_s"), ",.0f"),
        _number(plan.get("peak_gib"), ".2f"),
        "",
    ]
    if published:
        mfu = _number(published["mfu"], ".1%")
        told = f"{published['system']} {published['tokens_per_s']:,.0f}" + (
            f", {mfu}" if mfu else ""
        )
        cells[-1] = f"{told} ({published['note']}; {published['source']})"
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def readme_row() -> str:
    """Return README's row: the newest card that ran our steps and transformers' beside them."""
    for report in reports():
        rows = report["rows"]
        theirs = next((rows[name] for name in THEIRS if "tokens_per_s" in rows.get(name, {})), None)
        ours = [rows[name] for name in OURS if "tokens_per_s" in rows.get(name, {})]
        if theirs is None or len(ours) < len(OURS):
            continue
        name = next(name for name in THEIRS if name in rows).split(", ")[1]
        rates = "; ".join(f"{one['tokens_per_s'] / theirs['tokens_per_s']:.2f}" for one in ours)
        peaks = ", ".join(f"{one['peak_gib'] / theirs['peak_gib']:.2f}" for one in ours)
        what = f"tokens/s over {name}, packed rows; compiled; peak memory over the Trainer's"
        card = f"{report['card']} (llama3.2-1b, bf16, {report['date']})"
        return f"{ROW}{card}: {what} | | {rates}; {peaks} |"
    raise LookupError(f"no file in {KEPT} has figures of both")


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    lines = README.read_text(encoding="utf-8").splitlines()
    lines = [readme_row() if line.startswith(ROW) else line for line in lines]
    README.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
