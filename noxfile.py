"""The nox sessions with all checks of this repository; `nox -l` lists them.

`demo`, `tests`, `types`, `imports` and `docs` need every package. All but `demo` share one environment, `dev`, which is
created once (torch is large) and recreated when a manifest or a pin changes. Packages are never listed here:
tools/workspace.py reads them from the tree.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import nox
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import releases  # noqa: E402 -- these four lie in the folder that the line above adds
import shipping  # noqa: E402
import simple_index  # noqa: E402
import workspace  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # uv does not find a torch wheel that pip finds through find-links
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "imports", "protos", "tests"]

PACKAGES = workspace.packages()
GROUPS = nox.project.load_toml(ROOT / "pyproject.toml")
PYTHONS = workspace.PYTHONS
PYTHON = PYTHONS[0]  # the only one with a CPU wheel of torch available; packages without torch are tested on all
CONSTRAINTS = ROOT / "constraints.txt"
WHEELS = ROOT / "dist"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
ON_TWO_CORES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--longest-first"]
ON_TWO_CORES += ["--record-durations", str(ROOT / "out" / "durations.json")]
"""How a whole run is shared out; `python tools/durations.py out/durations.json` keeps what it took."""


def group(*names: str) -> tuple[str, ...]:
    """The requirements of dependency groups of the root pyproject.toml."""
    return nox.project.dependency_groups(GROUPS, *names)


def install(session: nox.Session, *requirements: str) -> None:
    """Install with the pins of constraints.txt."""
    session.install("-qq", "-c", str(CONSTRAINTS), *requirements)


def install_torch(session: nox.Session) -> None:
    """Install torch before any package that requires torch>=..., which would install a build with CUDA."""
    install(session, *group("torch"))


def refuse_cuda(session: nox.Session, freeze: str | None = None) -> None:
    """Fail if a requirement installed gigabytes of CUDA packages; set ATTN_ALLOW_CUDA=1 to allow them.

    `freeze` is what `pip list` says of another environment than the session's.
    """
    if os.environ.get("ATTN_ALLOW_CUDA") == "1":
        return
    if found := [name for name in installed(session, freeze) if name.startswith("nvidia-") or name == "torchvision"]:
        session.error(f"{', '.join(found)} must not be installed here; constraints.txt pins torch, install it first")


def installed(session: nox.Session, freeze: str | None = None) -> set[str]:
    """The names of the distributions in the session's environment, or in what `pip list` said of another."""
    listed = freeze or session.run("python", "-m", "pip", "list", "--format=freeze", silent=True) or ""
    return {canonicalize_name(line.split("==")[0]) for line in listed.splitlines() if "==" in line}


def install_everything(session: nox.Session, packages: list[workspace.Package], *groups: str) -> None:
    """Install packages in editable mode, with tools; do nothing if the environment is up to date."""
    wanted = hashlib.sha256()
    manifests = [package.folder / "pyproject.toml" for package in packages]
    for path in [ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__), *manifests]:
        wanted.update(path.read_bytes())
    stamp = Path(session.virtualenv.location) / "workspace.sha256"
    if stamp.exists() and stamp.read_text() == wanted.hexdigest():
        session.log("the environment is up to date")
        return
    stamp.unlink(missing_ok=True)
    install_torch(session)
    install(session, *group("build"))
    # One command, so that pip resolves attn's packages to each other and never to an index.
    install(session, "--no-build-isolation", *editable(packages), *group(*groups))
    refuse_cuda(session)
    session.run("python", "-m", "pip", "check")
    stamp.write_text(wanted.hexdigest())


def editable(packages: list[workspace.Package]) -> list[str]:
    """pip arguments: packages of this tree in editable mode, and external requirements of their extras and tests."""
    extras = {need for package in packages for need in package.extras + package.test_needs}
    others = sorted(str(need) for need in extras if need.name not in PACKAGES)
    return [argument for package in packages for argument in ("-e", str(package.folder))] + others


def scripts_of(other: str, session: nox.Session) -> Path:
    """The folder of the programs in the environment of another session."""
    return Path(session.cache_dir).parent / other / ("Scripts" if os.name == "nt" else "bin")


