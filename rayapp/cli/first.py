"""rayapp init and completion: a config to begin with, and completion in a shell."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rayapp.cli import COMMANDS, documented
from rayapp.config import KINDS, Config, ConfigError, arguments, help
from rayapp.config.fields import NAME_PATTERN
from rayapp.observe.run_folder import Exit

INIT = """rayapp init NAME

Writes NAME.yaml (a config with comments) and NAME.jsonl (ten chats to train on) to this folder.
Existing files are not replaced."""

COMPLETION = """rayapp completion bash|zsh

Prints a script for the shell: eval "$(rayapp completion bash)" in ~/.bashrc, or zsh in ~/.zshrc."""

CHATS = (
    ("What is a checkpoint?", "The weights, the optimizer and the position in the data, on disk."),
    ("What is an epoch?", "One pass over all rows of the data."),
    ("What is a learning rate?", "The size of the step that the optimizer takes."),
    ("What is a batch?", "The rows whose mean loss gives one step."),
    ("What is a token?", "A piece of text that the model reads as one number."),
    ("What does FSDP shard?", "Parameters, gradients and optimizer state, over all workers."),
    ("What is LoRA?", "Training two thin matrices beside each frozen one."),
    ("What is perplexity?", "The exponential of the mean loss per token."),
    ("What is warm-up?", "The first steps, over which the learning rate grows from zero."),
    ("What is packing?", "Several documents in one row, which do not see one another."),
)

HEAD = """# `rayapp plan {name}.yaml` estimates this run, `rayapp finetune {name}.yaml` trains it.
# Lines that begin with `# ` and a field are that field's default: remove the `# ` to set it.
# `rayapp finetune --help SECTION` explains each field.
"""

CHOSEN = {  # field: (value, what a user changes it to)
    "run.name": ("{name}", "the same name and storage is the same run: it resumes"),
    "run.storage": ("runs", "a folder, or s3://bucket/prefix"),
    "model.path": ("tiny", "random weights; to fine-tune, e.g. Qwen/Qwen3-0.6B or a folder"),
    "model.tokenizer": ("bytes", "for the tiny model; `none` takes the model's own"),
    "data.path": ("{name}.jsonl", "a file, glob, folder, s3:// path or hub id"),
    "data.seq_len": ("128", "tokens in a row"),
    "data.eval_fraction": ("0.1", "share held out"),
    "train.tokens_per_step": ("512", "the global batch, over all workers"),
    "train.micro_batch": ("2", "rows at once on a worker; `auto` takes the most that fit"),
    "train.max_steps": ("30", "or `none`, and epochs"),
    "train.lr": ("0.001", "peak learning rate; 1e-5 to 1e-4 for a trained model"),
    "checkpoint.every_s": ("600", "seconds between checkpoints"),
    "eval.every_steps": ("10", "steps between held-out evaluations"),
    "cluster.workers": ("2", "training workers, or e.g. `2:8` for elastic"),
}


@documented(INIT, words=True)
def init(argv: list[str]) -> int:
    """Write a config and data to begin with; see INIT."""
    name, _ = arguments.read_plain(argv, "NAME", {})
    if not re.match(NAME_PATTERN, name):
        what = f"it must match {NAME_PATTERN}. Set e.g. demo"
        raise ConfigError([f"NAME={name} is not valid: {what}"])
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in CHATS
    ]
    texts = {
        Path(f"{name}.yaml"): config_text(name),
        Path(f"{name}.jsonl"): "".join(f"{json.dumps(row)}\n" for row in rows),
    }
    for path in texts:
        if path.exists():
            raise ConfigError([f"{path} exists already: nothing is replaced. Set another NAME"])
    for path, text in texts.items():
        path.write_text(text)
        print(f"written {path}")
    print(f"next: rayapp data {name}.yaml, rayapp plan {name}.yaml, rayapp finetune {name}.yaml")
    return Exit.DONE


def config_text(name: str) -> str:
    """Return a config with what a user changes first; all other fields are in comments."""
    lines = [HEAD.format(name=name)]
    for section, info in Config.model_fields.items():
        model = help.section_of(info)
        if model is None:
            continue
        lines.append(f"{section}:")
        for field, (value, why) in CHOSEN.items():
            if field.startswith(f"{section}."):
                set_to = f"  {field.partition('.')[2]}: {value.format(name=name)}"
                lines.append(f"{set_to:<28}# {why}")
        for field, about in model.model_fields.items():
            if f"{section}.{field}" not in CHOSEN:
                lines.append(f"  # {field}: {help.default_of(field, about)}")
        lines.append("")
    return "\n".join(lines)


SCRIPT = """_rayapp() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" field="" words=""
  if [ "$cur" = "=" ]; then field="${{COMP_WORDS[COMP_CWORD-1]}}"; cur=""
  elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ]; then field="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if [ "$COMP_CWORD" = 1 ]; then words="{commands}"
  elif [ -n "$field" ]; then case "${{COMP_WORDS[1]}}$field" in
{values}
    esac
  elif [ "${{cur:0:1}}" = "-" ]; then
    compopt -o nospace 2>/dev/null
    case "${{COMP_WORDS[1]}}" in vision) words="{vision}";; *) words="{finetune}";; esac
  fi
  if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$cur"))
  else COMPREPLY=($(compgen -f -- "$cur")); fi
}}
complete -F _rayapp rayapp"""


def completion(argv: list[str]) -> int:
    """Print a shell's completion script; see COMPLETION."""
    if argv not in (["bash"], ["zsh"]):
        print(COMPLETION)
        return Exit.DONE if {"--help", "-h"} & set(argv) else Exit.REFUSED
    if argv == ["zsh"]:
        print("autoload -U +X compinit bashcompinit && compinit && bashcompinit")
    print(script(list(COMMANDS)))
    return Exit.DONE


def script(commands: list[str]) -> str:
    """Return the completion script for bash, which zsh also runs."""
    options, cases = {}, []
    for kind in KINDS.values():
        command = kind.MODULE.rpartition(".")[2]
        forms = help.forms(kind)
        options[command] = " ".join(f"--{field}=" for field in forms)
        anywhere = "*" if command == "finetune" else command
        for field, form in forms.items():
            if "|" in form and form.islower():
                cases.append(f'    {anywhere}--{field}) words="{form.replace("|", " ")}";;')
    ordered = sorted(cases, key=lambda case: case.lstrip().startswith("*"))  # vision's own first
    return SCRIPT.format(commands=" ".join(commands), values="\n".join(ordered), **options)
