"""Artefacts arrive whole and unchanged, or not at all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attn_core.errors import CheckpointInvalid, InvalidValue, Unavailable, UnknownName, UserError
from attn_gateway.records import ArtifactStore
from failing_bucket import FailingBucket, failing_bucket
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILES = st.dictionaries(
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3).map(lambda parts: "/".join(parts) + ".x"),
    st.binary(max_size=200),
    min_size=1,
    max_size=5,
)


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def store(tmp_path) -> ArtifactStore:
    return ArtifactStore(f"file://{tmp_path}/store", tmp_path / "cache")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=FILES)
def test_a_folder_is_fetched_as_it_was_published(tmp_path_factory, files):
    base = tmp_path_factory.mktemp("a")
    folder = written(base / "given", files)
    store = ArtifactStore(f"file://{base}/store", base / "cache")
    manifest = store.publish("m", folder)
    assert manifest.size == sum(map(len, files.values()))
    elsewhere = ArtifactStore(f"file://{base}/store", base / "other-cache")
    assert read(elsewhere.fetch("m")) == files


def test_equal_content_is_stored_and_fetched_once(tmp_path, store):
    first = store.publish("a", written(tmp_path / "a", {"x": b"same", "y": b"other"}))
    again = store.publish("b", written(tmp_path / "b", {"x": b"same", "y": b"other"}))
    assert first.digest == again.digest
    assert len([p for p in (tmp_path / "store" / "blobs").rglob("*") if p.is_file()]) == 2
    places = [store.fetch(name) / "x" for name in "ab"]
    assert places[0].stat().st_ino == places[1].stat().st_ino


def test_a_name_shows_its_newest_content_and_who_has_the_old_keeps_it(tmp_path, store):
    store.publish("m", written(tmp_path / "v1", {"x": b"1"}))
    old = store.fetch("m")
    store.publish("m", written(tmp_path / "v2", {"x": b"2"}))
    assert read(store.fetch("m")) == {"x": b"2"}
    assert read(old) == {"x": b"1"}


def test_until_the_manifest_is_written_nothing_new_is_seen(tmp_path, store, monkeypatch):
    """Whatever step of a publication is its last, the name shows a whole folder."""
    store.publish("m", written(tmp_path / "v1", {"x": b"1", "y": b"1"}))
    new = written(tmp_path / "v2", {"x": b"2", "y": b"2", "z": b"2"})
    real, left = ArtifactStore._call, 0

    def call(self, function, *arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise Unavailable("the machine went away")
        return real(self, function, *arguments)

    ended = False
    for steps in range(20):
        left = steps
        with monkeypatch.context() as patched:
            patched.setattr(ArtifactStore, "_call", call)
            try:
                store.publish("m", new)
                ended = True
            except Unavailable:
                pass
        assert read(store.fetch("m")) == (read(new) if ended else {"x": b"1", "y": b"1"})
        if ended:
            break
    assert ended
    assert steps > 3


@pytest.mark.parametrize("damage", [b"changed!", b"", b"longer than it was", None])
def test_content_that_was_changed_on_the_way_is_refused(tmp_path, store, damage):
    store.publish("m", written(tmp_path / "m", {"x": b"original"}))
    (blob,) = [p for p in (tmp_path / "store" / "blobs").rglob("*") if p.is_file()]
    blob.unlink() if damage is None else blob.write_bytes(damage)
    with pytest.raises(CheckpointInvalid, match="x"):
        store.fetch("m")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", ""])
def test_a_manifest_cannot_write_outside_of_the_cache(tmp_path, store, path):
    store.publish("m", written(tmp_path / "m", {"x": b"1"}))
    place = tmp_path / "store" / "artifacts" / "m" / "latest.json"
    manifest = json.loads(place.read_text())
    manifest["files"][0]["path"] = path
    place.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointInvalid, match="outside"):
        store.fetch("m")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 129, "a\nb"])
def test_names_that_are_paths_are_refused(tmp_path, store, name):
    for call in (store.manifest, store.fetch, store.remove):
        with pytest.raises(InvalidValue, match="name"):
            call(name)


def test_an_unknown_name_is_refused_with_near_ones_and_a_removed_one_is_unknown(tmp_path, store):
    store.publish("shakespeare", written(tmp_path / "m", {"x": b"1"}))
    with pytest.raises(UnknownName, match="shakespeare"):
        store.fetch("shakespear")
    store.remove("shakespeare")
    assert store.names() == []
    with pytest.raises(UnknownName):
        store.fetch("shakespeare")


def test_links_that_leave_the_folder_are_not_published(tmp_path, store):
    (tmp_path / "secret").write_text("secret")
    folder = written(tmp_path / "m", {"x": b"1"})
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="link"):
        store.publish("m", folder)


@pytest.mark.parametrize("url", ["", "models", "/models", "http://host/x", "gs://bucket"])
def test_another_kind_of_url_is_refused(tmp_path, url):
    with pytest.raises(InvalidValue, match="ATTN_ARTIFACTS"):
        ArtifactStore(url, tmp_path)


@pytest.fixture
def bucket() -> Iterator[FailingBucket]:
    with failing_bucket() as running:
        yield running


def test_a_store_that_fails_for_a_while_delays_and_loses_nothing(tmp_path, bucket):
    store = ArtifactStore("s3://bucket/models", tmp_path / "cache", **bucket.options)
    bucket.failures = 3
    store.publish("m", written(tmp_path / "m", {"x": b"1", "sub/y": b"2"}))
    bucket.failures = 3
    assert read(store.fetch("m")) == {"x": b"1", "sub/y": b"2"}
    bucket.failures = 10**6
    impatient = ArtifactStore("s3://bucket/models", tmp_path / "c", **bucket.options, retry_config={"max_retries": 1})
    with pytest.raises(Unavailable, match="artefact store"):
        impatient.publish("m", tmp_path / "m")
    with pytest.raises(Unavailable, match="artefact store"):
        impatient.names()


def test_a_store_that_does_not_answer_is_told_at_once(tmp_path, bucket):
    bucket.failures = 10**6
    began = time.monotonic()
    closed = bucket.options | {"aws_endpoint": "http://127.0.0.1:9"}
    for options in (bucket.options, closed):
        with pytest.raises(Unavailable, match="artefact store s3://bucket") as caught:
            ArtifactStore("s3://bucket/models", tmp_path / "cache", **options).require_reachable()
        assert "\n" not in caught.value.message
    assert time.monotonic() - began < 100, "its own retries take minutes"
    ArtifactStore(f"file://{tmp_path}/store", tmp_path / "cache").require_reachable()


def test_a_bucket_that_is_not_there_is_told_where_names_are_asked_for(tmp_path, bucket):
    store = ArtifactStore("s3://bucket/models", tmp_path / "cache", **bucket.options)
    for call in (store.names, lambda: store.manifest("m"), lambda: store.fetch("m"), lambda: store.remove("m")):
        with pytest.raises(Unavailable, match="artefact store s3://bucket"):
            call()


def test_a_store_over_plain_http_is_reached_by_what_the_environment_says(tmp_path, bucket, monkeypatch):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    bucket.lists = True
    store = ArtifactStore("s3://bucket/models", tmp_path / "cache")
    store.require_reachable()
    store.publish("m", written(tmp_path / "m", {"x": b"1"}))
    assert read(store.fetch("m")) == {"x": b"1"}
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(Unavailable, match="artefact store s3://bucket"):
        ArtifactStore("s3://bucket/models", tmp_path / "other").require_reachable()


@pytest.mark.cluster
def test_twenty_seconds_of_a_failing_store_are_waited_for(tmp_path, bucket):
    store = ArtifactStore("s3://bucket/models", tmp_path / "cache", **bucket.options)
    folder = written(tmp_path / "m", {"x": b"1", "sub/y": b"2"})
    for step in (lambda: store.publish("m", folder), lambda: store.manifest("m")):
        began = time.monotonic()
        bucket.fails_until = began + 20
        step()
        assert time.monotonic() - began >= 20
    bucket.fails_until = time.monotonic() + 20
    assert read(store.fetch("m")) == {"x": b"1", "sub/y": b"2"}