def run_in(other: str, session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program from the environment of another session."""
    scripts = scripts_of(other, session)
    path = os.pathsep.join([str(scripts), os.environ.get("PATH", "")])
    session.run(str(scripts / program), *arguments, env={**ENVIRONMENT, "PATH": path}, external=True)


@nox.session(python=PYTHON)
def dev(session: nox.Session) -> None:
    """Create the development environment .nox/dev: every package in editable mode, and every tool."""
    install_everything(session, list(PACKAGES.values()), "test", "peers", "lint", "types", "imports", "docs")


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """Run all tests, or those given after --: nox -s tests -- packages/attn-core -k mask."""
    run_in("dev", session, "python", "-m", "pytest", *(session.posargs or [*ON_TWO_CORES, "--durations", "15"]))


@nox.session(venv_backend="none", requires=["dev"], default=False)
def nightly(session: nox.Session) -> None:
    """Run all tests with every case of the laws, and those whose package has no minutes for them in `tests`."""
    options = ["-m", "not oracle and not cluster", "--every-case", *ON_TWO_CORES]
    run_in("dev", session, "python", "-m", "pytest", *options, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def quick(session: nox.Session) -> None:
    """Run lint, import contracts and some tests of every package, in under three minutes.

    Tests that do not fit into the time are reported as skipped; `nox -s quick -- packages/attn-core` spends all of the
    time on one package.
    """
    run_in("dev", session, "ruff", "check")
    run_in("dev", session, "ruff", "format", "--check")
    run_in("dev", session, "lint-imports")
    tests = ["--quick", "90", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q"]
    run_in("dev", session, "python", "-m", "pytest", *tests, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def types(session: nox.Session) -> None:
    """Run mypy in strict mode on the sources of every package, and mypy and pyright on what callers write wrongly."""
    modules = [module for package in PACKAGES.values() for module in package.imports]
    run_in("dev", session, "mypy", *(argument for module in modules for argument in ("-p", module)))
    typed = [f"tests/{folder}" for folder in ("architecture", "public_api", "support", "types")]
    run_in("dev", session, "mypy", "noxfile.py", "tools", *typed)
    run_in("dev", session, "pyright", "-p", "tests/types", "--pythonpath", str(scripts_of("dev", session) / "python"))


@nox.session(venv_backend="none", requires=["dev"])
def imports(session: nox.Session) -> None:
    """Check the import contracts between packages and modules (.importlinter)."""
    run_in("dev", session, "lint-imports", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def cluster(session: nox.Session) -> None:
    """Run the tests that need several replicas, machines or minutes, such as killing replicas for five minutes.

    `ATTN_CHAOS_REPORT` names a file for the measurements of those five minutes; `benchmarks/chaos_gaps.py` draws them.
    """
    for path in sorted(path for package in PACKAGES.values() for path in package.tests.rglob("test_*.py")):
        # Ray Serve leaves threads that fail when another Ray starts, so each file runs in a process of its own.
        if "mark.cluster" in path.read_text("utf-8"):
            options = ["-m", "cluster", "-s", "--timeout", "900", *session.posargs]
            run_in("dev", session, "python", "-m", "pytest", *options, str(path))


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Run ruff: lint rules and format. `nox -s lint -- --fix` repairs what it can."""
    install(session, *group("lint"), "packaging")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *session.posargs)
    session.run("python", "tools/sync_client.py", *([] if fix else ["--check"]))
    session.run("ruff", "format", *([] if fix else ["--check"]))


@nox.session(python=PYTHON)
def protos(session: nox.Session) -> None:
    """Check that the committed stubs match the .proto files. `nox -s protos -- --write` generates them."""
    generate = nox.project.dependency_groups(nox.project.load_toml(ROOT / "proto" / "pyproject.toml"), "generate")
    # Pinned there: the generator's version determines which protobuf versions can import the stubs.
    session.install("-qq", *generate)
    session.run("python", "proto/generate.py", *([] if "--write" in session.posargs else ["--check"]))


