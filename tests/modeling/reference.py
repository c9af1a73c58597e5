"""An independent CSKV decoder for one row of a Llama: no cache, every step builds what it reads from hidden states."""

import torch


def rope(states, positions):
    """Llama's rotation of [heads, tokens, head_dim]."""
    half = states.shape[-1] // 2
    angles = positions[:, None] / 10000.0 ** (torch.arange(half) / half)
    a, b = states[..., :half], states[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def heads(projected, head_dim):
    return projected.unflatten(-1, (-1, head_dim)).transpose(0, 1)


@torch.no_grad()
def reference_logits(model, ids, prompt, quantizers=(None, None), pad=0):
    """Logits [tokens, vocabulary] of `ids` [tokens]: the first `prompt` at once, then one at a time.

    `pad` tokens before them only move the borders of the groups that `quantizers` (keys, values) see.
    """
    window, sinks = model.config.cskv["window"], model.config.cskv["sinks"]
    inputs = [torch.empty(0, model.config.hidden_size, dtype=model.dtype) for _ in model.model.layers]
    logits = []
    for start, stop in [(0, prompt)] + [(t, t + 1) for t in range(prompt, len(ids))]:
        new, every = torch.arange(start, stop), torch.arange(stop)
        exact = (every < sinks) | (every > start - window) if start else every >= 0
        hidden = model.model.embed_tokens(ids[start:stop])
        for i, layer in enumerate(model.model.layers):
            attention, width = layer.self_attn, layer.self_attn.head_dim
            inputs[i] = torch.cat([inputs[i], layer.input_layernorm(hidden)])
            states = []
            for name, quantizer in zip("kv", quantizers, strict=True):
                full, down, up = (getattr(attention, f"{name}_{end}") for end in ("proj", "down", "up"))
                latents = down(inputs[i])
                if quantizer is not None and (packed := (pad + start) // quantizer.group * quantizer.group) > pad:
                    padded = torch.cat([torch.full((pad, latents.shape[1]), 1e4, dtype=latents.dtype), latents])[None]
                    padded[:, :packed] = quantizer.round_trip(padded[:, :packed], pad + sinks)
                    latents = padded[0, pad:]
                states.append(heads(torch.where(exact[:, None], full(inputs[i]), up(latents)), width))
            query = rope(heads(attention.q_proj(inputs[i][start:]), width), new)
            keys, values = rope(states[0], every), states[1]
            keys, values = (s.repeat_interleave(len(query) // len(s), dim=0) for s in (keys, values))
            scores = query @ keys.mT / width**0.5
            scores = scores.masked_fill(every > new[:, None], -torch.inf).softmax(-1)
            hidden = hidden + attention.o_proj((scores @ values).transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits.append(model.lm_head(model.model.norm(hidden)))
    return torch.cat(logits)
