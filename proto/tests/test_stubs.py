"""What must hold of the checked-in stubs without a compiler at hand."""

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "attn/v1").glob("*.proto"))
NAMES = [path.stem for path in SOURCES]


def requirement(name: str) -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(r for r in map(Requirement, project["dependencies"]) if r.name == name)


@pytest.mark.parametrize("name", NAMES)
def test_every_source_has_stubs_with_its_messages_services_and_calls(name: str) -> None:
    importlib.import_module(f"attn.v1.{name}_pb2_grpc")
    module = importlib.import_module(f"attn.v1.{name}_pb2")
    text = (ROOT / f"attn/v1/{name}.proto").read_text()
    assert set(re.findall(r"^message (\w+)", text, re.M)) == set(module.DESCRIPTOR.message_types_by_name)
    assert set(re.findall(r"^service (\w+)", text, re.M)) == set(module.DESCRIPTOR.services_by_name)
    calls = {call.name for service in module.DESCRIPTOR.services_by_name.values() for call in service.methods}
    assert set(re.findall(r"^  rpc (\w+)", text, re.M)) == calls


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_protobuf_is_the_one_the_stubs_were_made_for(name: str) -> None:
    importlib.import_module(f"attn.v1.{name}_pb2")
    header = importlib.util.find_spec(f"attn.v1.{name}_pb2").origin
    made_for = re.search(r"Protobuf Python Version: (\S+)", Path(header).read_text()).group(1)
    allowed = requirement("protobuf").specifier
    assert f">={made_for}" in str(allowed).split(",")


def test_the_declared_grpcio_is_the_one_the_stubs_were_made_for() -> None:
    module = importlib.import_module("attn.v1.inference_pb2_grpc")
    assert f">={module.GRPC_GENERATED_VERSION}" == str(requirement("grpcio").specifier)


def test_attn_is_a_namespace_that_no_wheel_closes() -> None:
    assert importlib.import_module("attn").__file__ is None


def test_every_enum_begins_with_an_unspecified_zero() -> None:
    pool = descriptor_pool.Default()
    for name in NAMES:
        importlib.import_module(f"attn.v1.{name}_pb2")
        for enum in pool.FindFileByName(f"attn/v1/{name}.proto").enum_types_by_name.values():
            assert enum.values[0].number == 0
            assert enum.values[0].name.endswith("_UNSPECIFIED")
