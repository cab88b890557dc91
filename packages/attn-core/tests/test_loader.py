"""Loading plugins that are really installed: a broken one is reported with its reason and harms nobody else."""

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest

MECHANISM = """
from attn_core import ComputedMechanism, Paper, hookimpl

class Made(ComputedMechanism):
    name = "{mechanism}"
    summary = "for these tests"
    paper = Paper(title="None", authors="Nobody", year=2000)
    equation = "x"
    capabilities = frozenset()

    def build(self, config):
        raise NotImplementedError

    def cost(self, config, shape):
        raise NotImplementedError

@hookimpl
def attn_mechanisms():
    return [Made()]
"""

REPORT = """
import json
from attn_core import installed
catalog = installed()
plugins = [
    {"distribution": p.distribution, "name": p.name, "status": str(p.status), "reason": p.reason, "version": p.version}
    for p in catalog.plugins
]
print(json.dumps({"plugins": plugins, "mechanisms": catalog.mechanisms.names()}))
"""


def install(folder, distribution, code, **changes):
    """Put a distribution on a path as pip does: its module, its metadata and its entry points."""
    module = changes.get("module", distribution.replace("-", "_"))
    (folder / f"{module}.py").write_text(textwrap.dedent(code))
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {need}\n" for need in changes.get("needs", [f"attn-core>={version('attn-core')}"]))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n{needs}")
    points = changes.get("points", f"{changes.get('point', distribution)} = {module}")
    (info / "entry_points.txt").write_text(f"[attn.plugins]\n{points}\n")
    (info / "RECORD").write_text("")


def report(*paths, **environ):
    """What a fresh process finds with these folders on its path, before what the tests run in."""
    env = {name: value for name, value in os.environ.items() if name != "ATTN_PLUGINS"} | environ
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", REPORT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found["plugins"] = {f"{p['distribution']}:{p['name']}": p for p in found["plugins"]}
    return found


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    """Sound plugins among every kind of broken one, all in one process."""
    folder = tmp_path_factory.mktemp("site")
    install(folder, "aa-sound", MECHANISM.format(mechanism="first_sound"))
    install(folder, "bb-raises", "raise ValueError('no luck today')")
    install(folder, "bb-exits", "import sys; sys.exit(3)")
    install(folder, "bb-misspelt", "def (:")
    install(folder, "bb-missing-module", "", points="x = bb_not_there")
    install(folder, "bb-future", "raise RuntimeError('imported')", needs=["attn-core>=9"])
    install(folder, "bb-past", "raise RuntimeError('imported')", needs=["attn-core<0.1"])
    install(folder, "bb-needs", "raise RuntimeError('imported')", needs=["attn-core", "no-such-thing>=2"])
    install(folder, "bb-damaged", "raise RuntimeError('imported')", needs=["attn-core >>> 1"])
    install(folder, "bb-damaged-points", "", points="this line has no target")
    install(
        folder,
        "cc-optional",
        MECHANISM.format(mechanism="optional_needs"),
        needs=["attn-core", "no-such-thing; extra == 'gpu'", "no-such-thing; python_version < '3'"],
    )
    hook = "from attn_core import hookimpl\n@hookimpl\ndef {}:\n    {}\n"
    install(folder, "dd-hook-raises", hook.format("attn_mechanisms()", "raise KeyError('lost')"))
    install(folder, "dd-hook-exits", hook.format("attn_mechanisms()", "raise SystemExit(4)"))
    install(folder, "dd-hook-none", hook.format("attn_kernels()", "return None"))
    install(folder, "dd-hook-nameless", hook.format("attn_mechanisms()", "return [object()]"))
    half = hook.format("attn_mechanisms(flavour)", "return []") + hook.format("attn_caches()", "raise OSError")
    install(folder, "dd-hook-argument", half)
    install(folder, "dd-hook-unknown", hook.format("attn_flavours()", "return []"))
    install(folder, "ee-twin-one", MECHANISM.format(mechanism="twin"), point="twin")
    install(folder, "ee-twin-two", MECHANISM.format(mechanism="twin"), point="twin")
    twice = (
        MECHANISM.format(mechanism="twice")
        + "\n@hookimpl(specname='attn_mechanisms')\ndef more():\n    return [Made()]\n"
    )
    install(folder, "ff-twice", twice)
    install(folder, "gg-forgotten", MECHANISM.format(mechanism="forgotten").replace("@hookimpl", ""))
    half = hook.format("attn_mechanisms()", "return []") + "def attn_caches():\n    return []\n"
    install(folder, "gg-half-forgotten", half)
    install(folder, "gg-no-hook", "def attn_mechanism():\n    return []\n")
    install(folder, "zz-sound", MECHANISM.format(mechanism="last_sound"))
    return report(folder)


