"""What the documents say is what the tool does."""

from __future__ import annotations

import importlib.util

import pytest

from swaleak.sglang.release import RELEASES
from tests.conftest import ROOT, wheel


@pytest.mark.wheels
def test_the_table_of_releases_is_up_to_date() -> None:
    for version in RELEASES:
        wheel(version)
    spec = importlib.util.spec_from_file_location("releases", ROOT / "docs" / "releases.py")
    assert spec and spec.loader
    releases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(releases)
    assert releases.PAGE.read_text() == releases.page(), "run python docs/releases.py"
