"""A hook that keeps a diary of a run, on the machine of its driver."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayapp.config import RunConfig


class Diary:
    """Write a line for each step, checkpoint and end into the file that LAB_DIARY names."""

    def __init__(self, config: RunConfig, run: str) -> None:
        """Take the run's config, and its folder or s3:// URL."""
        self.name = config.run.name
        self.file = Path(os.environ.get("LAB_DIARY", f"{config.run.name}-diary.jsonl"))

    def on_step(self, line: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""
        self._write({"step": line["step"], "loss": line["loss"]})

    def on_checkpoint(self, step: int, url: str) -> None:
        """Take the newest committed checkpoint."""
        self._write({"checkpoint": step, "url": url})

    def on_end(self, result: Mapping[str, Any]) -> None:
        """Take the content of result.json."""
        self._write({"status": result["status"]})

    def _write(self, entry: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as diary:
            diary.write(json.dumps({"run": self.name, **entry}) + "\n")
