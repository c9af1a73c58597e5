"""The cost model against the matrix products of a real step."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cskv_cli.checkpoint.load import layout_of, shape_of
from cskv_cli.costs import Dims, Machine, Step, base_step, cskv_step, dims_of, measure_machine
from cskv_cli.memory import Shape, base_bytes, cache_bytes
from cskv_cli.modeling.cskv_latents import BLOCK
from tests.families import base_model, compressed, truncated
from tests.modeling.decoding import cskv, decode, new_cache, run, tokens, waiting
from tests.modeling.test_head_groups import SETTINGS, grouped

BATCH = 2
CONTEXT = BLOCK + SETTINGS["window"] - 1  # then a step after one more meets a whole block of old tokens


def counted(model, context=CONTEXT, batched=False):
    """Multiply-adds of the matrix products of one step, not the first; or only of those over the cache."""
    cache = new_cache(model)
    decode(model, tokens(BATCH, context), [context - 8, *[1] * 8], cache)  # since then, every layer made latents
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run(model, tokens(BATCH, 1), cache)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if not batched or "bmm" in str(name)) / 2


@pytest.mark.parametrize("groups", [1, 2])
def test_multiply_adds_are_those_of_a_step(groups):
    base = base_model("Llama")
    base.set_attn_implementation("eager")
    factors = grouped if groups == 2 else truncated(12)
    model = compressed(base, factors, head_groups=groups, **SETTINGS)
    layout, dims = layout_of(model), dims_of(model, shape_of(model))
    assert counted(base) == pytest.approx(base_step(dims, layout, CONTEXT + 1, BATCH).multiply_adds, rel=0.01)
    sinks = BATCH * 4 * SETTINGS["sinks"] * (12 / groups * (32 + 4) + 64 + 64)  # rebuilt with the others, for nothing
    before, after = (sum(waiting("low", CONTEXT - 8, count, i) for i in range(4)) for count in (CONTEXT, CONTEXT + 1))
    made = before + 4 - after
    late = BATCH * (4 - made) * dims.hidden * 2 * 12  # latents of these tokens, or of those before them
    expected = cskv_step(dims, layout, CONTEXT + 1, BATCH).multiply_adds + sinks - late
    assert made == 8
    assert counted(model) == pytest.approx(expected, rel=0.01)


def test_operations_are_those_of_a_whole_block():
    """So that their sizes, which oneDNN prepares for, change only once in a block."""
    model = cskv("Llama", "low", window=4)
    before, *exact, after = [
        counted(model, BLOCK + 3 + more, batched=True) for more in (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1)
    ]
    assert len({*exact}) == 1 and before < exact[0] < after


@pytest.mark.parametrize("setting", ["low", "low, 4 bit"])
def test_bytes_are_those_of_the_cache_and_the_weights(setting):
    model = cskv("Llama", setting)
    layout, shape = layout_of(model), shape_of(model)
    dims = dims_of(model, shape)
    weights = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name and "embed" not in name) * 4
    factors = 4 * 2 * 12 * (64 + 32) * 4
    assert base_step(dims, layout, 90, 3).bytes == weights - factors + 3 * base_bytes(shape, layout, 90)
    cache = cache_bytes(shape, layout, 90) - 4 * 90  # positions
    unread = 4 * 2 * 12 * 64 * 4 * 7 / 8  # A, which a step reads an eighth of
    assert cskv_step(dims, layout, 90, 3).bytes == pytest.approx(weights - unread + 3 * cache, rel=0.02)


def test_a_step_takes_what_the_scarcer_of_the_two_takes():
    machine = Machine(operations=100, bytes=10)
    assert Step(500, 20).seconds(machine) == 10 and Step(500, 200).seconds(machine) == 20


def test_rebuilding_decides_for_many_heads_and_groups_divide_it():
    """LongChat-7B at ratio 0.8 and 32k tokens (docs/performance.md)."""
    from cskv_cli.layout import unquantized

    dims = Dims(Shape(4096, 2), 4096, 32, 4096, 0)
    whole = unquantized(32, 4, (816,), (816,))
    adds = [cskv_step(dims, whole.model_copy(update={"head_groups": groups}), 32768).multiply_adds for groups in (1, 8)]
    rebuilt = (32768 - 36) * 816 * 4096
    assert adds[0] == pytest.approx(rebuilt, rel=0.02) and adds[0] - adds[1] == pytest.approx(rebuilt * 7 / 8, rel=0.02)


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr("cskv_cli.costs.SIZES", {"cpu": (64, 2**16)})
    monkeypatch.setattr("cskv_cli.costs.SECONDS", 0.01)
    machine = measure_machine("cpu", torch.float32)
    assert 1e7 < machine.operations < 1e14 and 1e7 < machine.bytes < 1e13
