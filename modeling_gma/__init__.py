"""Gaussian Mixture Attention for transformers. Importing this registers GMA with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from configuration_gma import GMAConfig

from .attention import GMAAttention
from .functional import (
    gaussian_mixture_attention,
    gaussian_mixture_attention_weights,
    gaussian_responsibilities,
)
from .mixture import GaussianMixture
from .modeling_gma import (
    GMAForCausalLM,
    GMAForMaskedLM,
    GMAForSequenceClassification,
    GMAForTokenClassification,
    GMAModel,
    GMAPreTrainedModel,
)
from .optimization import parameter_groups


AutoConfig.register("gma", GMAConfig, exist_ok=True)
for _auto_class, _model_class in (
    (AutoModel, GMAModel),
    (AutoModelForCausalLM, GMAForCausalLM),
    (AutoModelForMaskedLM, GMAForMaskedLM),
    (AutoModelForSequenceClassification, GMAForSequenceClassification),
    (AutoModelForTokenClassification, GMAForTokenClassification),
):
    _auto_class.register(GMAConfig, _model_class, exist_ok=True)

__all__ = [
    "GMAAttention",
    "GMAConfig",
    "GMAForCausalLM",
    "GMAForMaskedLM",
    "GMAForSequenceClassification",
    "GMAForTokenClassification",
    "GMAModel",
    "GMAPreTrainedModel",
    "GaussianMixture",
    "gaussian_mixture_attention",
    "gaussian_mixture_attention_weights",
    "gaussian_responsibilities",
    "parameter_groups",
]
