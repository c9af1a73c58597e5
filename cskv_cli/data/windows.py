"""Token windows for calibration and evaluation: nothing repeats, nothing is padded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cskv_cli.data.sources import Source, read_documents
from cskv_cli.data.tokens import cut, leading_bos, text_length, token_stream
from cskv_cli.errors import CskvError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# Windows read for each one that is drawn, and tokens read of local text in any case, where the source has them:
# a fair choice without reading the whole of a huge source.
_CHOICE = 4
_LOCAL_TOKENS = 4_000_000


@dataclass(frozen=True)
class Windows:
    """Windows of tokens.

    `ids` is int64 [samples, seq_len]; `counts` has the windows of each source, by its label; `notes` are lines for the
    user where there was less text than was asked for.
    """

    ids: "torch.LongTensor"
    counts: dict[str, int]
    notes: tuple[str, ...]


def calibration_windows(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    samples: int,
    seq_len: int,
    seed: int,
    generate: "Callable[[int, int, int], torch.LongTensor] | None" = None,
) -> Windows:
    """Draw `samples` windows from the sources, shared by weight, in a random order; the same ones for the same seed.

    A source that is too short gives what it has, and the others give more.

    Args:
        generate: `(count, seq_len, seed) -> ids [count, seq_len]`, called for a `self` source.

    Raises:
        CskvError: there is not one window, a source is given twice, or text cannot be read.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    bos = leading_bos(tokenizer)
    pools = _pools(sources, tokenizer, text_length(seq_len, bos), shuffle=seed)

    def holds(index: int, share: int) -> int:
        if sources[index].kind == "self":
            return share
        local = sources[index].kind in ("file", "folder")
        return pools[index].read(_CHOICE * share, tokens=_LOCAL_TOKENS if local and share else 0)

    def take(index: int, count: int) -> "torch.Tensor":
        if sources[index].kind != "self":
            rows = cut(pools[index].stream(), seq_len, bos)
            return rows[torch.randperm(len(rows), generator=generator)[:count]]
        if generate is None:
            raise ValueError("a 'self' source needs generate")
        return generate(count, seq_len, seed)

    windows = _collect(sources, pools, samples, seq_len, holds, take)
    order = torch.randperm(len(windows.ids), generator=generator)
    return Windows(windows.ids[order], windows.counts, windows.notes)


def evaluation_windows(
    sources: Sequence[Source], tokenizer: "PreTrainedTokenizerBase", *, samples: int, seq_len: int
) -> Windows:
    """Take the first `samples` consecutive windows, source by source, shared by weight; of `builtin` its held-out part.

    Raises:
        CskvError: as `calibration_windows`, or a source is `self`.
    """
    if any(source.kind == "self" for source in sources):
        raise CskvError("self: a model is not evaluated on its own text", "give a file, a data set id or builtin")
    bos = leading_bos(tokenizer)
    pools = _pools(sources, tokenizer, text_length(seq_len, bos), shuffle=None, held_out=True)
    return _collect(
        sources,
        pools,
        samples,
        seq_len,
        holds=lambda index, share: pools[index].read(share),
        take=lambda index, count: cut(pools[index].stream(), seq_len, bos)[:count],
    )


class _Pool:
    """The tokens read so far from one source."""

    def __init__(self, pieces: "Iterator[torch.Tensor]", length: int) -> None:
        self._pieces = pieces
        self._length = length
        self._read: list[torch.Tensor] = []
        self.tokens = 0

    def read(self, windows: int, tokens: int = 0) -> int:
        """Read on until there are so many windows and tokens, or no more; return the windows there are."""
        while self.tokens < max(windows * self._length, tokens):
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._read.append(piece)
            self.tokens += len(piece)
        return self.tokens // self._length

    def stream(self) -> "torch.Tensor":
        import torch

        return torch.cat(self._read)


def _pools(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerBase",
    length: int,
    shuffle: int | None,
    held_out: bool = False,
) -> list[_Pool]:
    labels = [source.label for source in sources]
    for label in labels:
        if labels.count(label) > 1:
            raise CskvError(f"{label} is given twice", f"give it once, with a weight: {label}@2")
    documents = [read_documents(source, shuffle=shuffle, held_out=held_out) for source in sources]
    return [_Pool(token_stream(texts, tokenizer), length) for texts in documents]


def _collect(
    sources: Sequence[Source],
    pools: Sequence[_Pool],
    samples: int,
    seq_len: int,
    holds: Callable[[int, int], int],
    take: "Callable[[int, int], torch.Tensor]",
) -> Windows:
    import torch

    counts, short = settle(samples, [source.weight for source in sources], holds)
    labels = [source.label for source in sources]
    if not sum(counts):
        longest = max(pool.tokens for pool in pools)
        raise CskvError(
            f"{', '.join(labels)}: {longest} tokens are no window of {seq_len}",
            f"give more text, or a --seq-len of at most {longest}",
        )
    notes = [
        f"{labels[index]} holds {counts[index]} windows of {seq_len} tokens, {asked} were asked for"
        for index, asked in short.items()
    ]
    if len(sources) > 1 and sum(counts) < samples:
        notes.append(f"{sum(counts)} windows in all, {samples} were asked for")
    ids = torch.cat([take(index, count) for index, count in enumerate(counts) if count])
    return Windows(ids, dict(zip(labels, counts, strict=True)), tuple(notes))


def settle(
    samples: int, weights: Sequence[float], holds: Callable[[int, int], int]
) -> tuple[list[int], dict[int, int]]:
    """Share `samples` by weight between sources of which some hold less than their share.

    Args:
        holds: `(index, share) -> ` what the source has, if that is less than the share, or at least the share.

    Returns:
        the count of each source, and of each short one (by index) the share it could not give.
    """
    counts = [0] * len(weights)
    short: dict[int, int] = {}
    open_ = list(range(len(weights)))
    while open_:
        rest = samples - sum(counts[index] for index in short)
        shares = dict(zip(open_, largest_remainder(rest, [weights[index] for index in open_]), strict=True))
        counts = [shares.get(index, count) for index, count in enumerate(counts)]
        lacking = {index: have for index, share in shares.items() if (have := holds(index, share)) < share}
        if not lacking:
            break
        for index, have in lacking.items():
            counts[index] = have
            short[index] = shares[index]
            open_.remove(index)
    return counts, short


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` into whole parts by weight that add up exactly."""
    quotas = [total * weight / sum(weights) for weight in weights]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda index: parts[index] - quotas[index])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts
