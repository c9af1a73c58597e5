"""Random use of a cache, step by step beside a reference (hypothesis calls this a state machine)."""

import copy
import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from transformers import DynamicCache

from cskv_cli.modeling.cskv_quantizer import Quantizer
from cskv_cli.modeling.modeling_cskv import CSKVCache
from tests.families import base_model, compressed, truncated
from tests.modeling.decoding import padding, run, tokens
from tests.modeling.lists import Lists

LONGEST, WIDEST = 48, 4  # tokens, rows
SEEDS = st.integers(0, 2**16)
LISTS = {
    "4 bit": dict(bits=4, group=4, window=4, sinks=2),
    "2 bit": dict(bits=2, group=3, window=5, sinks=0),
    "low": dict(rank=8, window=4, sinks=2),
}


@functools.cache
def base(family):
    return base_model(family, num_hidden_layers=2) if family == "Llama" else base_model(family)


@functools.cache
def full(family):
    return compressed(base(family), window=4, sinks=2)


@functools.cache
def listed(setting):
    """In float64, lest noise round a number to another code than in the reference."""
    settings = LISTS[setting]
    factors = truncated(settings["rank"]) if "rank" in settings else None
    return compressed(base("Llama"), factors=factors, **settings).double()


class Pair:
    """A cache and its reference, and where their rows begin."""

    def __init__(self, cache, reference):
        self.cache, self.reference = cache, reference
        self.starts, self.length, self.masked = [], 0, False

    def both(self, name, *arguments):
        for each in (self.cache, self.reference):
            getattr(each, name)(*arguments)


holds = precondition(lambda self: self.pair.length > 0)
has_room = precondition(lambda self: 0 < self.pair.length < LONGEST)


