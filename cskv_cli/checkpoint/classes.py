"""Which class of transformers a model is loaded as, and which of ours."""

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from cskv_cli.modeling import modeling_cskv

GENERATING = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
"""Class names by model type: of the models that write text, be it after images."""


def base_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """What `AutoModelForCausalLM` makes of a config, or else `AutoModelForImageTextToText`."""
    return getattr(transformers, GENERATING[config.model_type])


def cskv_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The `CSKV...` class of a base config."""
    return getattr(modeling_cskv, f"CSKV{GENERATING[config.model_type]}")


def reads_images(config: PretrainedConfig) -> bool:
    """Whether a model takes images beside text."""
    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def empty_base(config: PretrainedConfig) -> PreTrainedModel:
    """The base model of a config, without weights (on the meta device)."""
    with torch.device("meta"):
        return base_class(config)._from_config(config)


def layer_count(config: PretrainedConfig) -> int:
    """Layers of the decoder."""
    return config.get_text_config(decoder=True).num_hidden_layers


def hidden_size(config: PretrainedConfig) -> int:
    """Width of what the decoder's layers hand on."""
    return config.get_text_config(decoder=True).hidden_size
