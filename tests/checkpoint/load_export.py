"""Run in an interpreter of its own, with torch and transformers only: loads a checkpoint and prints what it answers.

Arguments: folder, whether to trust remote code (1 or 0), prompts as JSON lists of ids, the pad id.
"""

import json
import sys

for name in ("cskv_cli", "accelerate", "datasets", "typer", "rich", "pydantic", "matplotlib", "gguf"):
    sys.modules[name] = None  # importing it now fails

import torch
import transformers
from transformers import AutoModelForCausalLM

folder, trust, prompts, pad = sys.argv[1], sys.argv[2] == "1", json.loads(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust).float().eval()
width = max(map(len, prompts))
ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
settings = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, pad_token_id=pad)
CACHE = (
    "cache"
    if hasattr(model.generate(ids, max_new_tokens=1, return_dict_in_generate=True), "cache")
    else "past_key_values"
)

greedy = model.generate(ids, attention_mask=mask, output_logits=True, **settings)
beams = model.generate(ids, attention_mask=mask, num_beams=3, **settings)
turn = torch.cat([greedy.sequences, ids.flip(1)], dim=1)
both = torch.cat([mask, torch.ones(len(ids), turn.shape[1] - width, dtype=torch.long)], dim=1)
second = model.generate(turn, attention_mask=both, **{CACHE: greedy[CACHE]}, **settings)
again = None
if len(sys.argv) > 5:
    model.save_pretrained(sys.argv[5])
    reloaded = AutoModelForCausalLM.from_pretrained(sys.argv[5], trust_remote_code=trust).float().eval()
    again = reloaded.generate(ids, attention_mask=mask, **settings).sequences.tolist()
print(
    json.dumps(
        {
            "transformers": transformers.__version__,
            "class": type(model).__name__,
            "cache": type(greedy[CACHE]).__name__,
            "greedy": greedy.sequences[:, width:].tolist(),
            "logits": torch.stack(greedy.logits).double().sum(-1).tolist(),
            "beams": beams.sequences[:, width:].tolist(),
            "second": second.sequences[:, turn.shape[1] :].tolist(),
            "again": [row[width:] for row in again] if again else None,
        }
    )
)
