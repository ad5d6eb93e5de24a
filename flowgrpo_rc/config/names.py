"""Names and places of shipped files, for whoever needs no more than these."""

from pathlib import Path

DEFAULT_CONFIG = "tiny_ocr"
# What a whole command line of verl-omni leaves unsaid is that system's default.
OTHER_CONFIG = "verl_omni"
# The folder of whole configurations, each chosen by `+experiment=NAME`.
EXPERIMENT = "experiment"
# What `plan --fit` without a number asks for.
RATE = 400.0  # TFLOP that a card does in a second, assumed; the best of an H100 in bf16 is 990
CARD = "card"
# The environment variable with the token that clients of a served reward send.
TOKEN_ENV = "FLOWGRPO_REWARD_TOKEN"
# All keys, a line each; written by docs/reference_pages.py.
KEYS = Path(__file__).with_name("keys.txt")


def config_folder() -> Path:
    """Returns `configs/`, which is inside the package in a wheel and beside it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
