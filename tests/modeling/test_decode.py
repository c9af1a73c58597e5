"""The decode step says what the simple path says, which rebuilds the whole history: in every family and setting."""

import copy
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn

from cskv_cli.evaluation.held import reachable_bytes
from cskv_cli.modeling import cskv_attention, cskv_decode, cskv_positions
from cskv_cli.modeling.cskv_decode import DecodeStep
from cskv_cli.modeling.cskv_factors import Scratch
from cskv_cli.modeling.cskv_latents import BLOCK
from tests.families import FAMILIES, base_model, compressed, truncated
from tests.modeling.decoding import RANK, base, close, cskv, decode, new_cache, padding, run, tokens, waiting

LENGTH, PROMPT = 26, 14
SIZES = [PROMPT] + [1] * (LENGTH - PROMPT)
# Those whose path to the cache is another's are decoded at full rank only (test_cache_families.py).
DECODED = [
    "Apertus", "Arcee", "BitNet", "Cohere", "Cohere2", "Cohere:noqk", "Ernie4_5", "Exaone4", "GPT2", "GPTBigCode",
    "GPTNeoX", "Gemma", "Gemma2", "Gemma3", "Gemma3:6l", "Glm", "Glm4", "GptOss", "Granite", "GraniteMoe", "Helium",
    "Llama", "Llama:bias", "Llama:dynamic", "Llama:longrope", "Llama:yarn", "MiniMaxM2", "Ministral3", "Mistral",
    "Mixtral", "Nemotron", "OPT", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Persimmon", "Phi", "Phi3", "Phi3:partial",
    "Qwen2", "Qwen2:swa", "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2",
]  # fmt: skip
OWN_EAGER = {"GPT2", "GPTNeoX", "OPT", "Persimmon"}  # an eager attention unlike all that a decode step stands for
CLIPPED = {"Olmo", "Olmoe"}  # values that are clipped must be rebuilt: no decode step
# under transformers 4.57 these take the simple path with some attention functions or all
OLD_WAYS = {"Gemma2", "GraniteMoe", "Nemotron", "StableLm"} if transformers.__version__ < "5" else set()


@pytest.fixture
def steps(monkeypatch):
    """Counts decode steps, a layer each."""
    count = []
    call = DecodeStep.__call__
    monkeypatch.setattr(
        DecodeStep, "__call__", lambda step, *args, **kwargs: count.append(1) or call(step, *args, **kwargs)
    )
    return count


