"""The paper's other systems on GMA's skeleton. Importing this registers twins with the Auto classes."""

from .mixer import Mixer
from .twins import (
    MIXERS,
    TwinConfig,
    TwinForCausalLM,
    TwinForMaskedLM,
    TwinForSequenceClassification,
    TwinForTokenClassification,
    TwinModel,
    build_mixer,
    build_twin,
    twin_config,
)


__all__ = [
    "MIXERS",
    "Mixer",
    "TwinConfig",
    "TwinForCausalLM",
    "TwinForMaskedLM",
    "TwinForSequenceClassification",
    "TwinForTokenClassification",
    "TwinModel",
    "build_mixer",
    "build_twin",
    "twin_config",
]