def test_sound_plugins_load_among_broken_ones(crowd):
    assert {"first_sound", "last_sound", "optional_needs"} <= set(crowd["mechanisms"])
    for name in ("aa-sound:aa-sound", "zz-sound:zz-sound"):
        assert crowd["plugins"][name] == {
            "distribution": name.partition(":")[0],
            "name": name.partition(":")[2],
            "status": "ok",
            "reason": "",
            "version": "1.0",
        }


@pytest.mark.parametrize(
    ("distribution", "status", "reason"),
    [
        ("bb-raises", "broken", "ValueError: no luck today"),
        ("bb-exits", "broken", "SystemExit: 3"),
        ("bb-misspelt", "broken", "SyntaxError"),
        ("bb-future", "incompatible", "requires attn-core>=9, but attn-core 0."),
        ("bb-past", "incompatible", "requires attn-core<0.1, but attn-core 0."),
        ("bb-needs", "missing dependency", "needs no-such-thing>=2, which is not installed"),
        ("bb-damaged", "broken", "metadata: "),
        ("dd-hook-raises", "broken", "attn_mechanisms: KeyError: 'lost'"),
        ("dd-hook-exits", "broken", "attn_mechanisms: SystemExit: 4"),
        ("dd-hook-none", "broken", "attn_kernels: TypeError"),
        ("dd-hook-nameless", "broken", "attn_mechanisms: AttributeError"),
        ("dd-hook-argument", "broken", "PluginValidationError"),
        ("dd-hook-unknown", "broken", "PluginValidationError"),
        ("gg-forgotten", "broken", "attn_mechanisms is not marked as a hook: decorate it with @attn_core.hookimpl"),
        ("gg-half-forgotten", "broken", "attn_caches is not marked as a hook"),
        ("gg-no-hook", "broken", "implements none of the hooks attn_mechanisms, "),
        ("ff-twice", "broken", "attn_mechanisms: InvalidValue: ff-twice registers the mechanism 'twice' twice"),
    ],
)
def test_a_broken_plugin_is_reported_with_its_reason(crowd, distribution, status, reason):
    found = crowd["plugins"][f"{distribution}:{distribution}"]
    assert found["status"] == status
    assert reason in found["reason"]


def test_what_does_not_fit_is_refused_before_it_is_imported(crowd):
    for name in ("bb-future", "bb-past", "bb-needs", "bb-damaged"):
        assert "imported" not in crowd["plugins"][f"{name}:{name}"]["reason"]


def test_an_entry_point_to_nothing_and_a_damaged_list_of_them_are_reported(crowd):
    assert "No module named 'bb_not_there'" in crowd["plugins"]["bb-missing-module:x"]["reason"]
    damaged = crowd["plugins"]["bb-damaged-points:"]
    assert damaged["status"] == "broken"
    assert damaged["reason"].startswith("entry_points.txt: ")


def test_an_optional_need_that_is_not_there_is_no_fault(crowd):
    assert crowd["plugins"]["cc-optional:cc-optional"]["status"] == "ok"


def test_a_plugin_that_registers_half_of_its_hooks_is_left_out_whole(crowd):
    # Its attn_caches would have raised OSError, had it been called.
    assert "OSError" not in crowd["plugins"]["dd-hook-argument:dd-hook-argument"]["reason"]


