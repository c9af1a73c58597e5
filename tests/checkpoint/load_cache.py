"""Run in an interpreter of its own, with torch and transformers only: reads documents once, or asks about them later.

Arguments: checkpoint, file of the cache, `read` (read the documents, save the cache, then ask) or `ask` (load it, then
ask), documents as JSON lists of ids (padded with 0 on the left), questions as a JSON list of lists of ids.
"""

import copy
import json
import sys

for name in ("cskv_cli", "accelerate", "datasets", "typer", "rich", "pydantic", "matplotlib", "gguf"):
    sys.modules[name] = None  # importing it now fails

import torch
import transformers
from transformers import AutoModelForCausalLM

folder, path, what, documents, questions = sys.argv[1:4] + [json.loads(each) for each in sys.argv[4:]]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
CACHE = "past_key_values" if transformers.__version__ < "5" else "cache"
width = max(map(len, documents))
ids = torch.tensor([[0] * (width - len(each)) + each for each in documents])
mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in documents])
if what == "read":
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1).past_key_values
    model.save_cache(cache, path)


def ask(question, cache, **kwargs):
    """Tokens and logits of the answers, one for each document."""
    asked = torch.cat([ids, torch.tensor([question] * len(ids))], dim=1)
    seen = torch.cat([mask, torch.ones(len(ids), len(question), dtype=torch.long)], dim=1)
    settings = dict(max_new_tokens=10, do_sample=False, return_dict_in_generate=True, output_logits=True)
    output = model.generate(asked, attention_mask=seen, pad_token_id=0, **settings, **{CACHE: cache}, **kwargs)
    return output.sequences[:, asked.shape[1] :].tolist(), torch.stack(output.logits).double().flatten().tolist()


answers = []
for question in questions:
    answers.append(ask(question, copy.deepcopy(cache) if what == "read" else model.load_cache(path)))
cache = cache if what == "read" else model.load_cache(path)
cache.batch_repeat_interleave(2)  # as transformers wants of a cache that is given to beams
beams = ask(questions[0], cache, num_beams=2)
print(json.dumps({"answers": answers, "beams": beams, "class": type(model.load_cache(path)).__name__}))
