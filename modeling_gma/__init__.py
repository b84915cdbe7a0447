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
from .callbacks import MixtureHealthCallback
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


__version__ = "0.1.0"

AUTO_CLASSES = {
    AutoModel: GMAModel,
    AutoModelForCausalLM: GMAForCausalLM,
    AutoModelForMaskedLM: GMAForMaskedLM,
    AutoModelForSequenceClassification: GMAForSequenceClassification,
    AutoModelForTokenClassification: GMAForTokenClassification,
}

AutoConfig.register("gma", GMAConfig, exist_ok=True)
for _auto_class, _model_class in AUTO_CLASSES.items():
    _auto_class.register(GMAConfig, _model_class, exist_ok=True)

__all__ = [
    "AUTO_CLASSES",
    "GMAAttention",
    "GMAConfig",
    "GMAForCausalLM",
    "GMAForMaskedLM",
    "GMAForSequenceClassification",
    "GMAForTokenClassification",
    "GMAModel",
    "GMAPreTrainedModel",
    "GaussianMixture",
    "MixtureHealthCallback",
    "gaussian_mixture_attention",
    "gaussian_mixture_attention_weights",
    "gaussian_responsibilities",
    "parameter_groups",
]