@nox.session(python=PYTHON)
def oracles(session: nox.Session) -> None:
    """Run the tests that compare with independent implementations which are not installed in `dev`."""
    install_everything(session, list(PACKAGES.values()), "test", "peers", "oracles")
    session.install("-qq", "--no-deps", *group("oracles-alone"))
    session.run("python", "-m", "pytest", "-m", "oracle", *session.posargs, env=ENVIRONMENT)


@nox.session(python=PYTHON, default=False)
@nox.parametrize("compiler", ["triton-oldest", "triton-of-torch"])
def triton(session: nox.Session, compiler: str) -> None:
    """Run all checks of the GPU kernels with the oldest supported Triton and with torch's; `tests` uses the newest."""
    tested = workspace.closure(workspace.tested_with("attn-kernels-triton", PACKAGES), PACKAGES)
    session.install("-qq", *group("torch", "build", "test", compiler))
    session.install("-qq", "--no-build-isolation", *editable([PACKAGES[name] for name in sorted(tested)]))
    refuse_cuda(session)
    session.run("python", "-m", "pytest", "-m", "", "packages/attn-kernels-triton", *session.posargs, env=ENVIRONMENT)


@nox.session(name="gpu-kit", venv_backend="none", default=False)
def gpu_kit(session: nox.Session) -> None:
    """Lay what benchmarks/gpu needs beside torch and transformers in out/gpu-kit, for the Python given after --."""
    version = session.posargs[0] if session.posargs else "3.12"
    session.run(sys.executable, "benchmarks/gpu/kit.py", version, *group("gpu-kit"), external=True)


@nox.session(venv_backend="none", requires=["oracles"], default=False)
def proof(session: nox.Session) -> None:
    """Run all tests of mechanisms with all oracles, and write the results to docs/proof.md and the mechanisms' pages.

    With tests given after --, only their results are updated: nox -s proof -- plugins/attn-sparse/tests.
    """
    report = Path(session.create_tmp()).resolve() / "report.xml"
    tests = session.posargs or ["packages/attn-variants/tests", *map(str, sorted(ROOT.glob("plugins/*/tests")))]
    options = ["-m", "", "--every-case", "-n", "2", "--junitxml", str(report), "-o", "junit_family=xunit1"]
    run_in("oracles", session, "python", "-m", "pytest", *options, *tests)
    run_in("oracles", session, "python", "tools/proof.py", "record", str(report))
    run_in("oracles", session, "python", "tools/mechanism_pages.py")


@nox.session(python=PYTHON, requires=["dev"], default=False)
def foreign(session: nox.Session) -> None:
    """Open every decoder's recipe in an environment that has transformers only, and write docs/foreign-tools.md."""
    install_torch(session)
    install(session, "transformers", "accelerate")
    refuse_cuda(session)
    run_in("dev", session, "python", "tools/foreign_recipes.py", str(Path(session.bin) / "python"))


@nox.session(python=PYTHON, default=False)
def conformance(session: nox.Session) -> None:
    """Ask the laws of attention of other packages at their pinned versions, and write docs/conformance.md."""
    judging = workspace.closure({"attn-testing"}, PACKAGES)
    session.install("-qq", *group("torch", "build", "conformance"))
    session.install("-qq", "--no-build-isolation", *editable([PACKAGES[name] for name in sorted(judging)]))
    refuse_cuda(session)
    session.run("python", "tools/conformance.py", *session.posargs, env=ENVIRONMENT)


