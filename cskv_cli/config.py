"""One frozen config per stage: the source of its flags, its recipe keys and its manifest."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Bits = Literal[2, 3, 4, 8]


def parse_size(text: str) -> int:
    """Bytes that `5GB`, `2 GiB` or `1e9` stand for.

    Raises:
        ValueError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = match and int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if not size:
        raise ValueError(f"{text!r} is not a size: write 500MB, 5GB or 2GiB")
    return size


class StageConfig(BaseModel):
    """Settings of one stage. Unknown keys are refused, so that a misspelt recipe key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _one_or_several(data: Any) -> Any:
    return (data,) if isinstance(data, str) else data


class DataConfig(StageConfig):
    """Text as windows of tokens."""

    data: tuple[str, ...] = Field(
        (),
        description="Text to calibrate on: a .txt, .jsonl or .parquet file, a folder of them, a data set "
        "OWNER/NAME[:SPLIT[:COLUMN]], 'self' (written by the model) or 'builtin' (text that comes with Python); "
        "with @WEIGHT behind it where there are several.",
    )
    samples: int = Field(256, ge=1, description="Windows of text.")
    seq_len: int = Field(2048, ge=2, description="Tokens in a window.")
    seed: int = Field(0, description="Seed of everything random.")
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field("auto", description="Precision to compute in; auto is the base model's.")

    _one_or_several = field_validator("data", mode="before")(_one_or_several)


class CalibrateConfig(DataConfig):
    """`cskv calibrate`."""


def _tokens(text: str) -> int:
    """Tokens that `8192` or `128k` (131,072) stand for."""
    match = re.fullmatch(r"(\d+)\s*([km]?)", text.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is not a number of tokens: give 8192, 128k or 1m")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]]


class SearchConfig(StageConfig):
    """`cskv search`: how large the cache may be, said in one of three ways, and what to measure on."""

    budget: float | None = Field(
        None, gt=0, lt=1, description="Share of the base's cache bytes to remove, at --context tokens."
    )
    bytes_per_token: float | None = Field(None, gt=0, description="Bytes of cache that a token may take on average.")
    memory: str | None = Field(None, description="Memory for the cache of one sequence of --context tokens: 8GB.")
    context: str = Field("8192", description="Tokens at which the bytes are counted: 8192, 128k.")
    window: int = Field(32, ge=1, description="Last tokens whose keys and values stay exact.")
    sinks: int = Field(4, ge=0, description="First tokens whose keys and values stay exact.")
    group: int = Field(32, ge=1, description="Tokens that share a minimum and a step; at most the window.")
    windows: int = Field(
        4, ge=2, description="Windows each candidate is measured on: half text, half lists and quotes."
    )
    seq_len: int = Field(512, ge=64, description="Tokens in a window.")
    recall: float = Field(0.3, ge=0, lt=1, description="Weight of lists and quotes in the score, against plain text.")
    rounds: int = Field(8, ge=0, description="Refined combinations to verify after the first.")
    max_evals: int | None = Field(None, ge=1, description="Most measurements to make in this call; then it combines.")
    data: tuple[str, ...] = Field((), description="Text to measure on, as for calibrate; by default the same.")
    seed: int = Field(0, description="Seed of everything random.")
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field("auto", description="Precision to compute in; auto is float32.")

    _one_or_several = field_validator("data", mode="before")(_one_or_several)

    @field_validator("memory")
    @classmethod
    def _readable_memory(cls, memory: str | None) -> str | None:
        if memory is not None:
            parse_size(memory)
        return memory

    @field_validator("context", mode="before")
    @classmethod
    def _readable_context(cls, context: Any) -> str:
        return str(_tokens(str(context)))

    @model_validator(mode="after")
    def _one_budget(self) -> "SearchConfig":
        if sum(value is not None for value in (self.budget, self.bytes_per_token, self.memory)) != 1:
            raise ValueError("give one of --budget, --bytes-per-token and --memory")
        if self.group > self.window:
            raise ValueError(f"group {self.group} is more than the window of {self.window} tokens")
        return self

    @property
    def tokens(self) -> int:
        """Tokens at which bytes are counted."""
        return int(self.context)

    def limit(self, base_bytes: int) -> int:
        """Bytes that the cache may take at `tokens`, where the base's takes `base_bytes`."""
        if self.budget is not None:
            return int((1 - self.budget) * base_bytes)
        return parse_size(self.memory) if self.memory is not None else int(self.bytes_per_token * self.tokens)


ALLOCATION_HELP = "Per-layer {what} of a search: auto (this run's), or an allocation.json."


