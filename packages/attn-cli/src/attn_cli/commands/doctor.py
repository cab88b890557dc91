"""`attn doctor`."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import typer
from attn_core import installed
from attn_core.plugins.hooks import Finding
from attn_core.plugins.loader import PluginStatus

from attn_cli.output import Json, print_json
from attn_cli.tables import print_table


def doctor_command(json: Json = False) -> None:
    """Check this machine and installation; exit code 1 if something is not well.

    Packages add checks of their own, such as the Ray version or the folder of models.
    """
    findings = own_findings()
    for owner, check in installed().offers("attn_doctor_checks"):
        try:
            findings += check()
        except Exception as error:  # noqa: BLE001  a plugin's check may fail in any way and is itself a finding
            findings.append(
                Finding(subject=owner, ok=False, detail=f"its check failed: {type(error).__name__}: {error}")
            )
    rows = [{"subject": f.subject, "well": "yes" if f.ok else "NO", "detail": f.detail} for f in findings]
    if json:
        print_json([{"subject": f.subject, "ok": f.ok, "detail": f.detail} for f in findings])
    else:
        print_table(rows, "nothing to check")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def own_findings() -> list[Finding]:
    """What the command line itself can say: interpreter, torch and plugins."""
    python = sys.version_info >= (3, 11)
    findings = [
        Finding(subject="python", ok=python, detail=f"{platform.python_version()}, {os.cpu_count()} cores"),
        _torch(),
    ]
    for record in installed().plugins:
        ok = record.status in (PluginStatus.OK, PluginStatus.NOT_SELECTED)
        detail = f"{record.version} {record.status}" + (f": {record.reason}" if record.reason else "")
        findings.append(Finding(subject=record.full_name, ok=ok, detail=detail))
    return findings


def _torch() -> Finding:
    try:
        return Finding(subject="torch", ok=True, detail=version("torch"))
    except PackageNotFoundError:
        return Finding(subject="torch", ok=True, detail="not installed; only what needs no tensors works")
