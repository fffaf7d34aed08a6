"""The JSON values of an answer, as `plan --json` prints them and plan.json holds them."""

from __future__ import annotations

from typing_extensions import TypedDict


class BandValues(TypedDict):
    """A band as JSON values."""

    value: float
    low: float
    high: float


class Forecast(TypedDict, total=False):
    """An answer as JSON values; a run has the keys of its own unit only, tokens or images."""

    fits: bool | None
    peak_gib: BandValues
    step_s: BandValues | None
    tokens_per_s: BandValues | None
    tokens_per_s_per_gpu: BandValues | None
    images_per_s: BandValues | None
    images_per_s_per_gpu: BandValues | None
    mfu: BandValues | None
    hours: BandValues | None
    epoch_hours: BandValues | None
    cost_usd: BandValues | None
    usd_per_1m_tokens: BandValues | None
    usd_per_1m_images: BandValues | None
    peak_terms_gib: dict[str, float]
    peak_phase: str
    capacity_gib: float | None
    step_terms_s: dict[str, float] | None
    parameters: int
    active_parameters: int
    trainable_parameters: int
    workers: int
    nodes: int
    instance: str | None
    usd_per_hour: float | None
    region: str
    steps: int | None
    tokens_per_step: int
    images_per_step: int
    checkpoint: dict[str, float | None] | None
    goodput: float | None
    reasons: list[str]
