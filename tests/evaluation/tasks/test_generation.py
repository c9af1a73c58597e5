"""Prompts as tokens, cut where they are too long, and answers as `generate` gives them."""

import pytest
import torch
from transformers import GenerationConfig

from cskv_cli.errors import CskvError
from cskv_cli.evaluation.methods import cskv, full
from cskv_cli.evaluation.tasks.generation import Question, answer_all, prompt_tokens, summarize
from cskv_cli.progress import SILENT
from tests.families import base_model, compressed, truncated

TEMPLATE = "{% for m in messages %}w88 {{ m['content'] }} w89 {% endfor %}{% if add_generation_prompt %}w87{% endif %}"


def words(*numbers):
    return " ".join(f"w{n}" for n in numbers)


def question(prompt, **more):
    return Question("part", prompt, len, **({"answer_tokens": 5} | more))


@pytest.fixture
def chatty(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    return tokenizer


def test_the_chat_template_is_used_where_there_is_one_and_it_is_wanted(chatty):
    plain = [3 + n for n in (1, 2)]
    wrapped = [91, *plain, 92, 90]
    assert prompt_tokens(question(words(1, 2)), chatty, 99, chat=True) == (wrapped, False)
    assert prompt_tokens(question(words(1, 2)), chatty, 99, chat=False) == (plain, False)
    assert prompt_tokens(question(words(1, 2), chat=False), chatty, 99, chat=True) == (plain, False)


@pytest.mark.parametrize("room", [30, 31, 40])
def test_a_long_prompt_loses_its_middle_and_fits(tokenizer, room):
    ids, cut = prompt_tokens(question(words(*range(80))), tokenizer, room, chat=True)
    half = room // 2
    assert cut and ids == [*range(3, 2 + half), 2, *range(84 - half, 83)]  # where the halves meet, two words are one


def test_a_long_chat_keeps_its_template(chatty):
    ids, cut = prompt_tokens(question(words(*range(80))), chatty, 23, chat=True)
    assert cut and ids[0] == 91 and ids[-2:] == [92, 90]
    assert ids[1] == 3 and ids[-3] == 82 and 20 <= len(ids) <= 23


def test_no_room_at_all_is_said(tokenizer):
    with pytest.raises(CskvError, match="no prompt fits in 1 tokens"):
        prompt_tokens(question(words(1, 2, 3)), tokenizer, 1, chat=False)


def test_answers_are_those_of_generate(tokenizer):
    base = base_model("Llama")
    model = compressed(base, truncated(9), rank=9, window=8, sinks=2)
    model.generation_config = base.generation_config = GenerationConfig(eos_token_id=[50, 60], pad_token_id=0)
    heard = []
    prompts = [words(*range(n, n + 30)) for n in range(8)]
    questions = [question(p, answer_tokens=20) for p in prompts]
    questions = [Question("part", q.prompt, lambda text: heard.append(text) or 1.0, 20) for q in questions]
    outcomes, cut = answer_all([full(model), cskv(model)], tokenizer, questions, False, None, SILENT)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        for each in (base, model):
            tokens = each.generate(ids, do_sample=False, max_new_tokens=20)[0, 30:]
            expected.append(tokenizer.decode(tokens, skip_special_tokens=True))
    assert heard == expected and cut == 0
    assert heard[::2] != heard[1::2] and len({len(text.split()) for text in heard}) > 1  # some end early
    assert outcomes[0].held_bytes == 1024 > outcomes[1].held_bytes


def test_prompts_beyond_the_context_are_cut_and_counted(tokenizer):
    model = base_model("Llama", max_position_embeddings=40)
    questions = [question(words(*range(n))) for n in (30, 35, 36, 60)]
    outcomes, cut = answer_all([full(model)], tokenizer, questions, False, None, SILENT)
    assert cut == 2 and len(outcomes[0].scores) == 4
    assert answer_all([full(model)], tokenizer, questions, False, 20, SILENT)[1] == 4


def test_summary_is_the_mean_of_the_parts():
    summary = summarize([1, 0, 0, 0.5], ["a", "a", "a", "b"], ["0-4k", "8k+", "8k+", ""])
    assert summary["score"] == pytest.approx((1 / 3 + 0.5) / 2)
    assert summary["parts"]["a"] == {"score": pytest.approx(1 / 3), "cases": 3, "by_length": {"0-4k": 1, "8k+": 0}}
    assert summary["parts"]["b"] == {"score": 0.5, "cases": 1}
    assert summary["by_length"] == {"0-4k": 1, "8k+": 0}
    summary = summarize([1, 0, 0.5], ["a", "a", "b"], ["0-4k", "8k+", "0-4k"])
    assert summary["by_length"] == {"0-4k": 0.75, "8k+": 0}
    assert "by_length" not in summarize([1], ["a"], [""])
