"""Check cluster.instance as one type and as a list in order of preference."""

from __future__ import annotations

import re

import pytest

from rayapp.config import Choice, Config, ConfigError, from_dict, load

LIST = "[p5.48xlarge, p4d.24xlarge:spot@9.5, p4d.24xlarge]"
NAMES = ("p5.48xlarge", "p4d.24xlarge:spot@9.5", "p4d.24xlarge")


@pytest.mark.parametrize("text", [LIST, ",".join(NAMES), list(NAMES)])
def test_a_list_is_read(text: str | list[str]) -> None:
    config = load(None, {"cluster.instance": text})
    assert config.cluster.instance == NAMES
    assert config.cluster.choices == (
        Choice("p5.48xlarge"),
        Choice("p4d.24xlarge", "spot", 9.5),
        Choice("p4d.24xlarge"),
    )
    assert [each.cluster.instance for each in config.alternatives()] == list(NAMES)
    for again in (load(None, config.to_overrides()), from_dict(config.model_dump(mode="json"))):
        assert again == config


@pytest.mark.parametrize("text", ["p5.48xlarge", "[p5.48xlarge]"])
def test_one_type_stays_text(text: str) -> None:
    config = load(None, {"cluster.instance": text})
    assert config.cluster.instance == "p5.48xlarge"
    assert "instance: p5.48xlarge\n" in config.to_yaml()
    assert config.alternatives() == (config,)
    assert Config().cluster.choices == () and Config().alternatives() == (Config(),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("p5.48xlarge:block", "p5.48xlarge:block must be TYPE, TYPE:spot or TYPE:on-demand"),
        ("p5.48xlarge:", "must be TYPE, TYPE:spot or TYPE:on-demand"),
        (":spot,b", ":spot must be TYPE"),
        ("p5.48xlarge:spot@", "must end in USD per hour of one instance, e.g. @9.5"),
        ("p5.48xlarge@-3", "must end in USD per hour"),
        ("p5.48xlarge@0.0", "must end in USD per hour"),
        ("p5.48xlarge@nan", "must end in USD per hour"),
        ("p5.48xlarge,p5.48xlarge:on-demand", "once per market"),
        ("[]", "it must be an instance type, or a list in order of preference"),
        ("[1]", "1 must be text"),
        ("a,b,c,d,e,f", "it must have at most 5 choices"),
    ],
)
def test_what_is_no_list_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        load(None, {"cluster.instance": text})
    (problem,) = refused.value.problems
    assert problem.startswith("cluster.instance=") and "Set cluster.instance: " in problem


def test_a_list_has_no_single_price() -> None:
    with pytest.raises(ConfigError, match=r"Set each price in that list, e\.g\. p5\.48xlarge@30"):
        load(None, {"cluster.instance": LIST, "cluster.usd_per_hour": 30})
    load(None, {"cluster.instance": "p5.48xlarge:spot", "cluster.usd_per_hour": 30})
