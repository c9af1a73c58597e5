import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cskv_cli.data.self_sample import sample_from_model
from cskv_cli.errors import CskvError

BOS, EOS = 0, 1
KNOWN = 403


def tiny(vocab=KNOWN):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


def biased(model, favourites):
    """The model with a large logit for some tokens, whatever the text."""
    head = torch.nn.Linear(16, model.config.vocab_size)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    head.bias.data[list(favourites)] = 100.0
    model.lm_head = head
    return model


def sample(model, tokenizer, **kwargs):
    arguments = {"count": 6, "seq_len": 32, "seed": 1, "segment": 20, "batch_size": 4} | kwargs
    return sample_from_model(model, tokenizer, **arguments)


def test_shape_and_seed(tokenizer):
    model = tiny()
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first = sample(model, tokenizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.shape == (6, 32)
    assert first.dtype == torch.int64
    torch.manual_seed(8)
    assert torch.equal(sample(model, tokenizer), first)
    assert not torch.equal(sample(model, tokenizer, seed=2), first)
    assert len({tuple(row) for row in first.tolist()}) == 6


def test_texts_are_joined_by_eos(tokenizer):
    stream = sample(biased(tiny(), [50]), tokenizer).flatten()
    assert torch.equal((stream == EOS).nonzero().flatten(), torch.arange(20, len(stream), 21))
    firsts = stream[torch.arange(0, len(stream), 21)]
    assert (firsts[0::2] == 50).all()
    assert len(set(firsts[1::2].tolist())) > 2
    assert (firsts[1::2] > 2).all()
    rest = torch.ones(len(stream), dtype=torch.bool)
    rest[torch.arange(0, len(stream), 21)] = rest[torch.arange(20, len(stream), 21)] = False
    assert (stream[rest] == 50).all()


def test_eos_ends_a_text_not_the_sampling(tokenizer):
    stream = sample(biased(tiny(), [EOS]), tokenizer).flatten()
    ends = stream == EOS
    assert not (ends[1:] & ends[:-1]).any()
    assert ends.float().mean() > 0.4


def test_windows_begin_with_bos_if_texts_do(bos_tokenizer):
    ids = sample(biased(tiny(), [50]), bos_tokenizer)
    assert (ids[:, 0] == BOS).all()
    assert not (ids[:, 1:] == BOS).any()


@pytest.mark.parametrize("vocab", [512, 100])
def test_vocabulary_of_another_size(tokenizer, vocab):
    model = biased(tiny(vocab), range(90, vocab))
    ids = sample(model, tokenizer)
    assert ids.max() < min(KNOWN, vocab)


def test_the_models_generation_config_is_left_out_and_kept(tokenizer):
    model = tiny()
    first = sample(model, tokenizer)
    model.generation_config.update(top_k=1, repetition_penalty=9.0, eos_token_id=5, max_length=3)
    own = model.generation_config
    assert torch.equal(sample(model, tokenizer), first)
    assert model.generation_config is own


def test_progress(tokenizer):
    seen = []
    sample(tiny(), tokenizer, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_overflow(tokenizer):
    model = biased(tiny(), [50])
    model.lm_head.bias.data[60] = torch.nan
    with pytest.raises(CskvError, match="not finite"):
        sample(model, tokenizer)
