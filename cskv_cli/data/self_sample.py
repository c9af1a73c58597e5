"""Calibration text drawn from the model itself: no data needed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from cskv_cli.data.tokens import cut, leading_bos, text_length
from cskv_cli.errors import CskvError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def sample_from_model(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    *,
    count: int,
    seq_len: int,
    seed: int,
    segment: int = 512,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> torch.LongTensor:
    """Sample windows [count, seq_len], int64, on the CPU, from the model's own distribution (temperature 1).

    Texts of `segment` tokens are sampled, half of them from a random first token, joined by EOS and cut into windows
    as documents are: quicker and more varied than count texts of seq_len. The global random state is left alone.

    Args:
        progress: called with (texts done, texts in all) after each batch.

    Raises:
        CskvError: the model's logits are not finite.
    """
    bos = leading_bos(tokenizer)
    texts = -(-count * text_length(seq_len, bos) // segment)
    rules = _SamplingRules(model, tokenizer)
    parts: list[torch.Tensor] = []
    with _seeded(model, seed), _plain_generation(model):
        for done in range(0, texts, batch_size):
            batch = _sample_batch(model, tokenizer, rules, min(batch_size, texts - done), segment)
            parts += _joined(batch, tokenizer.eos_token_id)
            if progress:
                progress(done + len(batch), texts)
    return cut(torch.cat(parts), seq_len, bos)[:count]


class _SamplingRules(LogitsProcessor):
    """Draw only ids that the tokenizer knows, and no special token twice in a row (some models repeat EOS for ever).

    No text begins with EOS; every other one begins with any ordinary token, for variety.
    """

    def __init__(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        size = model.get_input_embeddings().weight.shape[0]
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.known = _mask(size, tokenizer.get_vocab().values()).to(model.device)
        self.special = _mask(size, special).to(model.device)
        self.ordinary = self.known & ~self.special
        self.opening = self.known & ~_mask(size, [tokenizer.eos_token_id]).to(model.device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not (scores < torch.inf).all():
            raise CskvError("self: the model's logits are not finite", "load it in another dtype: --dtype float32")
        size = scores.shape[-1]
        first = input_ids.shape[1] == 1
        allowed = self.opening if first else self.known
        scores = scores.masked_fill(~allowed[:size], -torch.inf)
        last = input_ids[:, -1:]
        again = torch.where(self.special[last], -torch.inf, scores.gather(1, last))
        scores = scores.scatter(1, last, again)
        if first:
            scores[1::2] = torch.where(self.ordinary[:size], 0.0, -torch.inf).to(scores.dtype)
        return scores


def _mask(size: int, ids: Iterable[int | None]) -> torch.BoolTensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[[index for index in ids if index is not None and 0 <= index < size]] = True
    return mask


def _sample_batch(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rules: _SamplingRules, rows: int, segment: int
) -> torch.Tensor:
    """Sample texts [rows, segment]."""
    start = _first_tokens(tokenizer, rules, rows).to(model.device)
    ids = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        generation_config=GenerationConfig(do_sample=True, top_k=0, max_new_tokens=segment),
        logits_processor=LogitsProcessorList([rules]),
    )
    return ids[:, 1:].cpu()


def _first_tokens(tokenizer: "PreTrainedTokenizerBase", rules: _SamplingRules, rows: int) -> torch.LongTensor:
    """What each text is sampled from, [rows, 1]: BOS, or what ends the text before, or any ordinary token."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None and token < len(rules.known):
            return torch.full((rows, 1), token)
    choices = rules.ordinary.cpu().nonzero()
    return choices[torch.randint(len(choices), (rows,))]


def _joined(texts: torch.Tensor, eos: int | None) -> list[torch.Tensor]:
    end = torch.tensor([] if eos is None else [eos], dtype=torch.int64)
    return [part for text in texts for part in ((text,) if text[-1] == eos else (text, end))]


@contextmanager
def _seeded(model: "PreTrainedModel", seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _plain_generation(model: "PreTrainedModel") -> Iterator[None]:
    # What generate is not told it takes from here: penalties, top-k, an EOS to stop at.
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
