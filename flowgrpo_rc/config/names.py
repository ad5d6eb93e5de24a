"""Names of shipped files and of a variable, for whoever needs no more than the name."""

from __future__ import annotations

DEFAULT_CONFIG = "tiny_ocr"
# What a whole command line of verl-omni leaves unsaid is that system's default.
OTHER_CONFIG = "verl_omni"
# The folder of whole configurations, each chosen by `+experiment=NAME`.
EXPERIMENT = "experiment"
# The environment variable with the token that clients of a served reward send.
TOKEN_ENV = "FLOWGRPO_REWARD_TOKEN"
