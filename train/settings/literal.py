"""Convert plain values to typed settings, and keep every string as it is."""

import re
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ringattn.train.settings.config import Config

DEFAULTS = OmegaConf.structured(Config)


def literal_settings(values: dict[str, Any]) -> DictConfig:
    """Return all settings with the given values. Other settings have their defaults.

    `values` may come from an untrusted file. OmegaConf would replace an unescaped `${oc.env:NAME}` by an environment variable.

    Raises:
        OmegaConfBaseException: a setting is unknown, or its value has the wrong type.
    """
    return cast("DictConfig", OmegaConf.merge(DEFAULTS, _escape(values)))


def literal_config(values: dict[str, Any]) -> Config:
    return to_config(literal_settings(values))


def to_config(settings: DictConfig) -> Config:
    return cast("Config", OmegaConf.to_object(settings))


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _escape(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape(each) for each in value]
    # OmegaConf reads two backslashes before `${` as a single backslash.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
