"""Keys and values of other systems, translated before the configuration is built; what was
translated is reported.
"""

from flowgrpo_rc.config.compat.correction import rollout_correction
from flowgrpo_rc.config.compat.overrides import (
    Row,
    Setting,
    TranslatedOverrides,
    rows_of_notes,
    table,
    translate,
)

__all__ = [
    "Row",
    "Setting",
    "TranslatedOverrides",
    "rollout_correction",
    "rows_of_notes",
    "table",
    "translate",
]
