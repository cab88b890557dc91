"""Writes the tables of docs/architecture.md that are derived from the manifests and .importlinter.

python tools/architecture_page.py           write them
python tools/architecture_page.py --check   fail if they are not up to date
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterator

import workspace

PAGE = workspace.ROOT / "docs" / "architecture.md"


def packages() -> Iterator[str]:
    """A table of the dependencies of each package on packages of this tree, fewest first; plugins are left out."""
    tree = workspace.packages()
    shown = [name for name, package in tree.items() if not package.is_plugin]
    yield "| package | needs of ours | torch |"
    yield "|---|---|---|"
    for name in sorted(shown, key=lambda name: (len(workspace.closure({name}, tree)), name)):
        needs = ", ".join(sorted(workspace.local_names(tree[name].needs, tree))) or "nothing"
        yield f"| {name} | {needs} | {'yes' if workspace.needs_torch({name}, tree) else 'no'} |"


def contracts() -> Iterator[str]:
    """A list of the names of the contracts in .importlinter."""
    settings = configparser.ConfigParser()
    settings.read(workspace.ROOT / ".importlinter")
    for section in settings.sections():
        if section.startswith("importlinter:contract:"):
            yield f"- {settings[section]['name']}."


def page(text: str) -> str:
    """The page with its tables brought up to date."""
    for name, lines in (("packages", packages()), ("contracts", contracts())):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        (begin, end), table = pattern.findall(text)[0], "".join(f"{line}\n" for line in lines)
        text = pattern.sub(lambda _: begin + table + end, text)  # noqa: B023 -- called at once
    return text


def main() -> int:
    """Write the page, or with --check compare it; returns the exit status."""
    text = PAGE.read_text("utf-8")
    wanted = page(text)
    if "--check" in sys.argv:
        return int(text != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