@contextmanager
def simple_path():
    """Inside, no decode step is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cskv_attention, "next_step", lambda *args: None)
        yield


@torch.no_grad()
def both(model, ids, mask=None, prompt=PROMPT):
    """Logits after each token that is decoded, by the decode step and by the simple path from the same cache.

    Its copy, that is: were both to go on with their own, noise might round a latent to another code in one of them.
    """
    cache, got, expected = new_cache(model), [], []
    mask_of = lambda stop: None if mask is None else mask[:, :stop]  # noqa: E731
    with simple_path():
        run(model, ids[:, :prompt], cache, mask_of(prompt))
    for i in range(prompt, ids.shape[1]):
        inputs = model, ids[:, i : i + 1]
        got.append(run(*inputs, copy.deepcopy(cache), mask_of(i + 1)))
        with simple_path():
            expected.append(run(*inputs, cache, mask_of(i + 1)))
    return torch.cat(got, dim=1), torch.cat(expected, dim=1)


def implementations(model):
    for name in ("eager", "sdpa"):
        try:
            model.set_attn_implementation(name)
        except ValueError:  # this family has no such implementation
            continue
        yield name


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", [name for name in DECODED if name in FAMILIES])
def test_equals_the_simple_path(family, bits, steps):
    model = compressed(base_model(family), truncated(RANK), rank=RANK, window=8, sinks=2, bits=bits, group=4)
    layers = sum(rank is not None for rank in model.config.cskv["rank_k"])
    ids = tokens(3, LENGTH)
    for implementation in implementations(model):
        for mask in (None, padding([0, 3, 6], LENGTH)):
            steps.clear()
            close(*both(model, ids, mask))
            taken = len(SIZES) - 1 if mask is None else 10  # until the sinks of the last row have left the window
            rebuilds = family in CLIPPED or implementation == "eager" and family in OWN_EAGER
            every = 0 if rebuilds else layers * taken
            assert len(steps) == every or family in OLD_WAYS and not steps


@pytest.mark.parametrize("bits", [None, 3])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Cohere", "Phi", "GptOss"])
def test_tiles_change_nothing(family, bits, monkeypatch, steps):
    model = compressed(base_model(family), truncated(RANK), rank=RANK, window=8, sinks=2, bits=bits, group=4)
    ids = tokens(2, 60)
    monkeypatch.setattr(cskv_decode, "CPU_TILE", 2 * 2 * 2 * 16 * 7)  # 7 tokens, or 4
    close(*both(model, ids, prompt=50))
    assert steps


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", ["Llama", "Phi", "Gemma3", "GptOss"])
def test_blocks_and_chunks_change_nothing(family, bits, monkeypatch, steps):
    """Steps before, at and after the end of a block, and rotations made a few tokens at a time."""
    model = compressed(base_model(family), truncated(RANK), rank=RANK, window=8, sinks=2, bits=bits, group=4)
    monkeypatch.setattr(cskv_positions, "CPU_CHUNK", 27)
    ids, end = tokens(2, 2 * BLOCK + 12), 2 * BLOCK + 8  # of the window behind the second block
    for mask in (None, padding([0, 3], ids.shape[1])):
        close(*both(model, ids, mask, prompt=end - 4))
    assert steps


@pytest.mark.parametrize("window, sinks", [(1, 0), (4, 0), (3, 6), (12, 5)])
@pytest.mark.parametrize("bits", [None, 4])
def test_any_window_and_sinks(window, sinks, bits, steps):
    model = cskv("Llama:bias", "low", window=window, sinks=sinks, bits=bits, group=min(4, window))
    for mask in (None, padding([0, 5], LENGTH), padding([4, 4], LENGTH)):
        close(*both(model, tokens(2, LENGTH), mask))
    assert steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("setting", ["low", "low, 4 bit"])
def test_other_precisions(dtype, setting, steps):
    model = copy.deepcopy(cskv("Llama:bias", setting)).to(dtype)
    got, expected = both(model, tokens(2, LENGTH))
    assert steps and got.dtype == dtype
    close(got, expected, tolerance=1e-5 if dtype == torch.float64 else 24 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_over_old_sink_and_window_tokens(kind, steps):
    """Any mask counts as it does in the simple path, and not only padding."""
    model, ids = cskv("Llama", "low"), tokens(2, LENGTH)
    logits, seen = [], torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    for row, column in [(0, 9), (0, 20), (1, 1), (1, 15)]:  # old, exact, a sink, old
        seen[row, 0, 0, column] = False
    if kind == "float":
        seen = torch.where(seen, torch.linspace(0, 2, LENGTH), torch.finfo(torch.float32).min)
    for path in (simple_path, torch.no_grad):
        cache = new_cache(model)
        decode(model, ids[:, :-1], [PROMPT] + [1] * (LENGTH - PROMPT - 1), cache)
        taken = len(steps)
        with path(), torch.no_grad():
            logits.append(run(model, ids[:, -1:], cache, seen, position_ids=torch.tensor([[LENGTH - 1]])))
        assert len(steps) - taken == (0 if path is simple_path else 4)
    close(*logits)
    with torch.no_grad():
        cache = new_cache(model)
        decode(model, ids[:, :-1], [PROMPT] + [1] * (LENGTH - PROMPT - 1), cache)
        assert (run(model, ids[:, -1:], cache) - logits[1]).abs().max() > 1e-2


def test_an_unknown_argument_of_attention_is_not_ignored(monkeypatch, steps):
    """What a `DecodeStep` has never heard of leads to the simple path."""
    model = copy.deepcopy(cskv("Llama", "low"))
    cache = new_cache(model)
    decode(model, tokens(1, PROMPT), [PROMPT], cache)
    with torch.no_grad():
        run(model, tokens(1, 1), cache, position_bias_of_tomorrow=torch.ones(1))
        assert not steps
        run(model, tokens(1, 1), cache)
    assert len(steps) == 4


def test_states_that_change_on_their_way_to_attention_are_rebuilt(steps):
    """A layer that scales what the cache gives it, before it attends."""
    model = copy.deepcopy(cskv("Llama", "low"))
    expected, _ = both(model, tokens(1, LENGTH))
    steps.clear()
    plain = type(model.model.layers[0].self_attn).base

    class Scaled(plain):
        def forward(self, *args, **kwargs):
            name = "cache" if "cache" in kwargs else "past_key_values"
            return plain.forward(self, *args, **{**kwargs, name: Doubled(kwargs[name])})

    Scaled.__module__ = plain.__module__
    for layer in model.model.layers:
        layer.self_attn.__class__ = cskv_attention.attention_class(Scaled)
        vars(layer.self_attn).pop("known_calls")
    got, simple = both(model, tokens(1, LENGTH))
    assert not steps and torch.equal(got, simple)
    assert (got - expected).abs().max() > 1e-2


class Doubled:
    def __init__(self, cache):
        self.cache = cache

    def update(self, *args, **kwargs):
        return tuple(2 * states for states in self.cache.update(*args, **kwargs))


def test_an_attention_function_of_its_own_is_not_replaced(monkeypatch, steps):
    import transformers.models.llama.modeling_llama as llama

    model = copy.deepcopy(cskv("Llama", "low"))
    model.set_attn_implementation("eager")
    cskv_decode._has_known_eager.cache_clear()
    plain = llama.eager_attention_forward

    def hotter(module, query, key, value, attention_mask, scaling, **kwargs):
        return plain(module, 2 * query, key, value, attention_mask, scaling, **kwargs)

    monkeypatch.setattr(llama, "eager_attention_forward", hotter)
    monkeypatch.setattr(cskv_decode, "EAGER_LIKE", ("gemma2", "gpt_oss"))
    got, expected = both(model, tokens(1, LENGTH))
    cskv_decode._has_known_eager.cache_clear()
    assert not steps and torch.equal(got, expected)


@pytest.mark.parametrize("how", ["output_attentions", "gradients", "training", "recording", "two tokens", "own mask"])
def test_where_the_history_is_rebuilt(how, steps):
    model = copy.deepcopy(cskv("Llama", "low"))
    model.set_attn_implementation("eager")
    cache, more, grad = new_cache(model), {}, how == "gradients"
    decode(model, tokens(1, PROMPT), [PROMPT], cache)
    if how == "output_attentions":
        more["output_attentions"] = True
    elif how == "training":
        model.train()
    elif how == "recording":
        cache.activate_past_recording()
    elif how == "own mask":
        more["mask"] = torch.zeros(1, 4, 1, PROMPT + 1)  # one for each head
    with torch.set_grad_enabled(grad):
        ids = tokens(1, 2 if how == "two tokens" else 1)
        kwargs = {"mask": None, **more}
        run(model, ids, cache, kwargs.pop("mask"), **kwargs)
    assert not steps


def test_attention_weights_are_those_of_the_base():
    ids, name = tokens(2, LENGTH), "output_attentions"
    weights = []
    for model in (cskv("Llama"), base("Llama")):
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
        cache = new_cache(model)
        decode(model, ids[:, :-1], [LENGTH - 1], cache)
        from cskv_cli.modeling.modeling_cskv import CACHE

        with torch.no_grad():
            weights.append(model(ids[:, -1:], **{CACHE: cache, name: True}).attentions)
    assert len(weights[0]) == 4 and all(map(close, *weights)) is not None


def test_a_cache_whose_layers_are_moved_away_after_each_update(monkeypatch, steps):
    """As with `offloading`: a step keeps what it must read."""
    model, ids = cskv("Llama", "low, 4 bit"), tokens(2, LENGTH)
    expected = decode(model, ids, SIZES)
    cache = new_cache(model)
    update = type(cache.layers[0]).update

    def update_and_leave(layer, *args, **kwargs):
        if hasattr(layer, "away"):
            layer.apply(lambda t: layer.away.pop(0))
        states = update(layer, *args, **kwargs)
        layer.away = []
        layer.apply(lambda t: layer.away.append(t) or torch.full_like(t, 255 if t.dtype == torch.uint8 else torch.nan))
        return states

    monkeypatch.setattr(type(cache.layers[0]), "update", update_and_leave)
    steps.clear()
    close(decode(model, ids, SIZES, cache), expected, tolerance=1e-6)
    assert steps


def test_hooked_projections_are_called(steps):
    """accelerate's hooks bring weights in as a module is called: they must be called, not read."""
    model, calls = copy.deepcopy(cskv("Llama", "low")), []
    decode(model, tokens(1, LENGTH), SIZES)
    steps.clear()
    for layer in model.model.layers:
        layer.self_attn.v_up._hf_hook = object()
        layer.self_attn.v_up.register_forward_hook(lambda *args: calls.append(1))
    decode(model, tokens(1, LENGTH), SIZES)
    assert calls and not steps


