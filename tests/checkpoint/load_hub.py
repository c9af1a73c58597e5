"""Run in an interpreter of its own, with torch and transformers only: loads a checkpoint from the Hub, by name.

Arguments: repository or folder, its revision or "". Prints the classes, and what the model and a pipeline answer.
"""

import json
import sys

for name in ("cskv_cli", "accelerate", "datasets", "typer", "rich", "pydantic", "matplotlib", "gguf"):
    sys.modules[name] = None  # importing it now fails

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

name, revision = sys.argv[1], sys.argv[2] or None
torch.set_num_threads(1)
pinned = {} if revision is None else {"revision": revision}
code = {} if revision is None else {"code_revision": revision}
text = " ".join(f"w{i}" for i in range(20))
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, **pinned, **code)
tokenizer = AutoTokenizer.from_pretrained(name, **pinned)
ids = tokenizer(text, return_tensors="pt").input_ids
settings = {"max_new_tokens": 12, "do_sample": False}
generate = pipeline("text-generation", model=name, trust_remote_code=True, model_kwargs=code, **pinned)
answer = model.generate(ids, pad_token_id=0, **settings)[0, ids.shape[1] :]
print(
    json.dumps(
        {
            "classes": [type(model).__name__, type(generate.model).__name__],
            "decoded": tokenizer.decode(answer, skip_special_tokens=True),
            "text": generate(text, return_full_text=False, **settings)[0]["generated_text"],
            "rank": model.config.cskv["rank_k"],
        }
    )
)
