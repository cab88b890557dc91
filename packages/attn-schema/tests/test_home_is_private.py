"""Only its owner may enter the home folder."""

from __future__ import annotations

import stat
from pathlib import Path

from attn_schema.home import private_folder


def test_a_home_is_made_private_and_stays_so(tmp_path: Path) -> None:
    home = tmp_path / "a" / "home"
    assert stat.S_IMODE(private_folder(home).stat().st_mode) == 0o700
    home.chmod(0o755)
    assert stat.S_IMODE(private_folder(home).stat().st_mode) == 0o700
