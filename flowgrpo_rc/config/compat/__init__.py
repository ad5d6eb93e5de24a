"""Translates keys and values of other systems before the configuration is built, and reports it."""

from flowgrpo_rc.config.compat.correction import rollout_correction
from flowgrpo_rc.config.compat.overrides import (
    Row,
    Setting,
    TranslatedOverrides,
    rows_of_notes,
    summary,
    table,
    translate,
)

__all__ = [
    "Row",
    "Setting",
    "TranslatedOverrides",
    "rollout_correction",
    "rows_of_notes",
    "summary",
    "table",
    "translate",
]