class InitConfig(StageConfig):
    """`cskv init`. A rank, where one is given, wins over the ratio; a ratio is the share of channels removed."""

    allocation: str | None = Field(None, description=ALLOCATION_HELP.format(what="ranks"))

    method: Literal["whitened", "asvd", "svd", "random"] = Field("whitened", description="How to factorize.")
    alpha: float = Field(0.5, ge=0, description="Exponent of asvd's scaling.")
    ratio_k: float = Field(0.5, ge=0, lt=1, description="Share of the key channels to remove.")
    ratio_v: float = Field(0.5, ge=0, lt=1, description="Share of the value channels to remove.")
    rank_k: int | None = Field(None, ge=1, description="Key channels to keep, instead of --ratio-k.")
    rank_v: int | None = Field(None, ge=1, description="Value channels to keep, instead of --ratio-v.")
    head_groups: int = Field(
        1, ge=1, description="Groups of KV heads with latents of their own: faster to rebuild, less exact."
    )
    window: int = Field(32, ge=1, description="Last tokens whose keys and values stay exact.")
    sinks: int = Field(4, ge=0, description="First tokens whose keys and values stay exact (0: the paper's cache).")
    seed: int = Field(0, description="Seed of the random method.")

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> "InitConfig":
        for name in ("k", "v"):
            given = {f"rank_{name}", f"ratio_{name}"} <= self.model_fields_set
            if given and getattr(self, f"rank_{name}") is not None:
                raise ValueError(f"rank_{name} and ratio_{name} say the same thing: give one")
        ranks = (self.ratio_k, self.ratio_v, self.rank_k, self.rank_v)
        if self.allocation is not None and ranks != (0.5, 0.5, None, None):
            raise ValueError("an allocation has the ranks already: give no rank or ratio")
        if self.allocation is not None and self.head_groups > 1:
            raise ValueError("an allocation is for factors that all heads share: give no head_groups")
        return self


class FinetuneConfig(StageConfig):
    """`cskv finetune`, and the training of `cskv quantize --qat`."""

    objective: Literal["distill", "reconstruction"] = Field(
        "distill",
        description="What to bring down: distill is KL(full cache || compressed cache) of the predictions; "
        "reconstruction is the paper's, the error of each layer's keys and values.",
    )
    steps: int = Field(200, ge=1, description="Steps of the optimizer.")
    lr: float | None = Field(
        None,
        gt=0,
        description="Learning rate. distill: as a share of each factor's mean magnitude, by default 0.02; "
        "reconstruction: by default 5e-5.",
    )
    accumulate: int = Field(1, ge=1, description="Windows in a step, of each process.")
    mix: str = Field("retrieval=0.2", description="Share of windows that are lists to look up or passages to quote.")
    data: tuple[str, ...] = Field((), description="Text to train on, as for calibrate; by default the same.")
    seq_len: int = Field(512, ge=64, description="Tokens in a window.")
    patience: int = Field(3, ge=1, description="Scorings of the held-out part without a new best before it stops.")
    checkpointing: bool = Field(False, description="Compute activations anew in the backward pass, to save memory.")
    seed: int = Field(0, description="Seed of everything random.")
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field(
        "auto", description="Precision to compute in; auto is bfloat16 where that is fast, else float32."
    )

    _one_or_several = field_validator("data", mode="before")(_one_or_several)

    @field_validator("mix")
    @classmethod
    def _share(cls, mix: str) -> str:
        match = re.fullmatch(r"retrieval=(0|0?\.\d+)", mix)
        if match is None:
            raise ValueError("give retrieval=SHARE with a share from 0 to below 1, such as retrieval=0.2")
        return mix

    @property
    def recall_share(self) -> float:
        """Share of windows that are not plain text."""
        return float(self.mix.removeprefix("retrieval="))


class QuantizeConfig(StageConfig):
    """`cskv quantize`."""

    allocation: str | None = Field(None, description=ALLOCATION_HELP.format(what="bits"))
    qat: FinetuneConfig | None = Field(None, description="Train the factors with the codes in the loop.")
    bits_k: Bits = Field(4, description="Bits of a key latent.")
    bits_v: Bits = Field(4, description="Bits of a value latent.")
    group: int = Field(32, ge=1, description="Tokens that share a minimum and a step; at most the window.")
    seed: int = Field(0, description="Seed of the rotations tried.")

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> "QuantizeConfig":
        if self.allocation is not None and (self.bits_k, self.bits_v, self.group) != (4, 4, 32):
            raise ValueError("an allocation has the bits and the group already: give neither")
        return self


class ExportConfig(StageConfig):
    """`cskv export`."""

    factors: Literal["auto", "init", "finetune", "quantize"] = Field(
        "auto", description="Stage whose factors to export; auto is the last of them that was run."
    )
    dtype: Dtype = Field("auto", description="Precision of the exported weights; auto keeps the base model's.")
    max_shard_size: str = Field("5GB", description="Largest shard of weights: 500MB, 5GB, 2GiB.")
    copy_shards: bool = Field(
        False,
        description="Copy the base's shards. By default they share its room on the disk where that is safe: as clones, "
        "or as hard links to the Hub's cache, never to a folder of yours.",
        json_schema_extra={"flag": "copy"},
    )

    @field_validator("max_shard_size")
    @classmethod
    def _is_a_size(cls, text: str) -> str:
        parse_size(text)
        return text


class PushConfig(StageConfig):
    """Where and how to push a checkpoint; not a stage, and never written anywhere."""

    push: str | None = Field(
        None,
        description="Push to the Hub, to this repository or to <user>/<base>-cskv.",
        json_schema_extra={"metavar": "[REPO]"},
    )
    private: bool = Field(False, description="Create the repository as a private one.")
    branch: str | None = Field(None, description="Branch to push to, created where it is missing.")
    commit_message: str = Field("Upload a CSKV checkpoint", min_length=1, description="Message of the commit.")
    create_pr: bool = Field(False, description="Open a pull request instead of committing.")
    token: str | None = Field(None, repr=False, description="Hub token; else HF_TOKEN or `hf auth login`.")

    @model_validator(mode="after")
    def _only_with_push(self) -> "PushConfig":
        others = self.model_fields_set - {"push"}
        if self.push is None and others:
            raise ValueError(f"--{min(others).replace('_', '-')} needs --push")
        if self.create_pr and self.branch:
            raise ValueError("--create-pr is against main: drop --branch")
        return self
