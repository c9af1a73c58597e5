"""What the factors are trained on: windows of text, and windows that only a look far back predicts."""

import random

import torch
from transformers import PreTrainedTokenizerBase

from cskv_cli.data.recall import Window, lookup_window, quote_window
from cskv_cli.errors import CskvError

HELD_OUT_TEXT, HELD_OUT_RECALL = 5, 4
QUOTES = 0.2  # of the windows that are not plain text
_HELD_OUT = 1 << 40  # numbers of the held-out windows: no step comes there


class Stream:
    """Training windows by number, always the same ones for the same seed, and the held-out part.

    Args:
        texts: [windows, seq_len]; the first are held out, the others come in a new order in every epoch.
        recall_share: share of the training windows that are lists or quotes, spread evenly.
    """

    def __init__(self, texts: torch.Tensor, tokenizer: PreTrainedTokenizerBase, recall_share: float, seed: int) -> None:
        self._held_out, self._texts = texts[:HELD_OUT_TEXT], texts[HELD_OUT_TEXT:]
        if not len(self._texts):
            raise CskvError(
                f"{len(texts)} windows of text are too few to train on: {HELD_OUT_TEXT} of them are held out",
                "give more text (--data), or a smaller --seq-len",
            )
        self._tokenizer, self._share, self._seed = tokenizer, recall_share, seed

    def window(self, number: int) -> Window:
        """Training window `number`, from 0."""
        recalled = int((number + 1) * self._share)
        if recalled > int(number * self._share):
            return self._recall(number, self._texts)
        epoch, index = divmod(number - recalled, len(self._texts))
        order = torch.randperm(len(self._texts), generator=torch.Generator().manual_seed(self._seed * 10_000 + epoch))
        return text_window(self._texts[order[index]])

    def held_out(self) -> tuple[list[Window], list[Window]]:
        """Windows of text that are never trained on, and lists and quotes that are made of other numbers."""
        recall = [self._recall(_HELD_OUT + i, self._held_out) for i in range(HELD_OUT_RECALL if self._share else 0)]
        return [text_window(text) for text in self._held_out], recall

    def _recall(self, number: int, texts: torch.Tensor) -> Window:
        generator = random.Random(f"{self._seed} {number}")
        if generator.random() < QUOTES:
            return quote_window(self._tokenizer, texts[generator.randrange(len(texts))], generator)
        return lookup_window(self._tokenizer, texts.shape[1], generator)


def text_window(ids: torch.Tensor) -> Window:
    """Plain text, every token of it decoded."""
    return Window(ids, 0, torch.ones(len(ids) - 1, dtype=torch.bool))


def windows_needed(windows: int, recall_share: float) -> int:
    """Windows of text for that many training windows in one epoch, and for the held-out part."""
    return HELD_OUT_TEXT + windows - int(windows * recall_share)
