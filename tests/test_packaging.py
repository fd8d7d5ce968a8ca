"""A built wheel works outside the checkout: it carries its specs, its GPU figures and its types."""

import configparser
import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh_python import python

import mha_deploy
from mha_deploy.catalog import catalog_names
from mha_deploy.errors import EXIT_PASSED

ROOT = Path(__file__).resolve().parents[1]

# The interpreter has the project installed as a link to the checkout; -I keeps the current folder and
# PYTHONPATH out, and the wheel comes before everything else.
RUN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import mha_deploy
print(mha_deploy.__file__, file=sys.stderr)
from mha_deploy.cli import main
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    if find_spec("hatchling") is not None:  # else pip fetches it
        command.insert(4, "--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the unpacked wheel, as an installation has it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wheel]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    return folder


@pytest.fixture
def run_installed(installed, tmp_path):
    """Run the command line of the wheel in a folder that is not the checkout."""

    def run(*arguments):
        done = python(RUN, installed, *arguments, options=["-I"], cwd=tmp_path)
        origin = done.stderr.splitlines()[0]
        assert Path(origin).is_relative_to(installed), f"the checkout was imported: {origin}"
        return done

    return run


def members(wheel):
    with zipfile.ZipFile(wheel) as file:
        return set(file.namelist())


def test_the_wheel_carries_data_and_types(wheel):
    names = members(wheel)
    assert {"mha_deploy/py.typed", "mha_deploy/analyze/gpus.toml"} <= names
    assert {f"mha_deploy/models/{name}.toml" for name in catalog_names()} <= names


def test_the_wheel_carries_the_source_of_the_plugins(wheel):
    source = ROOT / "plugins"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {f"mha_deploy/plugins/native/{name}" for name in files} <= members(wheel)
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
    assert commands["console_scripts"]["mha-deploy"] == "mha_deploy.cli:main"
    required = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert any("onnx-ir" in line for line in required)
    assert not any("torch" in line or "onnxruntime" in line for line in required)


def test_an_installed_wheel_finds_its_specs(run_installed):
    done = run_installed("models", "--all", "--json")
    assert done.returncode == EXIT_PASSED, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == catalog_names()


def test_an_installed_wheel_finds_its_gpu_figures(run_installed):
    done = run_installed("analyze", "bert-base", "--gpu", "rtx-4090", "--json")
    assert done.returncode == EXIT_PASSED, done.stderr
    assert json.loads(done.stdout)["gpu"]["name"] == "RTX 4090"


def test_an_installed_wheel_validates_a_bundle(run_installed, bundles):
    done = run_installed("validate", bundles("tiny-gqa").path, "--json")
    assert done.returncode == EXIT_PASSED, done.stderr
    assert json.loads(done.stdout)["verdict"]["passed"] is True


def test_an_installed_wheel_knows_its_version(run_installed):
    assert run_installed("--version").stdout == f"mha-deploy {mha_deploy.__version__}\n"
