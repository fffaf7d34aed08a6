"""rayapp stage: bring images to where they are trained on, verified."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rayapp.cli.jobs import or_none
from rayapp.config import ConfigError
from rayapp.observe.run_folder import Exit

if TYPE_CHECKING:
    from rayapp.data.images.staging import Staged

STAGE = """rayapp stage SOURCE TARGET     folders, or s3://bucket/prefix, either way

  --labels=FILE        classes of a flat folder (ImageNet's val): its images go into folders of them
  --synsets=FILE       names of the classes in the order of their numbers, where labels are numbers
  --bad_images=0.01    share of the files, 0-1, that may be no images or damaged; they are left out
  --parallel=32        files at once
  --json               print what was done as JSON

The same command goes on where one was cut off: what is there and verified is not copied again."""


def stage(argv: list[str]) -> int:
    """Copy a set of images; see STAGE."""
    if "--help" in argv or "-h" in argv or not argv:
        print(STAGE)
        return Exit.DONE if argv else Exit.REFUSED
    from rich.progress import Progress

    from rayapp.config import arguments
    from rayapp.data.images import staging
    from rayapp.data.images.labels import LabelError
    from rayapp.data.sources import SourceError
    from rayapp.observe.plain import Console
    from rayapp.storage import StorageError

    known = {"labels": "none", "synsets": "none", "bad_images": "0.01", "parallel": "32"}
    words, asked = arguments.read_words(arguments.flags(argv, {"json"}), known | {"json": "false"})
    if len(words) != 2:
        what = f"{' '.join(words)} is unexpected" if words else "SOURCE is missing"
        raise ConfigError([f"{what}: a SOURCE and a TARGET are expected. Give both"])
    bad_images = arguments.number("bad_images", asked["bad_images"], zero=True)
    parallel = arguments.count("parallel", asked["parallel"])
    labels, synsets = (or_none(asked[name]) for name in ("labels", "synsets"))
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"staging {words[0]}", total=None)
            report = staging.stage(
                words[0],
                words[1],
                labels=labels,
                synsets=synsets,
                bad_images=bad_images,
                parallel=parallel,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except LabelError as error:
        raise ConfigError([str(error)]) from error
    except (SourceError, StorageError, FileNotFoundError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED
    if asked["json"] == "true":
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print(_summary(report))
    return Exit.DONE


def _summary(report: Staged) -> str:
    lines = [
        f"{report.images:,} images in {report.target}"
        + (f", {report.classes:,} classes" if report.classes else ""),
        f"copied and verified {report.copied:,} files ({report.copied_bytes / 2**20:,.0f} MiB); "
        f"{report.there:,} were already there",
    ]
    if report.bad:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report.bad.items())
        lines.append(f"left out: {reasons}")
        lines += [f"  {place}: {why}" for place, why in report.examples]
    if report.foreign:
        shown = ", ".join(report.foreign_examples[:3])
        lines.append(f"not from the source: {report.foreign:,} files of the target, e.g. {shown}")
    return "\n".join(lines)
