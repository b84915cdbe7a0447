"""Gaussian Mixture Attention for transformers. Importing this registers GMA with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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


AutoConfig.register("gma", GMAConfig, exist_ok=True)
for _auto_class, _model_class in (
    (AutoModel, GMAModel),
    (AutoModelForCausalLM, GMAForCausalLM),
    (AutoModelForMaskedLM, GMAForMaskedLM),
    (AutoModelForSequenceClassification, GMAForSequenceClassification),
    (AutoModelForTokenClassification, GMAForTokenClassification),
):
    _auto_class.register(GMAConfig, _model_class, exist_ok=True)
# By this table `Trainer` knows that labels are to be shifted when it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gma"] = GMAForCausalLM.__name__

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
    "MixtureHealthCallback",
    "gaussian_mixture_attention",
    "gaussian_mixture_attention_weights",
    "gaussian_responsibilities",
    "parameter_groups",
]
