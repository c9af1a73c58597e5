"""StreamingLLM and H2O against a decoder that knows nothing of caches; and never a token more than they claim."""

import pytest
import torch

from cskv_cli.evaluation import methods
from cskv_cli.evaluation.baselines.cache import received_attention
from cskv_cli.evaluation.baselines.eviction import FEWEST, capacity
from cskv_cli.evaluation.baselines.streaming_llm import SINKS
from cskv_cli.evaluation.held import held_bytes
from cskv_cli.modeling.modeling_cskv import CACHE
from tests.evaluation.baselines.reference import decode_with
from tests.families import base_model
from tests.modeling.decoding import padding, run, tokens

LENGTH = 60


def kept(seen, ratio):
    return min(seen, max(FEWEST, round(seen * (1 - ratio))))


def streaming(ratio):
    def choose(layer, head, step, history):
        recent = kept(step + 1, ratio) - SINKS
        return {j for j in range(step + 1) if j < SINKS or j > step - recent}

    return choose


def h2o(ratio, prompt):
    """The set that H2O's algorithm holds; one token in, at most one out, the one that got least and is not recent."""

    def evict(held, size, got):
        held = sorted(held)
        recent = size // 2
        old, new = held[: len(held) - recent], held[len(held) - recent :]
        return set(new) | set(sorted(old, key=lambda j: -got[j])[: size - len(new)])

    def choose(layer, head, step, history):
        if "held" not in history:
            history["held"] = evict(range(prompt), kept(prompt, ratio), history["got"])
        candidates, size = history["held"] | {step}, kept(step + 1, ratio)
        history["held"] = candidates if len(candidates) <= size else evict(candidates, size, history["got"])
        return history["held"]

    return choose


def decoded(method, ids, prompt, mask=None):
    """Logits of ids [rows, tokens], the first `prompt` at once, and the cache after each forward."""
    cache, logits = method.new_cache(), []
    with method.ready(), torch.no_grad():
        for start, stop in [(0, prompt)] + [(t, t + 1) for t in range(prompt, ids.shape[1])]:
            logits.append(run(method.model, ids[:, start:stop], cache, None if mask is None else mask[:, :stop]))
            yield torch.cat(logits, dim=1), cache, stop


def last(steps):
    *_, (logits, cache, _) = steps
    return logits, cache


@pytest.mark.parametrize("prompt", [1, 30])
@pytest.mark.parametrize("ratio", [0.5, 0.8])
@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_logits_are_those_of_the_reference(name, ratio, prompt):
    base = base_model("Llama")
    ids = tokens(1, LENGTH, seed=1)
    choose = streaming(ratio) if name == "streaming-llm" else h2o(ratio, prompt)
    expected = decode_with(base, ids[0], prompt, choose)
    logits, _ = last(decoded(methods.by_ratio(name, base, ratio), ids, prompt))
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    full = base(ids).logits[0]
    torch.testing.assert_close(logits[0, : max(prompt, FEWEST)], full[: max(prompt, FEWEST)], atol=1e-4, rtol=1e-4)
    assert (logits[0] - full).abs().max() > 0.05


@pytest.mark.parametrize("prompt", [1, 30])
@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_no_more_tokens_are_held_than_claimed_at_every_step(name, prompt):
    for ratio in (0, 0.5, 0.8, 0.95):
        method = methods.by_ratio(name, base_model("Llama"), ratio)
        seen = []

        def watch(attention, args, kwargs, output, ratio=ratio, seen=seen, prompt=prompt):
            layer = kwargs[CACHE].layers[attention.layer_idx]
            if layer.tokens > prompt:  # what attention has just read
                seen.append((layer.tokens, layer.keys.shape[2]))

        for block in method.model.model.layers:
            block.self_attn.register_forward_hook(watch, with_kwargs=True)
        for _, cache, stop in decoded(method, tokens(2, LENGTH), prompt):
            for layer in cache.layers:
                assert layer.keys.shape[2] == layer.values.shape[2] == kept(stop, ratio)
                assert layer.held.tolist() == [kept(stop, ratio)] * 2
        assert len(seen) == 4 * (LENGTH - prompt) and all(count == kept(total, ratio) for total, count in seen)


@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_rows_of_a_padded_batch_are_as_alone(name):
    method = methods.by_ratio(name, base_model("Llama"), 0.7)
    ids, starts = tokens(3, LENGTH, seed=2), [0, 13, 27]
    logits, _ = last(decoded(method, ids, 32, padding(starts, LENGTH)))
    for row, start in enumerate(starts):
        alone, _ = last(decoded(method, ids[row : row + 1, start:], 32 - start))
        torch.testing.assert_close(logits[row, start:], alone[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Qwen2", "Gemma3", "GptOss", "Phi3", "Cohere2", "Llama:dynamic"])
@pytest.mark.parametrize("name", ["streaming-llm", "h2o"])
def test_with_nothing_to_evict_any_base_gives_its_own_logits(family, name):
    base = base_model(family)
    ids = tokens(1, 14)
    logits, _ = last(decoded(methods.by_ratio(name, base, 0), ids, 6))
    with torch.no_grad():
        torch.testing.assert_close(logits, base(ids).logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name, scores", [("streaming-llm", 0), ("h2o", 4 * 2)])
def test_bytes_are_the_budgets(name, scores):
    method = methods.by_ratio(name, base_model("Llama"), 0.8)
    _, cache = last(decoded(method, tokens(1, 100), 99))
    held = 20 * (2 * 32 * 4 + scores) + 8  # 20 tokens of keys and values, and how many they are
    assert held_bytes(cache) == 4 * held
    assert method.token_bytes == pytest.approx(4 * 0.2 * (2 * 32 * 4 + scores))


def test_received_attention_counts_real_queries_and_averages_a_group():
    weights = torch.rand(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))  # 3 queries after 2 tokens
    received = received_attention(weights, 2, torch.tensor([0, 3]), past=2)
    for row, first in enumerate((0, 1)):  # in the second row the query at 2 is padding
        for head in range(2):
            expected = sum(weights[row, 2 * head + g, q] for g in range(2) for q in range(first, 3)) / 2
            torch.testing.assert_close(received[row, head], expected)


def test_capacity():
    assert capacity(torch.tensor([3, 8, 20, 50, 100, 1000]), 0.8).tolist() == [3, 8, 8, 10, 20, 200]
