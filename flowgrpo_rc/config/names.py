"""Names of shipped configuration files, for whoever needs no more than the name."""

from __future__ import annotations

DEFAULT_CONFIG = "tiny_ocr"
# What a whole command line of verl-omni leaves unsaid is that system's default.
OTHER_CONFIG = "verl_omni"
# The folder of whole configurations, each chosen by `+experiment=NAME`.
EXPERIMENT = "experiment"
