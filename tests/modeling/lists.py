"""What a CSKV cache of a Llama should give, from plain lists: no cache, every forward builds what it reads."""

from dataclasses import dataclass, replace

import torch

from tests.modeling.reference import heads


@dataclass
class Row:
    start: int  # tokens of padding before its first
    inputs: list[torch.Tensor]  # of each attention layer, for all tokens: [tokens, hidden]


class Lists:
    """Takes the operations of a `CSKVCache`, under the same names.

    Args:
        quantizers: of keys and values; None: not quantized.
    """

    def __init__(self, window, sinks, quantizers):
        self.window, self.sinks, self.quantizers = window, sinks, quantizers
        self.recording = False
        self.reset()

    def reset(self):
        self.rows, self.length = [], 0
        self.exact = 0  # last tokens whose exact keys and values have not been given up
        self.packed = 0  # first tokens whose latents are held as codes

    @torch.no_grad()
    def forward(self, model, ids, starts):
        """Logits [batch, new, vocabulary] of `ids` [batch, new]; those of padding are zero."""
        new = ids.shape[1]
        if not self.rows:
            empty = [torch.empty(0, model.config.hidden_size, dtype=model.dtype)] * len(model.model.layers)
            self.rows = [Row(0, empty) for _ in ids]
        if not self.length:
            visible = 0
        else:  # the window of the first new token holds the token itself
            visible = self.exact if self.recording else min(self.exact, self.window - 1)
        logits = []
        for i, (tokens, start) in enumerate(zip(ids, starts, strict=True)):
            self.rows[i], row_logits = self._row(model, self.rows[i], tokens, start, self.length - visible)
            logits.append(row_logits)
        self.exact = visible + new
        self.length += new
        if not self.recording:
            self._settle()
        return torch.stack(logits)

    def _settle(self):
        self.exact = min(self.exact, self.window)
        if self.quantizers is not None:
            self.packed = self.length // self.quantizers[0].group * self.quantizers[0].group

    def _row(self, model, row, ids, start, first_exact):
        """Tokens from `first_exact` on are exact, and so are the sinks."""
        past, total = len(row.inputs[0]), len(row.inputs[0]) + len(ids)
        every, new = torch.arange(total), torch.arange(past, total)
        exact = (every >= first_exact) | (every < start + self.sinks)
        seen = (every <= new[:, None]) & (every >= start)
        cos, sin = model.model.rotary_emb(row.inputs[0], (every - start).clamp(min=0)[None])
        hidden, inputs = model.model.embed_tokens(ids), []
        for layer, before in zip(model.model.layers, row.inputs, strict=True):
            attention, states = layer.self_attn, []
            inputs.append(torch.cat([before, layer.input_layernorm(hidden)]))
            for i, name in enumerate("kv"):
                full, down, up = (getattr(attention, f"{name}_{end}") for end in ("proj", "down", "up"))
                latents = self._as_held(down(inputs[-1]), start, i)
                states.append(heads(torch.where(exact[:, None], full(inputs[-1]), up(latents)), attention.head_dim))
            query = rotated(
                heads(attention.q_proj(inputs[-1][past:]), attention.head_dim), cos[0, past:], sin[0, past:]
            )
            keys, values = rotated(states[0], cos[0], sin[0]), states[1]
            keys, values = (s.repeat_interleave(len(query) // len(s), dim=0) for s in (keys, values))
            scores = (query @ keys.mT * attention.scaling).masked_fill(~seen, -torch.inf)
            read = scores.softmax(-1).nan_to_num() @ values  # padding sees nothing
            hidden = hidden + attention.o_proj(read.transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = model.lm_head(model.model.norm(hidden))
        return Row(start, inputs), logits * (new >= start)[:, None]

    def _as_held(self, latents, start, branch):
        """Latents as they can be read: of padding and sinks they are not, and so take no part in a group's range."""
        if not self.packed:
            return latents
        held = latents.clone()[None]
        held[:, :start] = 1e4
        held[:, : self.packed] = self.quantizers[branch].round_trip(held[:, : self.packed], start + self.sinks)
        return held[0]

    def crop(self, tokens_to_remove):
        left = self.length + tokens_to_remove
        if left < self.packed and left % self.quantizers[0].group:
            raise ValueError
        self.length, self.exact = left, max(self.exact + tokens_to_remove, 0)
        self.rows = [replace(row, inputs=[each[:left] for each in row.inputs]) for row in self.rows]
        self._settle()
        if not left:
            self.reset()

    def record_past_for_generate(self, wanted):
        if self.recording and not wanted:
            self._settle()
        self.recording = wanted

    def reorder_cache(self, rows):
        self.rows = [self.rows[i] for i in rows]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats):
        self.rows = [row for row in self.rows for _ in range(repeats)]


def rotated(states, cos, sin):
    half = states.shape[-1] // 2
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], dim=-1) * sin
