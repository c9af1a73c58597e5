"""Configs of the verbs that measure a checkpoint: `cskv eval` and `cskv bench`."""

from typing import Any, get_args

from pydantic import Field, PositiveInt, field_validator

from cskv_cli.config import Bits, Device, Dtype, StageConfig, parse_size


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
        return parse_size(self.memory)
