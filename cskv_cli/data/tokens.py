"""From documents to one stream of tokens, and from the stream to windows."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# Documents beyond this many characters are tokenized in pieces: a token or two may differ where they meet.
_PIECE = 8_000_000


def leading_bos(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the BOS id if the tokenizer itself begins every text with it, else None."""
    ids = tokenizer("")["input_ids"]
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


def text_ids(tokenizer: "PreTrainedTokenizerBase", text: str, begin: bool = False) -> list[int]:
    """Token ids without special tokens; of a text that begins one, with the BOS that the tokenizer puts in front."""
    bos = leading_bos(tokenizer) if begin else None
    return [*([] if bos is None else [bos]), *tokenizer(text, add_special_tokens=False)["input_ids"]]


def token_stream(documents: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> "Iterator[torch.Tensor]":
    """Yield int64 tensors [n]: the documents' tokens, without special tokens but an EOS between two documents."""
    import torch

    for number, document in enumerate(documents):
        if number and tokenizer.eos_token_id is not None:
            yield torch.tensor([tokenizer.eos_token_id])
        for start in range(0, len(document), _PIECE):
            piece = document[start : start + _PIECE]
            # verbose=False: that the text is longer than the model's context is no news here.
            ids = tokenizer(piece, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
            yield torch.tensor(ids, dtype=torch.int64)


def text_length(seq_len: int, bos: int | None) -> int:
    """Tokens of text in a window of seq_len."""
    return seq_len - (bos is not None)


def cut(stream: "torch.Tensor", seq_len: int, bos: int | None) -> "torch.Tensor":
    """Cut a stream [n] into consecutive windows [samples, seq_len], each with `bos` in front; the rest is dropped."""
    import torch

    length = text_length(seq_len, bos)
    rows = stream[: len(stream) // length * length].view(-1, length)
    return rows if bos is None else torch.cat([rows.new_full((len(rows), 1), bos), rows], dim=1)