class Use(RuleBasedStateMachine):
    """Each rule is one thing that is done to a cache. After it the next token's logits are those of the reference."""

    group = 4  # tokens that are packed together

    def forward(self, pair, ids):
        """Add tokens to both."""
        pair.length += ids.shape[1]
        mask = padding(pair.starts, pair.length)
        with torch.no_grad():
            got = run(self.model, ids, pair.cache, mask if pair.masked else None)
            expected = self.expected(pair, ids, mask)
        real = mask[:, -ids.shape[1] :].bool()
        torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)

    def expected(self, pair, ids, mask):
        raise NotImplementedError

    def look(self):
        """Compare what comes next, on copies."""
        if self.pair.length > 0:
            self.forward(copy.deepcopy(self.pair), tokens(len(self.pair.starts), 1, seed=self.pair.length))

    @precondition(lambda self: not self.pair.length)
    @rule(
        starts=st.lists(st.one_of(st.just(0), st.integers(0, 9)), min_size=1, max_size=3),
        size=st.integers(1, 14),
        masked=st.booleans(),
        seed=SEEDS,
    )
    def prefill(self, starts, size, masked, seed):
        self.pair.starts, self.pair.masked = starts, masked or any(starts)
        self.forward(self.pair, tokens(len(starts), size, seed=seed))

    @has_room
    @rule(steps=st.integers(1, 6), seed=SEEDS)
    def decode(self, steps, seed):
        for step in range(steps):
            self.forward(self.pair, tokens(len(self.pair.starts), 1, seed=seed + step))

    @has_room
    @rule(size=st.integers(2, 9), seed=SEEDS)
    def chunk(self, size, seed):
        self.forward(self.pair, tokens(len(self.pair.starts), size, seed=seed))

    @holds
    @rule(data=st.data())
    def crop(self, data):
        pair, groups = self.pair, st.integers(0, self.pair.length // self.group)
        left = data.draw(st.one_of(st.integers(0, pair.length), groups.map(lambda groups: groups * self.group)))
        removed = pair.length - left
        reference = copy.deepcopy(pair.reference)
        try:
            reference.crop(-removed)
        except (ValueError, RuntimeError):
            if removed not in (0, pair.length):  # which a CSKVCache takes
                with pytest.raises(ValueError):
                    pair.cache.crop(-removed)
            return self.look()
        pair.cache.crop(-removed)
        pair.reference, pair.length = reference, pair.length - removed
        pair.starts = [min(start, pair.length) for start in pair.starts]
        if not pair.length:
            pair.reference.reset()
        return self.look()

    @rule(wanted=st.booleans())
    def record(self, wanted):
        self.pair.both("record_past_for_generate", wanted)
        self.look()

    @holds
    @rule(data=st.data())
    def reorder(self, data):
        rows = st.integers(0, len(self.pair.starts) - 1)
        rows = data.draw(st.lists(rows, min_size=len(self.pair.starts), max_size=len(self.pair.starts)))
        self.take(rows, "reorder_cache", torch.tensor(rows))

    @holds
    @rule(data=st.data())
    def select(self, data):
        rows = st.integers(0, len(self.pair.starts) - 1)
        rows = data.draw(st.lists(rows, min_size=1, max_size=WIDEST))
        self.take(rows, "batch_select_indices", torch.tensor(rows))

    @precondition(lambda self: 0 < 2 * len(self.pair.starts) <= WIDEST)
    @holds
    @rule()
    def repeat(self):
        self.take([row for row in range(len(self.pair.starts)) for _ in range(2)], "batch_repeat_interleave", 2)

    def take(self, rows, name, argument):
        self.pair.both(name, argument)
        self.pair.starts = [self.pair.starts[row] for row in rows]
        self.look()

    @rule(steps=st.integers(0, 8), seed=SEEDS)
    def deepcopy(self, steps, seed):
        """And go on with both, in turns."""
        self.other = copy.deepcopy(self.pair)
        for step in range(min(steps, LONGEST - self.pair.length) if self.pair.length else 0):
            for i, pair in enumerate((self.pair, self.other)):
                self.forward(pair, tokens(len(pair.starts), 1, seed=seed + step + 100 * i))

    @rule()
    def swap(self):
        """Go on with the copy, beside which the other was used."""
        self.pair, self.other = self.other, self.pair
        self.look()

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_cache(self.pair.cache, path := Path(folder, "cache.safetensors"))
            self.pair.cache = self.model.load_cache(path)
        self.look()

    @rule()
    def reset(self):
        self.pair.both("reset")
        self.pair.starts, self.pair.length = [], 0


class AtFullRank(Use):
    """Beside the base model and its `DynamicCache`."""

    @initialize(family=st.sampled_from(["Llama", "Gemma3", "Qwen2:swa", "Llama:dynamic"]))
    def begin(self, family):
        self.model, self.base = full(family), base(family)
        if family == "Llama:dynamic":  # keeps the longest length in the model
            self.model, self.base = copy.deepcopy(self.model), copy.deepcopy(self.base)
        self.pair, self.other = (Pair(CSKVCache(self.model.config), Dynamic(self.base.config)) for _ in range(2))

    def expected(self, pair, ids, mask):
        return run(self.base, ids, pair.reference, mask if pair.masked else None)


class AsListed(Use):
    """Beside `Lists`: quantized, or of low rank."""

    @initialize(setting=st.sampled_from(list(LISTS)))
    def begin(self, setting):
        self.model, settings = listed(setting), LISTS[setting]
        bits, self.group = settings.get("bits"), settings.get("group", 4)
        quantizers = bits and tuple(Quantizer(bits, self.group, per_channel) for per_channel in (True, False))
        new = lambda: Lists(settings["window"], settings["sinks"], quantizers)  # noqa: E731
        self.pair, self.other = (Pair(CSKVCache(self.model.config), new()) for _ in range(2))

    def expected(self, pair, ids, mask):
        return pair.reference.forward(self.model, ids, pair.starts)


class Dynamic(DynamicCache):
    """Records the past as a `CSKVCache` does, and refuses a `crop` that would leave a sliding window with holes."""

    def __init__(self, config):
        super().__init__(config=config)

    def crop(self, tokens_to_remove):
        for layer in self.layers:
            left = layer.get_seq_length() + tokens_to_remove
            if layer.is_sliding and layer.keys.shape[2] + tokens_to_remove < min(left, layer.sliding_window - 1):
                raise ValueError
        super().crop(tokens_to_remove)

    def record_past_for_generate(self, wanted):
        for layer in self.layers:
            if getattr(layer, "record_past", False) and not wanted and layer.is_initialized:
                layer.crop(0)
            layer.record_past = wanted
