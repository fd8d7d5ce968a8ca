"""A built wheel works outside the checkout: it carries its specs, its GPU figures and its types."""

import configparser
import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh_python import run_all

import mha_deploy
from mha_deploy.errors import EXIT_PASSED
from mha_deploy.model.catalog import catalog_names

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["hatchling", "build", "-t", "wheel", "-d", folder]
    if find_spec("hatchling") is None:  # pip fetches it
        command = ["pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


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
    assert {"mha_deploy/py.typed", "mha_deploy/analyze/gpus.toml"} <= names
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
