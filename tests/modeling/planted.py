"""Bugs to plant in a cache: a piece of a method's source, and what it is replaced by."""

import __future__

import inspect
import sys
import textwrap

from cskv_cli.modeling import cskv_file
from cskv_cli.modeling.cskv_cache import CSKVCache
from cskv_cli.modeling.cskv_latents import Latents
from cskv_cli.modeling.cskv_layer import CSKVLayer
from cskv_cli.modeling.cskv_positions import RotaryHistory, Rows

LEFT = "max(self.recent - self.window + 1, 0)"
BUGS = {
    "prefill: sinks one token late": (CSKVLayer._place_sinks, "arange(-self.sinks, 0", "arange(1 - self.sinks, 1"),
    "prefill: padding goes unseen": (Rows.see, "seen.int().argmax(-1)", "seen.int().argmax(-1) * 0"),
    "decode: a window too short": (CSKVLayer._add_one, LEFT, LEFT.replace("+ 1", "+ 2")),
    "decode: in the place of the last but one": (CSKVLayer._add_one, "past % self.window", "(past - 1) % self.window"),
    "prefill: the window in order": (CSKVLayer.hold, "-self.oldest(self.get_seq_length()) % self.window", "0"),
    "chunk: the window as it is": (CSKVLayer.update, "self.in_order()", "self.exact"),
    "crop: the window as it is": (CSKVLayer.crop, "self.in_order()", "self.exact"),
    "save: the window as it is": (cskv_file._tensors, "layer.in_order()", "layer.exact"),
    "load: the window in order": (cskv_file._fill, 'layer.hold(own.pop("exact"))', "pass"),
    "decode: new room without the old": (Latents._grow, "self._tokens_first()[:, : self._count] = old", "pass"),
    "decode: nothing is packed": (CSKVLayer.update, "self._pack()", "pass"),
    "chunk: a window too long": (CSKVLayer.update, LEFT, LEFT.replace("+ 1", "")),
    "chunk: sinks stay rebuilt": (
        CSKVLayer._place_sinks,
        "all_of_them.scatter_(2, place.expand_as(sinks), sinks)",
        "pass",
    ),
    "crop: latents of the wrong end": (
        Latents.crop,
        "self.recent[:, : length - self.quantized_tokens]",
        "self.recent[:, self._count - length + self.quantized_tokens :]",
    ),
    "crop: one exact token too many": (
        CSKVLayer.crop,
        "self.recent - (past - length)",
        "self.recent - (past - length - 1)",
    ),
    "crop: positions stay": (CSKVCache.crop, "t[:, :length].clone()", "t"),
    "crop: codes stay": (Latents.crop, "part[:, : length // self.quantizer.group].clone()", "part"),
    "reorder: values stay": (CSKVLayer.apply, "for store in self.latents", "for store in self.latents[:1]"),
    "reorder: codes stay": (Latents.apply, "map(fn, self.packed)", "self.packed"),
    "reorder: positions stay": (CSKVCache.reorder_cache, "index_select(0, beam_idx.to(t.device))", "clone()"),
    "repeat: rows in turns": (
        CSKVLayer.batch_repeat_interleave,
        "t.repeat_interleave(repeats, dim=0)",
        "torch.cat([t] * repeats)",
    ),
    "repeat: keys for values": (CSKVLayer.apply, "fn(self.exact)", "fn(self.exact)[:, :1].repeat(1, 2, 1, 1, 1)"),
    "reorder: what waits stays": (CSKVLayer.apply, "fn(hidden) for hidden", "fn(hidden[:1]) for hidden"),
    "crop: what waits stays": (CSKVLayer.crop, "self.waiting[: max(", "self.waiting[: self.late + max("),
    "decode: latents of the last that waited only": (
        CSKVLayer._add_hidden,
        "torch.cat(self.waiting, dim=1)",
        "hidden.expand(-1, self.late, -1)",
    ),
    "decode: a complete group waits": (CSKVLayer._may_wait, "total % self.group == 0", "False"),
    "select: the first rows' positions": (
        CSKVCache.batch_select_indices,
        "t[indices]",
        "t[torch.arange(len(indices)) % len(t)]",
    ),
    "select: the first rows": (CSKVLayer.batch_select_indices, "t[indices]", "t[torch.arange(len(indices)) % len(t)]"),
    "deepcopy: the storage is shared": (Latents, lambda self, memo: self.as_it_is()),
    "deepcopy: positions are shared": (RotaryHistory, lambda self, memo: self),
    "save: no tail": (Latents.tensors, "self.recent}", "self.recent.roll(1, 1)}"),
    "load: keys for values": (cskv_file._fill, 'zip("kv"', 'zip("vk"'),
    "load: lengths and recorded pasts are not": (cskv_file._fill, "own | state", "own"),
    "reset: positions stay": (CSKVCache.reset, "rotary.reset()", "pass"),
    "reset: latents of keys stay": (
        CSKVLayer.reset,
        "Latents(self.quantizers[0], tokens_last=True)",
        "getattr(self, 'latents', [Latents(self.quantizers[0], tokens_last=True)])[0]",
    ),
    "record: nothing is let go of": (CSKVCache.record_past_for_generate, "layer.crop(0)", "pass"),
}


def plant(monkeypatch, bug):
    """Put it in, until the test is over."""
    target, *change = BUGS[bug]
    if inspect.isclass(target):
        monkeypatch.setattr(target, "__deepcopy__", change[0], raising=False)
        return
    source, (old, new) = textwrap.dedent(inspect.getsource(target)), change
    assert source.count(old) == 1, f"{target.__qualname__} has changed: plant another bug"
    module, *owner = sys.modules[target.__module__], *target.__qualname__.split(".")[:-1]
    scope = dict(vars(module))
    source = source.replace(old, new).replace("super()", f"super({owner[0] if owner else ''}, self)")
    exec(compile(source, target.__name__, "exec", __future__.annotations.compiler_flag), scope)
    monkeypatch.setattr(getattr(module, owner[0]) if owner else module, target.__name__, scope[target.__name__])
