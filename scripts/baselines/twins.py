"""Twins of GMA models: the same model with another mixer."""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.output_capturing import OutputRecorder

from configuration_gma import GMAConfig
from modeling_gma import (
    GMAAttention,
    GMAForCausalLM,
    GMAForMaskedLM,
    GMAForSequenceClassification,
    GMAForTokenClassification,
    GMAModel,
)
from modeling_gma.modeling_gma import GMALayer

from .attention import EagerAttention, RotaryAttention, SDPAAttention
from .linear_transformer import LinearAttention
from .linformer import LinformerAttention
from .mamba import MambaMixing, StateSpace
from .mixer import Mixer
from .performer import PerformerAttention


MIXERS = {
    "eager": EagerAttention,
    "sdpa": SDPAAttention,
    "sdpa_rope": RotaryAttention,
    "linear": LinearAttention,
    "linformer": LinformerAttention,
    "performer": PerformerAttention,
    "mamba": MambaMixing,
}


TWIN_FIELDS = ("mixer", "linformer_dim", "performer_features", "mamba_expand", "mamba_state_size", "mamba_conv_kernel")


@strict
class TwinConfig(GMAConfig):
    r"""
    A `GMAConfig` whose model has another mixer. What only GMA's mixer has (components, types of layers) is not used,
    and a forget gate by `"linear"` and `"performer"` alone, whose memory is like GMA's.

    Args:
        mixer (`str`, defaults to `"sdpa"`):
            `"eager"` or `"sdpa"`, softmax attention with its scores formed or by PyTorch's kernel; `"sdpa_rope"`, the
            latter with rotary positions, for which `position_embedding_type` must be `"none"`; `"linear"`, Linear
            Transformer; `"linformer"`, bidirectional only; `"performer"`; `"mamba"`, which runs from left to right
            whatever `is_causal` says.
        linformer_dim (`int`, defaults to 256):
            Keys and values that Linformer projects a sequence to, k.
        performer_features (`int`, defaults to 256):
            Random features of Performer, M.
        mamba_expand, mamba_state_size, mamba_conv_kernel (`int`, default to 2, 16 and 4):
            Mamba's inner width in units of `hidden_size`, its state for each inner channel, and its convolution.
    """

    model_type = "gma_twin"

    mixer: str = "sdpa"
    linformer_dim: int = 256
    performer_features: int = 256
    mamba_expand: int = 2
    mamba_state_size: int = 16
    mamba_conv_kernel: int = 4

    def validate_architecture(self):
        """Part of `@strict`-powered validation."""
        super().validate_architecture()
        if self.mixer not in MIXERS:
            raise ValueError(f"`mixer` must be one of {list(MIXERS)}, got {self.mixer!r}.")
        for name in TWIN_FIELDS[1:]:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.mixer == "linformer" and self.is_causal:
            raise ValueError('`is_causal=True`: the mixer "linformer" is bidirectional only; set `is_causal=False`.')
        if self.mixer == "sdpa_rope" and self.position_embedding_type != "none":
            raise ValueError(
                f'`position_embedding_type` must be "none" with the mixer "sdpa_rope", whose positions are rotary, '
                f"got {self.position_embedding_type!r}."
            )
        if self.mixer == "sdpa_rope" and self.routing_dim % 2:
            raise ValueError(f'`routing_dim` must be even with the mixer "sdpa_rope", got {self.routing_dim}.')
        if vars(self)["layer_types"] is not None:
            raise ValueError(f"`layer_types` goes with GMA's mixer alone, got {self.layer_types}.")
        if self.output_gate and self.mixer == "mamba":
            raise ValueError('`output_gate=True` goes with any mixer but "mamba", which has a gate of its own.')
        if self.output_responsibilities:
            raise ValueError("`output_responsibilities=True` needs a mixture, which no mixer but GMA's has.")

    @property
    def default_layer_type(self) -> str:
        """What transformers' caches build for each layer: "hybrid" holds keys and values, and a state beside them."""
        return "hybrid" if self.mixer in ("eager", "sdpa", "sdpa_rope") else "linear_attention"

    @property
    def number_of_conv_states(self) -> int:
        """Slots for convolution states in each layer of a cache; the last one holds the token counts."""
        return 2 if self.mixer == "mamba" else 1


class TwinLayer(GMALayer):
    @staticmethod
    def mixer_class(config: TwinConfig, layer_idx: int) -> Mixer:
        return MIXERS[config.mixer](config, layer_idx)


