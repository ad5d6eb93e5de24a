"""The mark of tests that need torchao."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs the extra `quantization`"
)
