"""Costs of kernels that were measured on a class of GPUs."""

import json
import math

import pytest

from attn_core import AttentionSpec, Causal, Heads, Window
from attn_core.distributions import Sparsemax
from attn_core.kernels import devices, measured
from attn_core.kernels.attend import AttendKernel, attend_problem
from attn_core.kernels.base import Anything
from attn_core.kernels.dispatch import explain
from attn_core.kernels.measured import CostTable, MeasuredCall, Times

H200 = devices.Gpu("NVIDIA H200", (9, 0))
H100 = devices.Gpu("NVIDIA H100 80GB HBM3", (9, 0))
A100 = devices.Gpu("NVIDIA A100-SXM4-80GB", (8, 0))


def call(**fields):
    known = {"operation": "attend", "dtype": "bfloat16", "head_dim": 64, "mask": "causal", "gradients": False}
    return MeasuredCall(**known | {"queries": 1024, "keys": 1024, "density": 0.5} | fields)


def table(*rows):
    times = tuple(Times(call=call(**fields), microseconds=found) for fields, found in rows)
    return CostTable(device=H200.name, capability=H200.capability, origin={"torch": "2.11"}, rows=times)


SHORT = {}, {"plain": 100.0, "quick": 20.0, "slow": 50.0}
LONG = {"queries": 8192, "keys": 8192}, {"quick": 800.0, "slow": 640.0, "broken": None}


def test_a_share_is_the_time_divided_by_the_plain_one_of_the_nearest_call():
    found = table(SHORT, LONG)
    assert found.share(call(), "quick") == 0.2
    assert found.share(call(queries=2048, keys=2048), "slow") == 0.5
    assert found.share(call(head_dim=128), "quick") == 0.2


def test_where_the_plain_computation_did_not_fit_its_time_grows_with_the_pairs():
    found = table(SHORT, LONG)
    plain = 100.0 * (8192 / 1024) ** 2
    assert found.share(call(queries=8192, keys=8192), "slow") == pytest.approx(640 / plain)
    one = table(({"queries": 1}, {"plain": 10.0, "quick": 5.0}), ({"queries": 1, "keys": 4096}, {"quick": 10.0}))
    assert one.share(call(queries=1, keys=4096), "quick") == pytest.approx(10 / 40)


def test_what_failed_costs_more_than_everything_and_what_was_not_measured_is_not_known():
    found = table(SHORT, LONG)
    assert found.share(call(queries=8192, keys=8192), "broken") == math.inf
    assert found.share(call(), "other") is None
    for fields in ({"dtype": "float16"}, {"mask": "full"}, {"gradients": True}, {"queries": 1}, {"density": 0.2}):
        assert found.share(call(**fields), "quick") is None


def test_larger_heads_are_a_better_guess_than_smaller_ones():
    found = table(({"head_dim": 64}, {"plain": 1.0, "quick": 0.1}), ({"head_dim": 128}, {"plain": 1.0, "quick": 0.2}))
    assert found.share(call(head_dim=80), "quick") == 0.2
    assert found.share(call(head_dim=256), "quick") == 0.2
    assert found.share(call(head_dim=32), "quick") == 0.1


def test_a_table_is_read_as_it_was_written(tmp_path):
    path = measured.write(tmp_path / "made" / "costs.json", table(SHORT, LONG))
    found = measured.read(path)
    assert found.content() == table(SHORT, LONG).content()
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("device"),
        lambda content: content["rows"][0].update(surprise=1),
        lambda content: content["rows"][0]["microseconds"].update(quick=-1.0),
        lambda content: content["rows"][0]["microseconds"].update(quick=float("nan")),
        lambda content: content.update(rows="none"),
    ],
)
def test_a_damaged_file_is_passed_by_with_a_warning(tmp_path, caplog, damage):
    content = table(SHORT, LONG).content()
    damage(content)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    assert measured.read(path) is None
    assert str(path) in caplog.text


@pytest.fixture
def on(monkeypatch, tmp_path):
    """A machine with this GPU and these measurements: its user's, and those that are shipped."""

    def put(gpu, own=None, shipped=()):
        monkeypatch.setattr(devices, "nvidia_gpu", lambda: gpu)
        monkeypatch.setenv(measured.FOLDER, str(tmp_path / "own"))
        monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped")
        for made in shipped:
            measured.write(tmp_path / "shipped" / f"{measured.slug(made.device)}.json", made)
        if own is not None:
            measured.write(measured.path_of(gpu), own)
        measured.table_here.cache_clear()
        return measured.table_here()

    yield put
    measured.table_here.cache_clear()


def test_own_measurements_go_before_shipped_ones_and_a_name_before_a_capability(on):
    shipped = table(SHORT)
    assert on(None, shipped=[shipped]) is None
    assert on(A100, shipped=[shipped]) is None
    assert on(H100, shipped=[shipped]).device == H200.name
    own = CostTable(device=H100.name, capability=H100.capability, origin={}, rows=shipped.rows)
    assert on(H100, own, [shipped]).device == H100.name
    assert on(H200, shipped=[shipped, own]).device == H200.name


class Named(AttendKernel):
    """Takes everything, and says what it costs."""

    summary = "for a test"
    accepts = {field: Anything() for field in AttendKernel.problem.defaults()}

    def __init__(self, name, cost):
        self.name, self.predicted = name, cost

    def cost(self, problem):
        return self.predicted

    def run(self, spec, operands):
        raise NotImplementedError


def verdicts(device="cuda", **parts):
    known = {"dtype": "bfloat16", "device": device, "gradients": False, "padded": False}
    spec = AttentionSpec(heads=Heads(query=4, key_value=4, key_size=64, value_size=64), **parts)
    problem = attend_problem(spec, **known, queries=1024, keys=1024)
    return explain([Named("quick", 0.9), Named("slow", 0.1), Named("other", 0.3)], problem)


def test_measured_costs_go_before_predicted_ones_and_the_verdict_says_where_they_are_from(on):
    on(H200, shipped=[table(SHORT)])
    found = verdicts(mask=Causal())
    assert [(v.kernel.name, v.cost, v.measured_on) for v in found] == [
        ("quick", 0.2, H200.name),
        ("other", 0.3, None),
        ("slow", 0.5, H200.name),
    ]


@pytest.mark.parametrize("parts", [{"mask": Window(left=5)}, {"mask": Causal(), "distribution": Sparsemax()}], ids=str)
def test_what_was_not_measured_is_predicted(on, parts):
    on(H200, shipped=[table(SHORT)])
    assert [verdict.kernel.name for verdict in verdicts(**parts)] == ["slow", "other", "quick"]


def test_a_cpu_asks_no_measurements_of_a_gpu(on):
    on(H200, shipped=[table(SHORT)])
    assert [verdict.measured_on for verdict in verdicts("cpu", mask=Causal())] == [None] * 3


def test_what_is_shipped_for_the_h200_prefers_what_was_fastest_there(monkeypatch, tmp_path):
    monkeypatch.setenv(measured.FOLDER, str(tmp_path))
    monkeypatch.setattr(devices, "nvidia_gpu", lambda: H200)
    measured.table_here.cache_clear()
    found = measured.table_here()
    measured.table_here.cache_clear()
    assert (found.device, found.capability) == H200
    for row in found.rows:
        times = {name: time for name, time in row.microseconds.items() if time is not None}
        shares = {name: found.share(row.call, name) for name in times}
        assert min(times, key=times.get) == min(shares, key=shares.get)
