"""Run in an interpreter of its own, with torch and transformers only: loads checkpoints and prints what they answer.

The argument is JSON: `prompts` as lists of ids, the id to `pad` with, and `models`: name -> `folder`, whether to
`trust` its code, and where to `save` it again, if at all.
"""

import json
import sys

for name in ("cskv_cli", "accelerate", "datasets", "typer", "rich", "pydantic", "matplotlib", "gguf"):
    sys.modules[name] = None  # importing it now fails

import torch
import transformers
from transformers import AutoModelForCausalLM

NEW = 12
task = json.loads(sys.argv[1])
prompts, pad = task["prompts"], task["pad"]
torch.set_num_threads(1)
width = max(map(len, prompts))
ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
settings = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, pad_token_id=pad)


def load(folder, trust):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust).float().eval()


def answers(folder, trust, save=None):
    model = load(folder, trust)
    greedy = model.generate(ids, attention_mask=mask, output_logits=True, **settings)
    cache = "cache" if "cache" in greedy else "past_key_values"
    beams = model.generate(ids, attention_mask=mask, num_beams=3, **settings)
    turn = torch.cat([greedy.sequences, ids.flip(1)], dim=1)
    both = torch.cat([mask, torch.ones(len(ids), turn.shape[1] - width, dtype=torch.long)], dim=1)
    kind = type(greedy[cache]).__name__
    second = model.generate(turn, attention_mask=both, **{cache: greedy[cache]}, **settings)
    found = {
        "class": type(model).__name__,
        "cache": kind,
        "greedy": greedy.sequences[:, width:].tolist(),
        "logits": torch.stack(greedy.logits, dim=1)[..., :100].tolist(),  # all of a tiny model's
        "beams": beams.sequences[:, width:].tolist(),
        "second": second.sequences[:, turn.shape[1] :].tolist(),
    }
    if save is not None:
        model.save_pretrained(save)
        again = load(save, trust).generate(ids, attention_mask=mask, **settings).sequences
        found["again"] = again[:, width:].tolist()
    return found


found = {name: answers(**model) for name, model in task["models"].items()}
print(json.dumps({"transformers": transformers.__version__, "models": found}))
