"""Which vision-language model a reward asks: a server, or one in this process."""

from __future__ import annotations

from typing import Any

from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.vlm.base import Vlm
from flowgrpo_rc.rewards.vlm.local import LocalVlm
from flowgrpo_rc.rewards.vlm.server import VlmServer


def make_vlm(options: dict[str, Any]) -> Vlm:
    """Makes the model that the options of a reward name.

    Args:
      options: those of `VlmServer`, with `url`, or those of `LocalVlm`, with `path`.

    Raises:
      ValueError: both are named or none, or the class refuses an option.
    """
    if ("url" in options) == ("path" in options):
        raise ValueError(
            "which model answers? Give url and model for one behind a server, or path for one in "
            "this process"
        )
    if "url" in options:
        return build(VlmServer, options, "a VLM's server")
    return build(LocalVlm, options, "a VLM of this process")
