"""A built wheel works outside the checkout: it carries its specs, its GPU figures and its types."""

import configparser
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh_python import run_all

import mha_deploy
from mha_deploy.errors import EXIT_PASSED
from mha_deploy.model.catalog import catalog_names

ROOT = Path(__file__).resolve().parents[1]


def build(kind, source, folder):
    """The wheel or the sdist of a source tree."""
    command = ["hatchling", "build", "-t", kind, "-d", folder]
    if find_spec("hatchling") is None:  # pip fetches it
        assert kind == "wheel"
        command = ["pip", "wheel", "--quiet", "--no-deps", "-w", folder, source]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist of this checkout."""
    pytest.importorskip("hatchling")
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel, bundles, tmp_path_factory):
    """What the command line of the unpacked wheel does, in a folder that is not the checkout.

    The interpreter has the project installed as a link to the checkout; -I keeps the current folder and
    PYTHONPATH out, and the wheel comes before everything else.
    """
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    before = f"""
import sys
sys.path.insert(0, {str(site)!r})
import mha_deploy
if not mha_deploy.__file__.startswith({str(site)!r}):
    sys.exit(f"the checkout was imported: {{mha_deploy.__file__}}")
"""
    commands = {
        "models": ("--all", "--json"),
        "analyze": ("bert-base", "--gpu", "rtx-4090", "--json"),
        "inspect": (bundles("tiny-gqa").path, "--json"),
        "--version": (),
    }
    steps = [("mha-deploy", verb, *arguments) for verb, arguments in commands.items()]
    done = run_all(*steps, before=before, options=["-I"], cwd=tmp_path_factory.mktemp("elsewhere"))
    return dict(zip(commands, done, strict=True))


def members(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_carries_data_and_types(wheel):
    names = members(wheel)
    assert {"mha_deploy/py.typed", "mha_deploy/analysis/gpus.toml"} <= names
    assert {"mha_deploy/report/style.css", "mha_deploy/report/templates/page.html.j2"} <= names
    assert {f"mha_deploy/models/{name}.toml" for name in catalog_names()} <= names


def test_the_wheel_carries_the_source_of_the_plugins(wheel):
    source = ROOT / "plugins"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {f"mha_deploy/native/{name}" for name in files} <= members(wheel)
    assert "CMakeLists.txt" in files


def test_the_wheel_carries_every_module_and_no_tests(wheel):
    package = Path(mha_deploy.__file__).parent
    modules = {f"mha_deploy/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    names = members(wheel)
    assert modules <= names
    strays = {name for name in names if not name.startswith(("mha_deploy/", "mha_deploy-"))}
    assert strays == set()


def test_the_wheel_has_the_command_and_asks_for_no_torch(wheel):
    with zipfile.ZipFile(wheel) as file:
        info = f"{wheel.name.split('-py3')[0]}.dist-info"
        commands = configparser.ConfigParser()
        commands.read_string(file.read(f"{info}/entry_points.txt").decode())
        metadata = file.read(f"{info}/METADATA").decode()
    assert commands["console_scripts"]["mha-deploy"] == "mha_deploy.__main__:main"
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert any("onnx-ir" in line for line in required)
    assert not any("torch" in line or "onnxruntime" in line for line in required)


def test_an_installed_wheel_finds_its_specs(installed):
    done = installed["models"]
    assert done.code == EXIT_PASSED, done.err
    assert [row["name"] for row in json.loads(done.out)] == catalog_names()


def test_an_installed_wheel_finds_its_gpu_figures(installed):
    done = installed["analyze"]
    assert done.code == EXIT_PASSED, done.err
    assert json.loads(done.out)["gpu"]["name"] == "RTX 4090"


def test_an_installed_wheel_opens_a_bundle(installed):
    done = installed["inspect"]
    assert done.code == EXIT_PASSED, done.err
    assert json.loads(done.out)["hashes"] == "match"


def test_an_installed_wheel_knows_its_version(installed):
    assert installed["--version"].out == f"mha-deploy {mha_deploy.__version__}\n"


@pytest.mark.slow
def test_an_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = build("wheel", source, tmp_path / "again")
    assert (again.name, members(again)) == (wheel.name, members(wheel))


def test_the_sdist_carries_what_the_tests_and_pages_read(sdist):
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a checkout")
    present = {name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}
    assert {name for name in present - names if not name.startswith(".docker")} == set()
    assert not any(name.startswith((".venv", "bundles/", "dist/")) for name in names)


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as file:
        return message_from_string(file.read(f"{wheel.name.split('-py3')[0]}.dist-info/METADATA").decode())


def test_the_index_shows_links_authors_and_the_pythons_that_are_tested(wheel):
    found = metadata_of(wheel)
    links = dict(text.split(", ", 1) for text in found.get_all("Project-URL"))
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= links.keys()
    assert all(link.startswith("https://") for link in links.values())
    assert found["Author"]
    classifiers = found.get_all("Classifier")
    versions = {text.rpartition(" ")[2] for text in classifiers if re.search(r":: 3\.\d+$", text)}
    tested = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        tested |= set(re.findall(r'python(?:-version)?: "(3\.\d+)"', path.read_text(encoding="utf-8")))
    assert versions == tested
    assert f">={min(versions, key=lambda text: int(text[2:]))}" == found["Requires-Python"]


def test_the_changelog_begins_with_this_version():
    (first, *_) = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert mha_deploy.__version__.split(".")[: len(first.split("."))] == first.split(".")


WORKFLOWS = [*(ROOT / ".github").rglob("*.yml"), *(ROOT / "examples/ci").glob("*.yml")]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_well_formed_and_uses_files_that_exist(path):
    yaml = pytest.importorskip("yaml")
    text = path.read_text(encoding="utf-8")
    found = yaml.safe_load(text)
    if path.parent.name == "workflows":
        assert found["name"] == path.stem
        assert found[True]  # what YAML makes of `on`
        for job in found["jobs"].values():
            assert "uses" in job or (job["runs-on"] and job["steps"])
            assert set([job.get("needs", [])] if isinstance(job.get("needs"), str) else []) <= set(
                found["jobs"]
            )
        for name in re.findall(r"uses: \./(\S+)", text):
            assert (ROOT / name).is_file()
        for name in re.findall(r"(?<![\w/])(\.ci/\w+)", text):
            assert os.access(ROOT / name, os.X_OK)


@pytest.mark.parametrize(
    "path", [*(ROOT / "docker").iterdir(), *WORKFLOWS, ROOT / "README.md"], ids=lambda path: path.name
)
def test_every_extra_that_is_installed_exists(path, wheel):
    extras = set(metadata_of(wheel).get_all("Provides-Extra"))
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"(?:'\.|\.whl\)|\.file \}\}\))\[([\w,-]+)\]", text)
    assert {extra for names in named for extra in names.split(",")} <= extras
    if path.suffix == ".Dockerfile":
        assert named


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_installs_and_runs_in_a_clean_environment(kind, request, tmp_path):
    """It takes minutes: all for a machine without a GPU is installed, and the main job of the README done."""
    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def call(*command):
        done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(home / "bin/pip", "install", "--quiet", f"{request.getfixturevalue(kind)}[cpu]")
    assert "NOT VERIFIED" in call(home / "bin/mha-deploy", "deploy", "bert-base")
    assert call(home / "bin/python", "-m", "mha_deploy", "--version").split()[1] == mha_deploy.__version__
