"""rayapp plan, presets and sweep: what a run would take, shapes without weights, many runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rayapp.cli import documented
from rayapp.config import Config, ConfigError, RunConfig, VisionConfig
from rayapp.hardware import GIB
from rayapp.observe import run_folder
from rayapp.observe.run_folder import DONE, FAILED, REJECTED, Exit
from rayapp.observe.status import read_plan
from rayapp.planner.shape import shape_of
from rayapp.planner.trained import text_section
from rayapp.presets import IMAGE_PRESETS, config_of
from rayapp.presets import PRESETS as LANGUAGE
from rayapp.storage import open_storage

PLAN = """rayapp plan [CONFIG.yaml | RUN FOLDER] [--section.field=value ...]

  --json               print everything as JSON
  --deadline_hours=H   find the cheapest machines that finish the run in H hours
  --budget_usd=D       find the cheapest machines that cost at most D dollars
  --region=NAME        AWS region of the prices; us-west-2 by default
  --images=N           number of training images of a classifier, if data.count is none
  --usd_per_hour=D     price of one instance, e.g. a spot price, instead of the list price

Exit code 1: the memory does not fit (on one type of a list), and cluster.ignore_plan is not set."""

LISTED = """rayapp presets [--json]

Lists the published shapes that model.path can name. They have no weights.

  --json   print everything as JSON"""

SWEEP = """rayapp sweep SWEEP.yaml [--option=value ...]

Tries values of the fields of a config, each in a run of its own, and names the best. The same
command goes on after a stop or a kill, or with a larger budget (docs/sweep.md).

  --json   print the result as JSON
  --name, --storage, --config, --trials, --seed, --scheduler, --metric, --mode, --max_usd,
  --max_hours, --concurrency   in place of the file's

