"""`python -m attn_storage.upgrade`: bring the schema of the database at ATTN_DATABASE up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from attn_core.errors import AttnError

from attn_storage import schema_version
from attn_storage.database import Database, database_url


def main(arguments: list[str]) -> int:
    """Upgrade the database of the home folder that is given, or of ATTN_DATABASE; the exit status."""
    try:
        url = database_url(Path(arguments[0]) if arguments else Path.cwd())
        with Database(url, upgrade=True) as database:
            done = ", ".join(database.upgraded) or "nothing to do"
    except AttnError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"schema version {schema_version.NEWEST}: {done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
