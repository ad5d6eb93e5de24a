"""Keys and values of other systems, translated before the configuration is built; what was translated is reported."""

from flowgrpo_rc.compat.correction import rollout_correction
from flowgrpo_rc.compat.overrides import Row, Setting, Translation, rows_of_notes, table, translate

__all__ = ["Row", "Setting", "Translation", "rollout_correction", "rows_of_notes", "table", "translate"]