@nox.session(python=PYTHON)
def demo(session: nox.Session) -> None:
    """Run the demo, from a fresh environment to a trained and served model; arguments after -- are passed to it."""
    install_everything(session, [package for package in PACKAGES.values() if not package.is_plugin])
    plugins = [package.name for package in PACKAGES.values() if package.is_plugin]
    if present := sorted(set(plugins) & installed(session)):
        # The demo installs a third-party plugin itself, so one that an earlier run installed is removed.
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *present)
    session.run("python", "demo/run.py", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def clients(session: nox.Session) -> None:
    """Run other people's clients against the server; write docs/clients.md and what they send, for `tests`."""
    folder = Path(session.create_tmp()).resolve()
    found = [f"node={folder}"]
    for name in ("clients", "clients-agents", "clients-crewai", "clients-measures", "clients-proxy"):
        python = str(folder / name / "bin" / "python")
        session.run(sys.executable, "-m", "venv", str(folder / name), external=True)
        session.run(python, "-m", "pip", "install", "-qq", *group(name), external=True)
        found.append(f"{name}={python}")
    shutil.copy(ROOT / "tests" / "clients" / "package.json", folder)
    session.run("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), external=True)
    run_in("dev", session, "python", "tests/clients/run.py", *found)


@nox.session(venv_backend="none", requires=["dev"])
def docs(session: nox.Session) -> None:
    """Build the documentation in dist/site and run its examples; a warning or a dead link is an error."""
    site = ["-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs/site", "-b", "html", ".", str(WHEELS / "site")]
    run_in("dev", session, "python", *site)
    run_in("dev", session, "python", "-m", "pytest", "tests/docs", *session.posargs)


@nox.session(python=PYTHON, default=False)
def deploy(session: nox.Session) -> None:
    """Check the files in deploy/ with hadolint, Helm and Kubernetes' schemas."""
    served = workspace.closure({"attn-cli", "attn-openai"}, PACKAGES)
    install(session, *group("build", "test", "deploy"))
    install(session, "--no-build-isolation", *editable([PACKAGES[name] for name in sorted(served)]))
    session.run("python", "-m", "pytest", "tests/deploy", *session.posargs, env=ENVIRONMENT)


@nox.session(python=PYTHON)
def lock(session: nox.Session) -> None:
    """Update constraints.txt to the newest releases that the manifests allow."""
    session.install("-qq", "packaging")
    session.run("python", "tools/lock.py", *session.posargs)


@nox.session(python=PYTHON)
def wheels(session: nox.Session) -> None:
    """Build every package's wheel in dist/."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    install(session, *group("build"))
    folders = [str(package.folder) for package in PACKAGES.values()]
    build_wheels(session, WHEELS, *folders)


CROSS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
"""The compiler for each processor architecture with compiled wheels, by its name in Debian."""


@nox.session(python=PYTHON)
def wheels_cpu(session: nox.Session) -> None:
    """Build wheels of attn-kernels-cpu with compiled kernels in dist/manylinux, for each installed compiler."""
    folder, made = ROOT / "packages" / "attn-kernels-cpu", Path(session.create_tmp()).resolve() / "made"
    shutil.rmtree(made, ignore_errors=True)
    install(session, *group("build", "manylinux"), "filelock", str(ROOT / "packages" / "attn-core"))
    session.install("-qq", "--no-deps", "--no-build-isolation", "-e", str(folder))
    for machine, compiler in CROSS.items():
        if shutil.which(compiler) is None:
            session.warn(f"no wheel for {machine}: {compiler} is not installed")
            continue
        kernels = str(made / machine)
        session.run("python", "-m", "attn_kernels_cpu.prebuild", machine, kernels, env={"CXX": compiler})
        session.env.update(ATTN_KERNELS_CPU_PREBUILT=kernels, ATTN_KERNELS_CPU_MACHINE=machine)
        build_wheels(session, made, str(folder))
        # Use torch's own OpenMP library, so that both share one thread pool.
        options = ["--exclude", "libgomp.so.1", "--wheel-dir", str(WHEELS / "manylinux")]
        session.run("auditwheel", "repair", *options, *map(str, made.glob(f"*_{machine}.whl")))


def build_wheels(session: nox.Session, target: Path, *folders: str) -> None:
    """Build the wheels of these folders in `target`, with the session's own hatchling."""
    options = ["-qq", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    session.run("python", "-m", "pip", "wheel", *options, *folders)


def wheel_of(name: str, folder: Path = WHEELS) -> str:
    """The path of the one wheel of a package in a folder."""
    (wheel,) = folder.glob(f"{name.replace('-', '_')}-*.whl")
    return str(wheel)


def supported(names: list[str]) -> list[nox.param]:
    """Parameters (python, package) of `workspace.alone_on`; `nox -t light` runs those without torch in minutes."""
    return [
        nox.param(python, name, id=name if python == PYTHON else f"{name}-{python}", tags=["light"] if light else [])
        for name in names
        for python, light in workspace.alone_on(name, PACKAGES).items()
    ]


def install_exactly(session: nox.Session, names: set[str], wheels: dict[str, str]) -> None:
    """Install the wheels of the packages and their declared dependencies, and no other package of this tree."""
    declared = workspace.closure(names, PACKAGES)
    if strays := (installed(session) & set(PACKAGES)) - declared:
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *sorted(strays))
    if workspace.needs_torch(declared, PACKAGES):
        install_torch(session)
    local = [wheels.get(name) or wheel_of(name) for name in sorted(declared)]
    # In a reused environment pip would keep, and test, a stale wheel of the same version.
    session.install("-qq", "--force-reinstall", "--no-deps", *local)
    install(session, *local)
    session.run("python", "-m", "pip", "check")
    refuse_cuda(session)
    if (present := installed(session) & set(PACKAGES)) != declared:
        session.error(f"{', '.join(sorted(names))}: declared {sorted(declared)}, installed {sorted(present)}")


def run_tests_of(session: nox.Session, names: list[str], wheels: dict[str, str]) -> None:
    """Import every module with the declared dependencies only, then install what the tests need and run them."""
    packages = [PACKAGES[name] for name in names]
    modules = [module for package in packages for module in package.imports]
    session.run("python", "tools/import_all.py", *modules, env=ENVIRONMENT)
    if (local := set[str]().union(*(workspace.tested_with(name, PACKAGES) for name in names))) != set(names):
        install_exactly(session, local, wheels)
    needs = [need for package in packages for need in package.test_needs]
    install(session, *group("test"), *sorted({str(need) for need in needs if need.name not in PACKAGES}))
    options = ["--every-case"] * packages[0].is_plugin + [str(package.tests) for package in packages]
    session.run("python", "-m", "pytest", *options, *session.posargs, env=ENVIRONMENT)


@nox.session(requires=["wheels"], default=False)
@nox.parametrize("python,package", supported([name for name, package in PACKAGES.items() if not package.is_plugin]))
def alone(session: nox.Session, package: str) -> None:
    """Test one package's wheel with only its declared dependencies installed."""
    install_exactly(session, {package}, {})
    run_tests_of(session, [package], {})


@nox.session(python=PYTHONS[1:], requires=["wheels"], default=False, tags=["light"])
def pythons(session: nox.Session) -> None:
    """Test the wheels of all packages without torch and Ray together, on the Pythons where `alone` tests none alone."""
    names = [name for name in PACKAGES if not workspace.tested_needing("torch", "ray", name=name, tree=PACKAGES)]
    install_exactly(session, set(names), {})
    run_tests_of(session, names, {})


@nox.session(requires=["wheels"], default=False)
@nox.parametrize("core", ["min", "latest"], ids=["min", "latest"])
@nox.parametrize("python,plugin", supported([name for name, package in PACKAGES.items() if package.is_plugin]))
def plugin(session: nox.Session, plugin: str, core: str) -> None:
    """Test one plugin with the oldest attn-core that it supports (min), and with this tree's (latest)."""
    wheels = {"attn-core": oldest_core(session, PACKAGES[plugin])} if core == "min" else {}
    install_exactly(session, {plugin}, wheels)
    run_tests_of(session, [plugin], wheels)


def oldest_core(session: nox.Session, plugin: workspace.Package) -> str:
    """The wheel of the oldest attn-core that a plugin supports: a release of releases.toml, else this tree's."""
    version, commit = releases.oldest(plugin, PACKAGES["attn-core"])
    if commit is None:
        return wheel_of("attn-core")
    target = Path(session.create_tmp()) / f"attn-core-{version}"
    install(session, *group("build"))
    build_wheels(session, target, str(releases.unpack(commit, target)))
    return wheel_of("attn-core", target)


@nox.session(python=PYTHON, default=False)
def changelog(session: nox.Session) -> None:
    """Print the entries that the fragments of changelog.d make; `-- --write` turns them into versions and changelogs.

    It writes the next version of every package that has fragments, the ranges of those that need it, CHANGELOG.md
    beside each manifest and releases.toml, to be committed.
    """
    install(session, *group("changelog"), "packaging")
    session.run("python", "tools/releases.py", *([] if "--write" in session.posargs else ["--draft"]))


@nox.session(python=PYTHON, requires=["wheels"], default=False)
def release(session: nox.Session) -> None:
    """Build a release in dist/ (wheels, source archives, notes, bill of materials, hashes); check that it installs.

    `nox -s changelog -- --write` comes before it, and a commit. With `-- --tag` the commit is then tagged with the
    versions that are new, which are noted in releases.toml. Uploading is left to the index's own action, which attests
    the origin of the files.
    """
    install(session, *group("build", "release"), "packaging")
    for package in PACKAGES.values():
        with session.chdir(package.folder):
            session.run("hatchling", "build", "-t", "sdist", "-d", str(WHEELS), silent=True)
    fresh = Path(session.create_tmp()) / "fresh"
    session.run("python", "-m", "virtualenv", "--clear", "--quiet", str(fresh))
    python = str(fresh / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-qq", "-c", str(CONSTRAINTS)]
    session.run(*pip, *group("torch"), external=True)
    versions = [f"{name}=={one.version}" for name, one in PACKAGES.items()]
    session.run(*pip, "--find-links", str(WHEELS), *versions, external=True)
    session.run(python, "-m", "pip", "check", external=True)
    session.run(str(fresh / "bin" / "attn"), "doctor", external=True)
    session.run("cyclonedx-py", "environment", python, "-o", str(WHEELS / "attn.cdx.json"))
    session.log(f"notes: {shipping.write_notes(WHEELS)}, hashes: {shipping.write_sums(WHEELS)}")
    if "--tag" in session.posargs:
        session.run("python", "tools/releases.py", "--tag")


@nox.session(python=PYTHON, requires=["wheels"], default=False)
def index(session: nox.Session) -> None:
    """Write a static package index of all wheels to dist/simple, and install from it as a reader of README would.

    Each line of README's section Install, and a plugin made from the template under a name of its own, goes into an
    environment of its own.
    """
    install(session, *group("build", "release"))
    mine = Path(session.create_tmp()) / "attn-mine"
    shutil.rmtree(mine, ignore_errors=True)
    shutil.copytree(PACKAGES["attn-plugin-template"].folder, mine)
    for path in [path for path in mine.rglob("*") if path.is_file() and path.suffix in {".py", ".toml", ".md"}]:
        text = path.read_text("utf-8").replace("plugin-template", "mine").replace("plugin_template", "mine")
        path.write_text(text.replace("kerple", "mine"), "utf-8")
    (mine / "src" / "attn_plugin_template").rename(mine / "src" / "attn_mine")
    build_wheels(session, mine / "dist", str(mine))
    archives = [*WHEELS.glob("*.whl"), *(mine / "dist").glob("*.whl")]
    projects = simple_index.write_index(archives, WHEELS / "simple")
    session.log(f"{WHEELS / 'simple'}: {', '.join(projects)}")
    index = ["--index-url", (WHEELS / "simple").as_uri(), "--extra-index-url", "https://pypi.org/simple"]
    mechanism = shipping.InstallSet(("attn-cli", "attn-mine"), ("list",))
    fresh = Path(session.create_tmp()) / "fresh"
    for line in [*shipping.install_sets(), mechanism]:
        session.run("python", "-m", "virtualenv", "--clear", "--quiet", str(fresh))
        pip = [str(fresh / "bin" / "python"), "-m", "pip", "install", "-qq", "-c", str(CONSTRAINTS)]
        if workspace.needs_torch(workspace.closure(set(line.packages) & set(PACKAGES), PACKAGES), PACKAGES):
            session.run(*pip, *group("torch"), external=True)
        session.run(*pip, *index, *line.packages, external=True)
        refuse_cuda(session, session.run(*pip[:3], "list", "--format=freeze", silent=True, external=True) or "")
        session.run(*pip[:3], "check", external=True)
        for command in line.commands:
            session.run(str(fresh / "bin" / "attn"), command, "--help", silent=True, external=True)
    listed = session.run(str(fresh / "bin" / "attn"), "list", "mechanisms", silent=True, external=True)
    if "mine" not in str(listed):
        session.error(f"the plugin attn-mine is installed, but its mechanism is not listed:\n{listed}")
