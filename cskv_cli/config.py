"""One frozen config per stage: the source of its flags, its recipe keys and its manifest."""

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Bits = Literal[2, 3, 4, 8]


class StageConfig(BaseModel):
    """Settings of one stage. Unknown keys are refused, so that a misspelt recipe key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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

    @field_validator("data", mode="before")
    @classmethod
    def _one_or_several(cls, data: Any) -> Any:
        return (data,) if isinstance(data, str) else data


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


class QuantizeConfig(StageConfig):
    """`cskv quantize`."""

    bits_k: Bits = Field(4, description="Bits of a key latent.")
    bits_v: Bits = Field(4, description="Bits of a value latent.")
    group: int = Field(32, ge=1, description="Tokens that share a minimum and a step; at most the window.")
    seed: int = Field(0, description="Seed of the rotations tried.")


class ExportConfig(StageConfig):
    """`cskv export`."""

    factors: Literal["auto", "init", "quantize"] = Field(
        "auto", description="Stage whose factors to export; auto is quantize where it was run, else init."
    )
    dtype: Dtype = Field("auto", description="Precision of the exported weights; auto keeps the base model's.")


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