class TwinPreTrainedModel(PreTrainedModel):
    """What every twin has in place of what its GMA model has."""

    config_class = TwinConfig
    _no_split_modules = ["TwinLayer"]
    _supports_sdpa = _supports_flash_attn = False
    _can_record_outputs = {"hidden_states": TwinLayer, "attentions": OutputRecorder(Mixer, index=1)}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, (LinformerAttention, PerformerAttention, StateSpace)):
            module.reset_parameters()


class TwinModel(TwinPreTrainedModel, GMAModel):
    layer_class = TwinLayer


class TwinForCausalLM(TwinPreTrainedModel, GMAForCausalLM):
    model_class = TwinModel


class TwinForMaskedLM(TwinPreTrainedModel, GMAForMaskedLM):
    model_class = TwinModel


class TwinForSequenceClassification(TwinPreTrainedModel, GMAForSequenceClassification):
    model_class = TwinModel


class TwinForTokenClassification(TwinPreTrainedModel, GMAForTokenClassification):
    model_class = TwinModel


TWINS = {
    GMAModel: TwinModel,
    GMAForCausalLM: TwinForCausalLM,
    GMAForMaskedLM: TwinForMaskedLM,
    GMAForSequenceClassification: TwinForSequenceClassification,
    GMAForTokenClassification: TwinForTokenClassification,
}

AutoConfig.register(TwinConfig.model_type, TwinConfig, exist_ok=True)
for _auto_class, _model_class in (
    (AutoModel, TwinModel),
    (AutoModelForCausalLM, TwinForCausalLM),
    (AutoModelForMaskedLM, TwinForMaskedLM),
    (AutoModelForSequenceClassification, TwinForSequenceClassification),
    (AutoModelForTokenClassification, TwinForTokenClassification),
):
    _auto_class.register(TwinConfig, _model_class, exist_ok=True)
# By this table `Trainer` knows that labels are to be shifted when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TwinConfig.model_type] = TwinForCausalLM.__name__


def twin_config(config: GMAConfig, mixer: str = "sdpa", **fields) -> GMAConfig:
    """The config of a twin: `config` with this mixer and these fields changed. "gma" leaves it a `GMAConfig`.

    All layers have this mixer, whatever `config` says of their types. With "sdpa_rope", rotary positions take the
    place of whatever `config` says of positions.
    """
    if mixer != "gma" and mixer not in MIXERS:
        raise ValueError(f"`mixer` must be one of {['gma', *MIXERS]}, got {mixer!r}.")
    if mixer == "sdpa_rope":
        fields = {"position_embedding_type": "none"} | fields
    values = config.to_dict() | fields | {"mixer": mixer}
    for name in ("model_type", "architectures", "transformers_version"):
        values.pop(name, None)
    if mixer == "gma":
        return GMAConfig(**{name: value for name, value in values.items() if name not in TWIN_FIELDS})
    try:
        return TwinConfig(**values | {"layer_types": None})
    except StrictDataclassClassValidationError as error:
        # The sentence alone, as an error of this function.
        raise ValueError(str(error.__cause__)) from error


def build_twin(
    config: GMAConfig, mixer: str = "sdpa", model_class: type[PreTrainedModel] | None = None, **fields
) -> PreTrainedModel:
    """A new model like `model_class(config)` but for its mixer; "gma" makes that model itself.

    Args:
        config: of the GMA model.
        mixer: "gma" or one of `MIXERS`.
        model_class: a GMA model class; by default the language model of the config's direction, `GMAForCausalLM` or,
            with `is_causal=False`, `GMAForMaskedLM`.
        fields: fields of `TwinConfig` to change, such as `linformer_dim=64`.

    ```python
    >>> model = build_twin(GMAConfig(), mixer="sdpa")
    >>> model = build_twin(GMAConfig(is_causal=False), "linformer", GMAForSequenceClassification)
    ```
    """
    config = twin_config(config, mixer, **fields)
    if model_class is None:
        model_class = GMAForCausalLM if config.is_causal else GMAForMaskedLM
    if model_class not in TWINS:
        names = [allowed.__name__ for allowed in TWINS]
        raise ValueError(f"`model_class` must be one of {names}, got {getattr(model_class, '__name__', model_class)}.")
    return model_class(config) if mixer == "gma" else TWINS[model_class](config)


def build_mixer(config: GMAConfig, mixer: str = "sdpa", layer_idx: int | None = None, **fields) -> nn.Module:
    """A mixer alone, as a layer of `build_twin` has it."""
    config = twin_config(config, mixer, **fields)
    return GMAAttention(config, layer_idx) if mixer == "gma" else MIXERS[mixer](config, layer_idx)