def test_two_distributions_may_use_one_entry_point_name(crowd):
    assert crowd["plugins"]["ee-twin-one:twin"]["status"] == "ok"
    assert crowd["plugins"]["ee-twin-two:twin"]["status"] == "ok"


def test_two_owners_of_one_mechanism_name_are_both_kept_in_full(crowd):
    assert {"ee-twin-one/twin", "ee-twin-two/twin"} <= set(crowd["mechanisms"])
    assert "twin" not in crowd["mechanisms"]


def test_a_built_in_name_stays_its_own_and_the_other_owner_is_told(tmp_path):
    install(tmp_path, "attn-engine", MECHANISM.format(mechanism="taken"))
    install(tmp_path, "hh-rival", MECHANISM.format(mechanism="taken"))
    found = report(tmp_path, ATTN_PLUGINS="attn-engine,hh-rival")
    assert found["mechanisms"] == ["hh-rival/taken", "taken"]
    told = {name: record["reason"] for name, record in found["plugins"].items() if record["status"] == "ok"}
    assert told["attn-engine:attn-engine"] == ""
    assert "attn-engine/taken" in told["hh-rival:hh-rival"]


def test_only_selected_distributions_are_loaded(tmp_path):
    install(tmp_path, "aa-sound", MECHANISM.format(mechanism="first_sound"))
    install(tmp_path, "bb-raises", "raise ValueError('imported')")
    install(tmp_path, "zz-sound", MECHANISM.format(mechanism="last_sound"))
    found = report(tmp_path, ATTN_PLUGINS=" AA_Sound ,")
    assert found["mechanisms"] == ["first_sound"]
    assert found["plugins"]["bb-raises:bb-raises"]["status"] == "not selected"
    assert found["plugins"]["zz-sound:zz-sound"]["reason"] == "ATTN_PLUGINS does not name zz-sound"


def test_a_process_says_which_plugins_were_installed_since_it_started(tmp_path):
    install(tmp_path, "aa-sound", MECHANISM.format(mechanism="first_sound"))
    for place in ("later", "staged"):
        (tmp_path / place).mkdir()
    install(tmp_path / "later", "zz-later", MECHANISM.format(mechanism="later"))
    code = """
        import os, sys
        from attn_core import installed
        from attn_core.errors import UnknownName
        for moved in ([], os.listdir("later")):
            for name in moved:
                os.rename(f"later/{name}", f"staged/{name}")
            try:
                installed().mechanisms.get("later")
            except UnknownName as error:
                print(error.metadata.get("installed_since", "nothing"))
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "staged")])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["nothing", "zz-later 1.0", ""]


def test_an_empty_selection_loads_nothing(tmp_path):
    install(tmp_path, "aa-sound", MECHANISM.format(mechanism="first_sound"))
    found = report(tmp_path, ATTN_PLUGINS="")
    assert found["mechanisms"] == []
    assert {plugin["status"] for plugin in found["plugins"].values()} == {"not selected"}


def test_the_first_distribution_of_a_name_on_the_path_shadows_the_second(tmp_path):
    for name in ("front", "behind"):
        (tmp_path / name).mkdir()
        install(tmp_path / name, "aa-sound", MECHANISM.format(mechanism=name))
    found = report(tmp_path / "front", tmp_path / "behind")
    assert "front" in found["mechanisms"]
    assert "behind" not in found["mechanisms"]
    assert found["plugins"]["aa-sound:aa-sound"]["status"] == "ok"


def test_metadata_is_read_of_distributions_with_plugins_only(tmp_path):
    """Three hundred others cost a look at their entry points each, or `attn list` would crawl."""
    install(tmp_path, "aa-sound", MECHANISM.format(mechanism="first_sound"))
    for number in range(3):
        info = tmp_path / f"other_{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").mkdir()  # opening it would raise IsADirectoryError
        (info / "entry_points.txt").write_text("[console_scripts]\nx = other:main\n")
    (tmp_path / "garbage-1.0.dist-info").mkdir()
    (tmp_path / "garbage-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe\x00")
    assert "first_sound" in report(tmp_path)["mechanisms"]
