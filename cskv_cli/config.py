"""One frozen config per stage: the source of its flags, its recipe keys and its manifest."""

import re
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Bits = Literal[2, 3, 4, 8]


def parse_size(text: str) -> int:
    """Bytes of `5GB` or `2GiB`.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
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


class InitConfig(StageConfig):
    """`cskv init`. A rank, where one is given, wins over the ratio; a ratio is the share of channels removed."""

    method: Literal["whitened", "asvd", "svd", "random"] = Field("whitened", description="How to factorize.")
    alpha: float = Field(0.5, ge=0, description="Exponent of asvd's scaling.")
    ratio_k: float = Field(0.5, ge=0, lt=1, description="Share of the key channels to remove.")
    ratio_v: float = Field(0.5, ge=0, lt=1, description="Share of the value channels to remove.")
    rank_k: int | None = Field(None, ge=1, description="Key channels to keep, instead of --ratio-k.")
    rank_v: int | None = Field(None, ge=1, description="Value channels to keep, instead of --ratio-v.")
    window: int = Field(32, ge=1, description="Last tokens whose keys and values stay exact.")
    sinks: int = Field(4, ge=0, description="First tokens whose keys and values stay exact (0: the paper's cache).")
    seed: int = Field(0, description="Seed of the random method.")

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> "InitConfig":
        for name in ("k", "v"):
            given = {f"rank_{name}", f"ratio_{name}"} <= self.model_fields_set
            if given and getattr(self, f"rank_{name}") is not None:
                raise ValueError(f"rank_{name} and ratio_{name} say the same thing: give one")
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

    qat: FinetuneConfig | None = Field(None, description="Train the factors with the codes in the loop.")
    bits_k: Bits = Field(4, description="Bits of a key latent.")
    bits_v: Bits = Field(4, description="Bits of a value latent.")
    group: int = Field(32, ge=1, description="Tokens that share a minimum and a step; at most the window.")
    seed: int = Field(0, description="Seed of the rotations tried.")


class ExportConfig(StageConfig):
    """`cskv export`."""

    factors: Literal["auto", "init", "finetune", "quantize"] = Field(
        "auto", description="Stage whose factors to export; auto is the last of them that was run."
    )
    dtype: Dtype = Field("auto", description="Precision of the exported weights; auto keeps the base model's.")
    max_shard_size: str = Field("5GB", description="Largest shard of weights: 500MB, 5GB, 2GiB.")

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


class EvalConfig(StageConfig):
    """`cskv eval`: what is scored, and by what budget a baseline compresses."""

    ratio: tuple[float, ...] = Field(
        (0.5,), description="Share of the cache that streaming-llm, h2o, asvd and svd-cache remove; each one is scored."
    )
    bits: tuple[int, ...] = Field((4,), description="Bits of kivi: 2, 3, 4 or 8; each one is scored.")
    data: tuple[str, ...] = Field(
        (), description="Text to score, as for calibrate; consecutive windows from its start. By default 'builtin'."
    )
    samples: int = Field(16, ge=1, description="Windows of text.")
    seq_len: int = Field(1024, ge=2, description="Tokens in a window.")
    entries: int = Field(60, ge=2, le=10_000, description="Entries in a list of keys and values.")
    lines: tuple[PositiveInt, ...] = Field((200,), description="Lines of a longeval record; each length is scored.")
    cases: int | None = Field(
        None,
        ge=1,
        description="Lists of retrieval, records of longeval of each length (by default 100); questions of each data "
        "set of a benchmark (by default all).",
    )
    max_prompt: int | None = Field(
        None,
        ge=1,
        description="Tokens of a benchmark's prompt; longer ones are cut in the middle. By default what the model's "
        "context holds.",
    )
    chat: bool = Field(True, description="Put benchmark prompts into the model's chat template, if it has one.")
    seed: int = Field(0, description="Seed of the lists and records.")
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field("auto", description="Precision to compute in; auto is the checkpoint's.")

    @field_validator("ratio")
    @classmethod
    def _ratios(cls, ratios: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= ratio < 1 for ratio in ratios):
            raise ValueError("a ratio is the share removed: at least 0 and less than 1")
        return ratios

    @field_validator("bits")
    @classmethod
    def _bits(cls, bits: tuple[int, ...]) -> tuple[int, ...]:
        if not set(bits) <= set(get_args(Bits)):
            raise ValueError("bits are 2, 3, 4 or 8")
        return bits

    @field_validator("ratio", "bits", "lines", "data", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str | int | float) else given


class BenchConfig(StageConfig):
    """`cskv bench`."""

    context: tuple[int, ...] = Field((512, 2048), description="Tokens read before decoding; several as 512,2048,8000.")
    batch: tuple[int, ...] = Field((1,), description="Sequences at a time; several as 1,4.")
    new_tokens: int = Field(32, ge=1, description="Tokens that each cache decodes.")
    prefills: int = Field(3, ge=1, description="Times that each cache reads the context.")
    memory: str = Field("8GB", pattern=r"^\d+(\.\d+)?\s*[kMGT]?B$", description="Memory for weights and cache.")
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field("auto", description="Precision to compute in; auto is the checkpoint's.")

    @field_validator("context", "batch", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """`--context 512,2048` comes as a list of one text."""
        if isinstance(given, int):
            return (given,)
        return tuple(part for item in given for part in (item.split(",") if isinstance(item, str) else [item]))

    @field_validator("context", "batch")
    @classmethod
    def _positive(cls, given: tuple[int, ...]) -> tuple[int, ...]:
        if not given or min(given) < 1:
            raise ValueError("must be whole numbers from 1, with commas between them")
        return tuple(dict.fromkeys(given))

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes."""
        number = self.memory.removesuffix("B").strip()
        power = "kMGT".find(number[-1]) + 1
        return int(float(number.rstrip("kMGT")) * 1000**power)
