"""What is in `deploy/` starts servers that exist: their options, names and files are those of this tree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import workspace
import yaml
from attn_cli.main import load
from attn_core import installed

DEPLOY = workspace.ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile*"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CHART = DEPLOY / "helm" / "attn"
VALUES: dict[str, dict[str, object]] = {
    "as it is": {},
    "for a company": {
        "image": {"repository": "registry.example.org/attn", "tag": "1.2.3"},
        "imagePullSecrets": [{"name": "registry"}],
        "replicas": 3,
        "models": ["smollm2-135m-instruct", "mine=/var/lib/attn/models/mine"],
        "extraArgs": ["--kv-cache", "int8"],
        "env": {"ATTN_CPU_ISA": "avx2", "OMP_NUM_THREADS": 4, "RAY_ADDRESS": "ray-head:6379"},
        "secret": {"name": "entrance", "tokens": "bearer"},
        "database": {"secretName": "postgres"},
        "storage": {"size": "1Ti", "accessModes": ["ReadWriteMany"], "storageClassName": "shared"},
        "service": {"type": "LoadBalancer", "grpcPort": 443},
        "metrics": False,
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
    "on a claim that is there": {"storage": {"existingClaim": "models"}},
}
"""Values for the chart, by what they are for."""


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


def rendered(values: dict[str, object]) -> dict[str, dict[str, Any]]:
    """What the chart makes of values for a release `demo`, by kind; Helm's own templates and functions do it."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(CHART) as chart:
        made = chart.render(values, name="demo", namespace="models")
    found = [one for name, text in made.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]
    return {one["kind"]: one for one in found}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_the_chart_makes_fits_the_schemas_of_kubernetes(values: dict[str, object]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    found = rendered(values)
    assert {"Deployment", "Service"} <= found.keys()
    assert all(validate.validate(one, validate.latest_version(), strict=True) for one in found.values())


def test_the_chart_as_it_is_makes_the_server_of_the_manifest() -> None:
    made, written = rendered({}), {one["kind"]: one for one in documents(DEPLOY / "kubernetes" / "attn.yaml")}
    assert made.keys() == written.keys()
    assert made["PersistentVolumeClaim"]["spec"] == written["PersistentVolumeClaim"]["spec"]
    pod, plain = (one["Deployment"]["spec"]["template"]["spec"] for one in (made, written))
    (server,), (own,) = pod["containers"], plain["containers"]
    assert server["volumeMounts"] == own["volumeMounts"]
    assert server["resources"] == own["resources"]
    assert {one["containerPort"] for one in server["ports"]} == {one["containerPort"] for one in own["ports"]}
    assert pod["securityContext"] == plain["securityContext"]
    assert pod["initContainers"][0]["command"] == plain["initContainers"][0]["command"]
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in plain["volumes"]}


@pytest.mark.parametrize("path", [DEPLOY / "kubernetes" / "attn.yaml", CHART / "templates" / "service.yaml"], ids=str)
def test_ports_with_tls_are_not_called_clear_text(path: Path) -> None:
    """A proxy goes by `appProtocol`, and without one some (Istio) go by the port's name: both would be clear text."""
    (ports,) = re.findall(r"^  ports:\n((?:    .*\n?)+)", path.read_text("utf-8"), re.M)
    assert "--tls-cert" in (DEPLOY / "docker" / "Dockerfile").read_text("utf-8")
    assert len(re.findall("- name: ", ports)) == 2
    assert re.findall(r"appProtocol: (\S+)", ports) == ["https", "https"]


def test_values_reach_the_server_as_its_options() -> None:
    found = rendered(VALUES["for a company"])
    deployment, pod = found["Deployment"]["spec"], found["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    flags = {word.partition("=")[0] for word in server["args"] if word.startswith("--")}
    assert flags <= serve_options()
    assert "--model=mine=/var/lib/attn/models/mine" in server["args"]
    assert server["args"][-2:] == ["--kv-cache", "int8"]
    assert server["image"] == "registry.example.org/attn:1.2.3"
    assert deployment["replicas"] == 3
    assert deployment["strategy"]["type"] == "RollingUpdate"
    given = {one["name"]: one for one in server["env"]}
    assert given["ATTN_CPU_ISA"]["value"] == "avx2"
    assert given["OMP_NUM_THREADS"]["value"] == "4"
    assert given["ATTN_DATABASE"]["valueFrom"]["secretKeyRef"] == {"name": "postgres", "key": "url"}
    (secret,) = (one["secret"] for one in pod["volumes"] if one["name"] == "secret")
    assert secret["secretName"] == "entrance"
    assert {one["key"]: one["path"] for one in secret["items"]}["bearer"] == "tokens"
    assert "PersistentVolumeClaim" not in rendered(VALUES["on a claim that is there"])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicas": 2}, "database.secretName"),
        ({"replicas": 2, "database": {"secretName": "postgres"}}, "RAY_ADDRESS"),
        ({"replica": 2}, "replica"),
        ({"storage": {"size": "big"}}, "/storage/size"),
        ({"tls": {"certificate": "x"}}, "tls"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(values: dict[str, object], said: str) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match=said):
        rendered(values)


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    helm = pytest.importorskip("helm_python")
    found = helm.lint(CHART)
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


def test_every_value_of_the_chart_is_in_its_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))

    def same(given: dict[str, object], known: dict[str, Any], at: str) -> None:
        assert given.keys() == known.keys() - {"global"}, at
        for name, inner in known.items():
            if "properties" in inner:
                assert inner["additionalProperties"] is False, f"{at}.{name}"
                same(given[name], inner["properties"], f"{at}.{name}")

    same(values, schema["properties"], "")
    assert schema["additionalProperties"] is False
