"""Settings of AWS that are in a file, not in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest


def endpoint_in_config(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name an S3 server as ~/.aws/config does, and in no variable."""
    config = folder / "aws_config"
    services = f"[services here]\ns3 =\n  endpoint_url = {url}\n"
    config.write_text(f"[default]\nservices = here\nregion = us-east-1\n{services}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
