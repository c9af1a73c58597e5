"""An independent decoder for one row of a tiny Llama whose every step says which tokens each key head may see."""

import torch

from tests.modeling.reference import heads, rope


@torch.no_grad()
def decode_with(model, ids, prompt, choose, change=lambda layer, what, states, step: states):
    """Logits [tokens, vocabulary] of ids [tokens]: the first `prompt` at once, exactly; then one at a time.

    Args:
        choose: `(layer, head, step, history) -> ` indices that the token at `step` sees, itself among them; `history`
            is a dict of its own for each layer and head, where `history["got"]` is what each token has got of
            attention so far, [tokens].
        change: `(layer, "k" or "v", states [heads, tokens, head_dim], step) -> ` what is read in their place.
    """
    width, layers = model.config.head_dim, model.model.layers
    caches = [{"k": torch.empty(2, 0, width), "v": torch.empty(2, 0, width)} for _ in layers]
    histories = [[{"got": torch.zeros(len(ids))} for _ in range(2)] for _ in layers]
    logits = []
    for start, stop in [(0, prompt)] + [(t, t + 1) for t in range(prompt, len(ids))]:
        hidden, new = model.model.embed_tokens(ids[start:stop]), torch.arange(start, stop)
        for i, layer in enumerate(layers):
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            query = rope(heads(attention.q_proj(x), width), new)
            caches[i]["k"] = torch.cat([caches[i]["k"], rope(heads(attention.k_proj(x), width), new)], dim=1)
            caches[i]["v"] = torch.cat([caches[i]["v"], heads(attention.v_proj(x), width)], dim=1)
            read = {what: change(i, what, caches[i][what], start) if start else caches[i][what] for what in "kv"}
            outputs = []
            for head in range(2):
                history = histories[i][head]
                allowed = torch.arange(stop)
                if start:
                    allowed = torch.tensor(sorted(choose(i, head, start, history)))
                scores = query[2 * head : 2 * head + 2] @ read["k"][head, allowed].T / width**0.5
                scores = scores.masked_fill(allowed > new[:, None], -torch.inf).softmax(-1)
                history["got"].index_add_(0, allowed, scores.sum(1).mean(0))
                outputs.append(scores @ read["v"][head, allowed])
            hidden = hidden + attention.o_proj(torch.cat(outputs).transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits.append(model.lm_head(model.model.norm(hidden)))
    return torch.cat(logits)
