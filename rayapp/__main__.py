"""rayapp COMMAND [CONFIG.yaml] [--section.field=value ...] [--option=value ...]

Train
  init       write a config and a small data file to begin with
  data       show how records are rendered, and which tokens bear loss
  prepare    tokenise and pack a run's data before the run, on CPUs only
  plan       estimate the memory, time and cost of a run
  presets    list the published model shapes, for plans and tests
  finetune   fine-tune a language model, here or on a running Ray cluster
  vision     train an image classifier
  sweep      try values of a config's fields, under one budget

Clusters
  render     write the files of a cluster on ECS or KubeRay, and print its cost
  capacity   start workers where EC2 has capacity, and wait for them
  connect    forward a cluster's dashboard and Jobs API to this machine
  preflight  check a cluster before money is spent: GPUs, network, limits, storage
  submit     submit a run to a cluster as a Ray job
  resume     submit a run again; it resumes from its newest checkpoint

Runs
  list       list the runs of a folder or of a cluster
  status     show the progress of a run;  watch  the same, live
  logs       print the output of a run's driver
  stop       save a checkpoint of a run and end the run
  report     write report.html of a run, or one page that compares several runs
  generate   generate text with a run's model
  check      open a run's model in transformers, vLLM and llama.cpp, and compare
  merge      make one model of a run's adapter and its base
  publish    upload a run's model to the Hugging Face hub, with its card and licence
  du         show the disk usage of runs, rows and tokens in a storage
  rm         remove a run
  prune      remove rows and tokens that no run needs

`rayapp COMMAND --help` shows the options of a command, `rayapp --version` the version, `rayapp
completion bash` (or zsh) a script that completes commands and fields. `python -m rayapp COMMAND`
is the same. Exit codes: 0 done (or still running), 1 failed, 2 refused, 3 stopped on request.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version

from rayapp.cli import COMMANDS
from rayapp.config import ConfigError
from rayapp.observe.plain import NO_BARS, plain_output
from rayapp.observe.run_folder import Exit, refused


@plain_output()
def main(argv: list[str] | None = None) -> int:
    """Run a command, by default the one this process was started with; return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--version"]:
        print(f"rayapp {version('rayapp')}")
        return Exit.DONE
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(__doc__)
        return Exit.DONE if argv else Exit.REFUSED
    if argv[0] not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Set one of {', '.join(COMMANDS)}"
        print(f"command={argv[0]} is unknown: there is no such command. {hint}", file=sys.stderr)
        return Exit.REFUSED
    module, _, function = COMMANDS[argv[0]].rpartition(".")
    if argv[0] != "publish":  # its upload has a bar
        os.environ.setdefault(NO_BARS, "1")
    command = getattr(importlib.import_module(f"rayapp.{module}"), function)
    try:
        return int(command(argv[1:]))
    except ConfigError as error:
        return refused(error)
    except BrokenPipeError:  # of `rayapp list | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
