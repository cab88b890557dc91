"""Show or upgrade the database at ATTN_DATABASE or of a home folder: `python -m attn_gateway.records show|upgrade`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from attn_core.errors import AttnError
from attn_schema.home import home_folder
from sqlalchemy import func, select

from attn_gateway.records import schema_version
from attn_gateway.records.database import Database, database_url
from attn_gateway.records.tables import metadata


def show(database: Database) -> None:
    """Print the URL, the schema version, and how many records there are."""
    sys.stdout.write(f"{database.shown}\nschema version {schema_version.NEWEST}\n")
    with database.reading() as connection:
        for table in metadata.sorted_tables:
            count = connection.execute(select(func.count()).select_from(table)).scalar_one()
            sys.stdout.write(f"{table.name:13} {count}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m attn_gateway.records", description=__doc__)
    parser.add_argument("action", choices=["show", "upgrade"])
    parser.add_argument("home", type=Path, nargs="?", default=home_folder(), help="used if ATTN_DATABASE is not set")
    args = parser.parse_args(arguments)
    try:
        with Database(database_url(args.home.resolve()), upgrade=args.action == "upgrade") as database:
            if args.action == "show":
                show(database)
            else:
                done = ", ".join(database.upgraded) or "nothing to do"
                sys.stdout.write(f"schema version {schema_version.NEWEST}: {done}\n")
    except AttnError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
