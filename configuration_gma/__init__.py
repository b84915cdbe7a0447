from .configuration_gma import GMAConfig


__all__ = ["GMAConfig"]
