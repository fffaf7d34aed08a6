"""What a run has to compute with."""

from __future__ import annotations

import pytest
import ray

from rayapp.driver import session


@pytest.mark.parametrize(
    ("there", "precision"),
    [
        (["accelerator_type:A100"], "bf16"),
        (["accelerator_type:V100"], "fp32"),
        (["accelerator_type:A10G", "accelerator_type:T4"], "fp32"),
        ([], "bf16"),  # a kind that Ray does not know is newer than those it does
    ],
)
def test_auto_is_bf16_where_every_gpu_has_it(
    there: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"CPU": 8.0, "GPU": 2.0, **dict.fromkeys(there, 1.0)}
    monkeypatch.setattr(ray, "cluster_resources", lambda: found)
    assert session.fastest_precision(gpus=True) == precision
