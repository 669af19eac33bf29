"""Does partitioners stay light, and apart from the other two packages?"""

from __future__ import annotations

import subprocess
import sys

import pytest

import partitioners


def test_planning_never_imports_torch() -> None:
    code = """
import sys, partitioners
partitioners.params([1, 2, 3], 2); partitioners.DeviceMap.parse("0:0-3"); dir(partitioners)
assert not {"torch", "numpy", "pipe", "schedules"} & set(sys.modules), "something heavy came along"
partitioners.split
assert "torch" in sys.modules and not {"pipe", "schedules"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_resolves() -> None:
    assert all(getattr(partitioners, name) for name in partitioners.__all__)
    with pytest.raises(AttributeError, match="no attribute 'spilt'"):
        _ = partitioners.spilt