@pytest.mark.parametrize("way", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_latents_are_called(way, steps):
    """Each token goes through them once, with others that waited for it or alone."""
    model, calls = copy.deepcopy(cskv("Llama", "low")).bfloat16(), []
    for layer in model.model.layers:
        for part in ("k_down", "v_down"):
            getattr(getattr(layer.self_attn, part), way)(lambda module, *args: calls.append(args[0][0].shape[1]))
    decode(model, tokens(1, LENGTH), SIZES)
    made = sum(LENGTH - waiting("low", PROMPT, LENGTH, i) for i in range(len(model.model.layers)))
    assert steps and sum(calls) == 2 * made and max(calls[-8:]) == 8


def test_a_cache_made_in_inference_mode_goes_on_outside(steps):
    model, ids = cskv("Llama", "low, 4 bit"), tokens(2, LENGTH)
    expected, cache = decode(model, ids, SIZES), new_cache(model)
    with torch.inference_mode():
        decode(model, ids[:, :-4], SIZES[:-4], cache)
    close(decode(model, ids[:, -4:], [1] * 4, cache), expected[:, -4:])


def test_nothing_old_is_copied_for_a_token():
    model, cache = cskv("Llama", "low"), new_cache(cskv("Llama", "low"))
    decode(model, tokens(1, 100), [92, *[1] * 8], cache)  # room was made

    def places():
        return [
            [layer.exact.data_ptr(), *(store.recent.data_ptr() for store in layer.latents)] for layer in cache.layers
        ]

    before = places()
    decode(model, tokens(1, 20), [1] * 20, cache)
    assert places() == before


def test_layers_write_to_the_same_memory_and_give_it_back(monkeypatch, steps):
    model, taken, plain = cskv("Llama", "low"), [], Scratch.take
    cache = new_cache(model)

    def watched(scratch, name, *rest):
        got = plain(scratch, name, *rest)
        taken.append((name, got.data_ptr()))
        return got

    decode(model, tokens(2, LENGTH), SIZES, cache)
    monkeypatch.setattr(Scratch, "take", watched)
    decode(model, tokens(2, 1), [1], cache)
    names = [name for name, _ in taken]
    assert set(names) == {"keys", "turned keys"} and len({*taken}) == 2
    assert names.count("keys") == len(model.model.layers)
    assert reachable_bytes(cache.scratch) == 0


def test_a_step_leaves_no_trace_in_the_model():
    model = copy.deepcopy(cskv("Llama", "low"))
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    decode(model, tokens(1, LENGTH), SIZES)
    for name, module in model.named_modules():
        assert set(vars(module)) - names[name] <= {"known_calls", "known_forms", "plain", "rotates"}
        assert not [part for part in vars(module).values() if isinstance(part, nn.Module | DecodeStep)]
