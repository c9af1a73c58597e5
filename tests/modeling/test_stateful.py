"""A cache in random use, beside references; and whether that would find a bug.

With CSKV_STATEFUL_MINUTES=60 the random use goes on for so long, with other seeds.
"""

import itertools
import os
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.modeling.machine import AsListed, AtFullRank
from tests.modeling.planted import BUGS, plant

MACHINES = [AsListed, AtFullRank]
TRIES = 4  # what hypothesis draws depends on which modules are loaded beside it
MINUTES = float(os.environ.get("CSKV_STATEFUL_MINUTES", 0))
RANDOM = settings(
    database=None,
    deadline=None,
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
)


def use(machine, number=0):
    run_state_machine_as_test(seed(number)(machine), settings=RANDOM)


@pytest.mark.parametrize("machine", MACHINES)
def test_random_use(machine):
    end = time.monotonic() + 60 * MINUTES / len(MACHINES)
    for number in itertools.count():
        use(machine, number)
        if time.monotonic() >= end:
            return


@pytest.mark.parametrize("bug", BUGS)
def test_random_use_finds_a_planted_bug(bug, monkeypatch):
    plant(monkeypatch, bug)
    assert any(fails(machine, number) for number in range(TRIES) for machine in MACHINES)


def fails(machine, number):
    try:
        use(machine, number)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return True
    return False
