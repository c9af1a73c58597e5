"""Ask an exported checkpoint, as a stranger would: with transformers alone.

python -m benchmarks.answer CHECKPOINT "QUESTION"
"""

import sys
import warnings

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.filterwarnings("ignore")


def main(checkpoint: str, question: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False, return_dict_in_generate=True)
    cache = output.get("cache", output.get("past_key_values"))
    answer = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"Q: {question}\nA: {answer}\n({type(model).__name__}, history kept in a {type(cache).__name__})")


if __name__ == "__main__":
    main(*sys.argv[1:])
