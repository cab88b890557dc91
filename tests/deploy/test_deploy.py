"""What is in `deploy/` starts servers that exist: their options, names and files are those of this tree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import workspace
import yaml
from attn_cli.main import load
from attn_core import installed

DEPLOY = workspace.ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def serve_options() -> set[str]:
    """The flags of `attn serve`."""
    command = load(installed().commands.get("serve"))
    return {flag for parameter in command.params for flag in parameter.opts}


def documents(path: Path) -> list[dict[str, object]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def containers(value: object) -> list[dict[str, object]]:
    """All containers anywhere in a manifest."""
    if isinstance(value, list):
        return [found for item in value for found in containers(item)]
    if not isinstance(value, dict):
        return []
    own = [*value.get("containers", []), *value.get("initContainers", [])]
    return own + [found for key, item in value.items() if "ontainers" not in key for found in containers(item)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_starts_a_server_with_options_that_exist_from_packages_of_this_tree(path: Path) -> None:
    text = path.read_text("utf-8")
    given = [
        *json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M)[1]),
        *json.loads(re.search(r"^CMD (.*)$", text, re.M)[1]),
    ]
    assert given[:2] == ["attn", "serve"]
    assert {word for word in given if word.startswith("--")} <= serve_options()
    named = set(re.findall(r"attn-[a-z-]+", text.partition("--find-links dist")[2].partition("\n\n")[0]))
    assert named
    assert named <= set(workspace.packages())
    assert (workspace.ROOT / "constraints.txt").read_text("utf-8").count(re.search(r"torch==\S+", text)[0]) == 1


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_keep_to_the_rules_of_hadolint(path: Path) -> None:
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed")
    said = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas_of_kubernetes(path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    known = [one for one in documents(path) if not str(one["apiVersion"]).startswith("ray.io/")]  # KubeRay's own kind
    # It returns the version of the schema where a document fits, and raises where it does not.
    assert all(validate.validate(document, validate.latest_version(), strict=True) for document in known)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_volume_that_a_container_mounts_is_there_and_every_image_is_ours(path: Path) -> None:
    for document in documents(path):
        found = containers(document)
        volumes = set(re.findall(r"'name': '([\w-]+)', '(?:emptyDir|secret|persistentVolumeClaim)'", str(document)))
        for container in found:
            assert container["image"] in ("attn", "attn-cuda")
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


def test_the_ray_of_the_cluster_is_the_one_that_is_installed() -> None:
    (cluster,) = documents(DEPLOY / "kubernetes" / "raycluster.yaml")
    assert (
        f"ray=={cluster['spec']['rayVersion']}" in (workspace.ROOT / "constraints.txt").read_text("utf-8").splitlines()
    )


def test_the_options_of_the_unit_are_options_of_the_server() -> None:
    given = yaml.safe_load((DEPLOY / "systemd" / "serve.yaml").read_text("utf-8"))
    flags = {f"--{name.replace('_', '-')}" for table in given.values() for name in table}
    assert flags <= serve_options()


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / "attn.service"
    text = (DEPLOY / "systemd" / "attn.service").read_text("utf-8")
    unit.write_text(text.replace("/opt/attn/bin/attn", "/bin/true"), encoding="utf-8")
    said = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "attn.service" not in said.stderr, said.stderr
