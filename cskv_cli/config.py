"""One frozen config per stage: the source of its flags, its recipe keys and its manifest."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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
    """`cskv eval`: text for perplexity, lists for retrieval."""

    data: tuple[str, ...] = Field(
        (), description="Text to score, as for calibrate; consecutive windows from its start. By default 'builtin'."
    )
    samples: int = Field(16, ge=1, description="Windows of text.")
    seq_len: int = Field(1024, ge=2, description="Tokens in a window.")
    entries: int = Field(60, ge=2, le=10_000, description="Entries in a list of keys and values.")
    cases: int = Field(100, ge=1, description="Lists, with one question each.")
    seed: int = Field(0, description="Seed of the lists.")
    device: Device = Field("auto", description="Where to compute.")
    dtype: Dtype = Field("auto", description="Precision to compute in; auto is the checkpoint's.")


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
