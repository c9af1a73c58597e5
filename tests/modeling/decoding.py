"""What the tests of the cache share: forwards with a cache, and all that hangs on a cache."""

import functools

import torch
from torch import nn
from transformers import DynamicCache

from cskv_cli.modeling.modeling_cskv import CACHE, CSKVCache
from tests.families import base_model, compressed, truncated

WINDOW, SINKS, GROUP, RANK = 8, 2, 4, 12
SETTINGS = {
    "full": dict(),
    "low": dict(rank=RANK),
    "low, 4 bit": dict(rank=RANK, bits=4),
    "low, 3 bit": dict(rank=RANK, bits=3),
}
base = functools.cache(base_model)


@functools.cache
def cskv(family: str, setting: str = "full", **overrides):
    """The CSKV model of a family, in one of the settings above."""
    settings = dict(window=WINDOW, sinks=SINKS, group=GROUP) | SETTINGS[setting] | overrides
    return compressed(base(family), factors=truncated(settings["rank"]) if "rank" in settings else None, **settings)


def tokens(*shape, seed=0):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def padding(starts, length):
    """A mask for rows that begin at `starts`."""
    return (torch.arange(length) >= torch.tensor(starts)[:, None]).long()


def new_cache(model):
    return CSKVCache(model.config) if hasattr(model.config, "cskv") else DynamicCache(config=model.config)


def run(model, ids, cache, mask=None, **kwargs):
    """Logits of one forward on top of a cache; `mask` covers all tokens so far."""
    if mask is not None and mask.dim() == 2:
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, **{CACHE: cache}, **kwargs).logits


@torch.no_grad()
def decode(model, ids, sizes, cache=None, mask=None):
    """Logits of all tokens, given to a cache in chunks of these sizes. `mask` covers the cache's own tokens too."""
    cache = new_cache(model) if cache is None else cache
    past, logits = cache.get_seq_length(), []
    for chunk in ids.split(list(sizes), dim=1):
        past += chunk.shape[1]
        logits.append(run(model, chunk, cache, None if mask is None else mask[:, :past]))
    return torch.cat(logits, dim=1)


def reachable(thing, seen=None):
    """Everything that can be reached from an object through attributes and containers."""
    seen = {} if seen is None else seen
    if id(thing) in seen:
        return seen.values()
    seen[id(thing)] = thing
    if isinstance(thing, list | tuple | set):
        children = thing
    elif isinstance(thing, torch.Tensor | nn.Module | type):
        children = ()
    else:
        children = (thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})).values()
    for child in children:
        reachable(child, seen)
    return seen.values()


def held_tensors(cache):
    return [thing for thing in reachable(cache) if torch.is_tensor(thing)]


def held_bytes(cache):
    """Bytes that a cache keeps alive; a view counts with all that it is a view of."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held_tensors(cache)}
    return sum(storages.values())


def latent_bytes(count, setting):
    """Bytes of the latents of `count` tokens in one layer, keys and values."""
    bits = SETTINGS[setting].get("bits")
    if bits is None:
        return 2 * count * RANK * 4
    full, rest = count // GROUP * GROUP, count % GROUP
    keys = full // GROUP * RANK * (-(-GROUP * bits // 8) + 4)
    values = full * (-(-RANK * bits // 8) + 4)
    return keys + values + 2 * rest * RANK * 4


def waiting(setting, prompt, count, layer):
    """How many of `count` tokens, of which those after the prompt came one by one, have no latents in a layer yet."""
    made = [t for t in range(prompt + 1, count + 1) if (t + layer) % 8 == 0 or "bit" in setting and t % GROUP == 0]
    return count - max([prompt, *made])


def close(got, expected, tolerance=1e-4):
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
