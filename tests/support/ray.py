"""The mark of tests that need Ray, which may not be imported before a run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")
