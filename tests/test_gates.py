"""Conditions on what `cskv eval` measures."""

import math

import pytest

from cskv_cli.gates import parse_gates, values_of

PERPLEXITY = {
    "task": "perplexity",
    "base": {"perplexity": 20.0},
    "cskv": {"perplexity": 25.0},
    "kl": 0.25,
    "top1_agreement": 0.9,
}
RETRIEVAL = {"task": "retrieval", "base": {"score": 0.8}, "cskv": {"score": 0.6}}


@pytest.mark.parametrize(
    "condition, value, passed",
    [
        ("perplexity<=25", 25.0, True),
        ("perplexity<25", 25.0, False),
        ("perplexity_ratio<=1.25", 1.25, True),
        ("perplexity_ratio <= 1.2", 1.25, False),
        ("kl<0.3", 0.25, True),
        ("top1_agreement>=0.9", 0.9, True),
        ("top1_agreement>0.9", 0.9, False),
        ("compression>=7.5e-1", 0.5, False),
        ("retrieval>=0.6", 0.6, True),
        ("retrieval_ratio>=0.8", 0.75, False),
    ],
)
def test_a_condition_is_what_it_says(condition, value, passed):
    (gate,) = parse_gates([condition], ["perplexity", "retrieval"])
    checked = gate.check(values_of([PERPLEXITY, RETRIEVAL], compression=0.5))
    assert checked["value"] == pytest.approx(value) and checked["passed"] is passed


@pytest.mark.parametrize("comparison", ["<=", ">=", "<", ">"])
@pytest.mark.parametrize("value", [math.nan, None])
def test_what_is_not_a_number_fails(comparison, value):
    (gate,) = parse_gates([f"retrieval_ratio{comparison}0.5"], ["retrieval"])
    base = {"score": 0.0} if value is None else {"score": value}
    assert not gate.check(values_of([RETRIEVAL | {"base": base}], 0.5))["passed"]


@pytest.mark.parametrize(
    "condition",
    ["perplexity", "perplexity=20", "perplexity<=", "<=3", "perplexity<=x", "loss<=1", "retrieval>=0.5", ""],
)
def test_what_is_no_condition_or_not_measured_is_refused(condition):
    with pytest.raises(ValueError, match="compression|is not a condition"):
        parse_gates([condition], ["perplexity"])