Exit code 1: a trial has failed; 3: the budget or a user has stopped trials."""

FIELDS = "name storage config trials seed scheduler metric mode max_usd max_hours concurrency"

NVIDIA = "/proc/driver/nvidia/version"  # is there where the driver of a GPU is loaded

NUMBERS = ("deadline_hours", "budget_usd", "usd_per_hour", "images")


@documented(PLAN)
def plan(argv: list[str]) -> int:
    """Plan a run; see PLAN."""
    from rayapp import planner
    from rayapp.config import arguments
    from rayapp.observe.plain import Console
    from rayapp.planner.plan_tables import show
    from rayapp.planner.question import named_instance
    from rayapp.train import planning

    argv = arguments.flags(argv, {"json"})
    argv, prepared = _prepared(argv)
    known = {"json": "false", "region": "us-west-2", **dict.fromkeys(NUMBERS, "none")}
    config, options = arguments.read(argv, known)
    assert isinstance(config, Config | VisionConfig)
    config = planner.with_adapters_lora(config) if isinstance(config, Config) else config
    numbers = {
        name: None if options[name].lower() == "none" else arguments.number(name, options[name])
        for name in NUMBERS
    }
    usd_per_hour = numbers.pop("usd_per_hour")
    if numbers.pop("images") is not None:
        prepared["images"] = arguments.whole_number("images", options["images"])
    if isinstance(config, Config) and options["images"].lower() != "none":
        raise ConfigError([f"--images={options['images']} is for image classifiers: remove it"])
    if usd_per_hour is not None and len(config.cluster.choices) > 1:
        what = f"cluster.instance is a list. Set each price in it, e.g. TYPE:spot@{usd_per_hour:g}"
        raise ConfigError([f"--usd_per_hour={usd_per_hour:g} is ambiguous: {what}"])
    more = {"region": options["region"], "usd_per_hour": usd_per_hour, **prepared}
    named_instance(config)  # refuses every unknown type at once
    choices = {
        str(each.cluster.instance): planning.plan(each, **more, **this_machine(config))
        for each in config.alternatives()
    }
    answer = next((each for each in choices.values() if each.fits), next(iter(choices.values())))
    question = answer.question
    if isinstance(config, Config) and (warning := planner.random_weights(config)):
        answer.reasons.append(warning)
    best = planner.cheapest(question, **numbers) if any(numbers.values()) else None
    others, table = planner.suggestions(question), planner.scaling(question)
    if options["json"] == "true":
        values = planner.as_dict(answer, others, table, best)
        if len(choices) > 1:
            values["choices"] = {name: each.as_dict() for name, each in choices.items()}
        print(json.dumps(values, indent=2))
    else:
        show(Console(), answer, others, table, best, choices)
    fits = config.cluster.ignore_plan or all(each.fits is not False for each in choices.values())
    return Exit.DONE if fits else Exit.FAILED


def _prepared(argv: list[str]) -> tuple[list[str], dict[str, int]]:
    from rayapp.planner import counts_of

    counts, words = dict[str, int](), list[str]()
    for word in argv:
        if not word.startswith("-") and (Path(word) / run_folder.CONFIG).is_file():
            counts = counts_of(read_plan(open_storage(word)))
            word = str(Path(word) / run_folder.CONFIG)
        words.append(word)
    return words, counts


def this_machine(config: RunConfig) -> dict[str, Any]:
    """Return what the planner takes of this machine, if the run would train on its CPUs."""
    cluster = config.cluster
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    elsewhere = cluster.instance or address != "local"
    if elsewhere or cluster.gpu == "true" or os.path.exists(NVIDIA):
        return {}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"on_cpu": True, "capacity_gib": memory_bytes / GIB / cluster.min_workers}


@documented(SWEEP, words=True)
def sweep(argv: list[str]) -> int:
    """Run a sweep; see SWEEP."""
    known = dict.fromkeys([*FIELDS.split(), "json"], "")
    from rayapp.config import arguments
    from rayapp.driver.ray_session import tell_ray
    from rayapp.observe.plain import Console

    path, asked = arguments.read_plain(arguments.flags(argv, {"json"}), "SWEEP.yaml", known)
    as_json = asked.pop("json") == "true"
    console = Console(file=sys.stderr if as_json else None, force_jupyter=False)
    changes = {name: value for name, value in asked.items() if value}
    tell_ray()
    from rayapp.finetune.sweep_config import read, trials_of

    trials_of(read(path, changes))  # refuses what is wrong before torch is imported
    from rayapp.finetune import sweeping

    result = sweeping.sweep(path, console, **changes)
    print(json.dumps(result, indent=2)) if as_json else sweeping.show_result(console, result)
    states = {row["state"] for row in result["trials"]}
    if FAILED in states or states == {REJECTED}:
        return Exit.FAILED if FAILED in states else Exit.REJECTED
    return Exit.DONE if states <= {DONE, REJECTED, sweeping.ASHA} else Exit.STOPPED


@documented(LISTED)
def presets(argv: list[str]) -> int:
    """List the presets; see LISTED."""
    from rayapp.config import arguments

    _, asked = arguments.read_plain(arguments.flags(argv, {"json"}), "", {"json": "false"})
    kinds = {"language": _language_presets(), "images": _image_presets()}
    if asked["json"] == "true":
        print(json.dumps(kinds, indent=2))
    else:
        print("\n\n".join(map(_columns, kinds.values())))
    return Exit.DONE


def _language_presets() -> list[dict[str, Any]]:
    """Return a row for each preset; one without a published count is counted by its formula."""
    return [
        {
            "preset": name,
            "family": config["model_type"],
            "parameters": preset.parameters or shape_of(config).parameters,
            "context": text_section(config)["max_position_embeddings"],
            "licence": preset.licence,
            "source": preset.source,
        }
        for name, preset in LANGUAGE.items()
        for config in [config_of(name)]
    ]


def _image_presets() -> list[dict[str, Any]]:
    return [
        {
            "preset": name,
            "family": preset.model_type,
            "parameters": preset.parameters,
            "gmacs": preset.gmacs,
            "pixels": preset.size,
        }
        for name, preset in IMAGE_PRESETS.items()
    ]


def _columns(rows: list[dict[str, Any]]) -> str:
    """Return rows as aligned columns, numbers to the right."""
    texts = [dict(zip(rows[0], rows[0], strict=True))]
    texts += [{k: f"{v:,}" if isinstance(v, int) else str(v) for k, v in r.items()} for r in rows]
    width = {key: max(len(text[key]) for text in texts) for key in rows[0]}
    side = {key: "<" if isinstance(value, str) else ">" for key, value in rows[0].items()}
    return "\n".join(
        "  ".join(f"{value:{side[key]}{width[key]}}" for key, value in text.items()).rstrip()
        for text in texts
    )
