"""What a machine must have: the deploy side works without PyTorch, and imports go in one direction."""

import ast
import json
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import islice

import pytest
from fresh_python import RUNTIMES, python, run_all
from source_trees import PACKAGE, nodes_of, source_trees

from mha_deploy.cli import app

FILES = {
    ".".join(("mha_deploy", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TORCH_PACKAGES = ("mha_deploy.reference", "mha_deploy.exporter", "mha_deploy.baselines")
TORCH_FREE = {"mha_deploy.exporter", "mha_deploy.baselines"} | {
    f"mha_deploy.exporter.{name}" for name in ("entry", "flow", "fusion")
}
EXPORT_SIDE = {name for name in FILES if name.startswith(TORCH_PACKAGES)} - TORCH_FREE
DEPLOY_SIDE = [name for name in FILES if name not in EXPORT_SIDE]


def path_of(name):
    return FILES[name].relative_to(PACKAGE).as_posix()


@cache
def imported_modules(name):
    """The modules that a module of the project imports anywhere in its text, as absolute names."""
    return modules_of(name, nodes_of(path_of(name)))


def imported_at_once(name):
    """Those that it imports while it is itself imported, not later in a function."""
    return modules_of(name, run_on_import(source_trees()[path_of(name)].body))


def run_on_import(nodes):
    """The statements of imports that run when a module does."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            only_typed = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from () if only_typed else run_on_import(node.body)
            for part in ("handlers", "orelse", "finalbody"):
                yield from run_on_import(getattr(node, part, ()))
        elif isinstance(node, ast.ExceptHandler):
            yield from run_on_import(node.body)


def modules_of(name, nodes):
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = names & set(FILES)  # `from package import module` asks for the module
            found |= modules if modules == names else {node.module, *modules}
    return found


def under(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# -- what is not there ---------------------------------------------------------------------------


def test_the_list_of_modules_is_not_empty():
    assert {"mha_deploy.bundle.folder", "mha_deploy.metrics", "mha_deploy.cli", "mha_deploy.exporter"} < set(
        DEPLOY_SIDE
    )
    assert set(FILES) >= EXPORT_SIDE
    assert not EXPORT_SIDE & set(DEPLOY_SIDE)


def test_every_module_can_be_the_first_import():
    """None imports itself on the way: then the order does not matter, and no child for each is needed."""
    TopologicalSorter({name: imported_at_once(name) & set(FILES) for name in FILES}).prepare()


def test_a_circle_of_imports_is_detected():
    source = """
import a
if TYPE_CHECKING:
    import b
try:
    import c
except E:
    import d
def f():
    import e
"""
    names = [alias.name for node in run_on_import(ast.parse(source).body) for alias in node.names]
    assert names == ["a", "c", "d"]
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


@pytest.fixture(scope="module")
def without_torch(bundles, tmp_path_factory):
    """What a machine without PyTorch does, by the name of the step."""
    target = tmp_path_factory.mktemp("no-torch") / "bundle"
    steps = {
        "deploy side": ("import", *DEPLOY_SIDE),
        "validate": ("mha-deploy", "validate", bundles("tiny-gqa").path, "--json", "--in-process"),
        "export": ("mha-deploy", "export", "tiny-mha", "-o", target),
        "reference": ("import", "mha_deploy.reference"),
        "exporter": ("import", "mha_deploy.exporter.exporter"),
    }
    done = dict(zip(steps, run_all(*steps.values(), blocked=("torch",)), strict=True))
    assert list(target.parent.iterdir()) == []
    return done


@pytest.fixture(scope="module")
def without_runtimes(bundles):
    """What a machine with nothing but ONNX does, by the name of the step."""
    bf16 = bundles("tiny-padding", "bf16").path
    steps = {
        "deploy side": ("import", *DEPLOY_SIDE),
        "validate": ("mha-deploy", "validate", bf16, "--json", "--in-process", "--no-probe"),
        "models": ("mha-deploy", "models"),
        "analyze": ("mha-deploy", "analyze", "llama-3-8b"),
    }
    return dict(zip(steps, run_all(*steps.values(), blocked=("torch", *RUNTIMES)), strict=True))


def test_every_deploy_module_is_imported_where_there_is_no_runtime(without_runtimes):
    assert without_runtimes["deploy side"].code == 0, without_runtimes["deploy side"].err


@pytest.mark.slow
def test_no_deploy_module_looks_for_torch_where_the_runtimes_are(without_torch):
    assert without_torch["deploy side"].code == 0, without_torch["deploy side"].err


def test_no_deploy_module_imports_a_runtime_at_once(without_torch):
    assert set(RUNTIMES).isdisjoint(without_torch["deploy side"].packages)


@pytest.mark.parametrize("step", ["reference", "exporter"])
def test_blocking_a_package_blocks_it(without_torch, step):
    assert without_torch[step].code != 0
    assert "torch" in without_torch[step].err


def test_a_bundle_is_validated_without_torch(without_torch):
    done = without_torch["validate"]
    assert done.code == 0, done.err
    assert json.loads(done.out)["verdict"]["outcome"] == "passed"


def test_a_bundle_is_validated_with_nothing_but_onnx(without_runtimes):
    done = without_runtimes["validate"]
    assert done.code == 0, done.err
    assert json.loads(done.out)["parity"][0]["runtime"].startswith("onnx-reference")


def test_export_without_torch_says_how_to_install_it(without_torch):
    done = without_torch["export"]
    assert done.code == 3, done.err
    assert "Exporting needs PyTorch" in done.err
    assert 'try: pip install "mha-deploy[export]"' in done.err


@pytest.mark.parametrize("verb", ["models", "analyze"])
def test_tables_need_no_runtime(without_runtimes, verb):
    done = without_runtimes[verb]
    assert done.code == 0, done.err
    assert "llama-3-8b" in done.out


# -- what is loaded, and when --------------------------------------------------------------------

# What the package depends on, but for the library that prints the help.
HEAVY = {
    *("torch", "onnx", "onnx_ir", "onnxscript", "numpy", "ml_dtypes", "sympy", "safetensors", "matplotlib"),
    *("onnxruntime", "tensorrt", "tensorrt_rtx", "cuda", "pynvml", "transformers", "polygraphy"),
}


@pytest.fixture(scope="module")
def loading(bundles, tmp_path_factory):
    """What one new interpreter does, from the lightest step to the heaviest, by the name of the steps."""
    there = tmp_path_factory.mktemp("there")
    wrong = (["tiny-mha", "-o", there], ["tiny-mha", "--precision", "fp7"], ["tiny-nothing"])
    bundle = bundles("tiny-gqa").path
    commands = {
        "help": [["--help"], *([verb, "--help"] for verb in app.commands)],
        "models": [["models"], ["models", "--json"]],
        "refused": [[verb, "-o", there / "new", *each] for verb in ("export", "deploy") for each in wrong],
        "inspect": [["inspect", bundle], ["inspect", bundle, "--json"]],
        "analyze": [["analyze", "bert-base"], ["analyze", "bert-base", "--json"]],
        "doctor": [["doctor"]],
    }
    steps = [("mha-deploy", *command) for each in commands.values() for command in each]
    imported, *done = run_all(("import", "mha_deploy"), *steps)
    assert not list(there.iterdir())
    remaining = iter(done)
    return {"import": [imported]} | {
        name: list(islice(remaining, len(each))) for name, each in commands.items()
    }


def test_the_import_loads_nothing_heavy(loading):
    (imported,) = loading["import"]
    assert imported.code == 0, imported.err
    assert (HEAVY | {"rich", "click"}).isdisjoint(imported.packages)


def test_the_help_of_every_verb_loads_nothing_heavy(loading):
    for step in loading["help"]:
        assert step.code == 0, step
        assert "Usage: " in step.out
        assert "unless given" not in " ".join(step.out.split())
        with_value = [line for line in step.out.splitlines() if "<bool>" in line]
        assert all("--help" in line or "--version" in line for line in with_value), "a flag takes no value"
        assert "[[" not in step.out
        assert step.err == ""
        assert "click" in step.packages
        assert HEAVY.isdisjoint(step.packages)


@pytest.mark.parametrize(("name", "code"), [("models", 0), ("refused", 2)])
def test_the_catalog_and_what_is_refused_at_once_load_nothing_heavy(loading, name, code):
    """A folder that is there, a precision or a model that is not."""
    for step in loading[name]:
        assert step.code == code, step
        assert HEAVY.isdisjoint(step.packages)


def test_inspect_loads_neither_onnx_nor_a_runtime(loading):
    """It checks hashes, and says that the graph was not read."""
    as_text, as_json = loading["inspect"]
    assert (as_text.code, as_json.code) == (0, 0), loading["inspect"]
    assert "not compared with the graph" in as_text.out
    assert '"graph": "not compared"' in as_json.out
    assert (HEAVY - {"numpy", "ml_dtypes"}).isdisjoint(as_json.packages)


def test_the_work_of_a_catalog_layer_is_counted_without_onnx(loading):
    for step in loading["analyze"]:
        assert step.code == 0, step
        assert (HEAVY - {"numpy", "ml_dtypes"}).isdisjoint(step.packages)


def test_the_doctor_does_not_load_what_takes_seconds(loading):
    (step,) = loading["doctor"]
    assert step.code == 0, step
    assert "doctor --load" in step.out
    assert {"torch", "onnx", "onnx_ir", "onnxscript", "sympy", "matplotlib"}.isdisjoint(step.packages)


READS_A_GRAPH = """
import sys
from mha_deploy.__main__ import main

sys.argv = ["mha-deploy", "validate", sys.argv[1], "--no-report", "--no-probe", "--in-process"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
import onnx_ir as ir
print("sympy.core" in sys.modules, (ir.SymbolicDim("S") + 1).value, file=sys.stderr)
"""


def test_a_verb_that_reads_a_graph_runs_no_symbolic_algebra(bundles):
    """The library of graphs imports it; it is still there for whoever computes with sizes."""
    done = python(READS_A_GRAPH, bundles("tiny-gqa").path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False S + 1"


# -- who may import whom -------------------------------------------------------------------------


def test_a_spec_needs_only_the_standard_library():
    own = {"mha_deploy.model.spec", "mha_deploy.model.layer", "mha_deploy.errors"}
    for name in own:
        strangers = {
            module
            for module in imported_modules(name)
            if module not in own and module.partition(".")[0] not in sys.stdlib_module_names
        }
        assert strangers == set(), name


# Besides the order of all packages below.
FORBIDDEN = {
    "reference": ("exporter", "baselines", "graph", "runtime", "validation", "cli", "bundle"),
    "graph": ("exporter", "baselines", "runtime", "validation", "cli", "reference"),
    "runtime": ("exporter", "baselines", "validation", "cli", "reference"),
    "exporter": ("baselines", "cli"),
    "validation": ("exporter", "cli", "reference"),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_knows_nothing_of_what_becomes_of_it(package):
    inside = [name for name in FILES if under(name, f"mha_deploy.{package}")]
    forbidden = [f"mha_deploy.{other}" for other in FORBIDDEN[package]]
    found = [(name, other) for name in inside for other in imported_modules(name) if under(other, *forbidden)]
    assert inside
    assert found == []


def test_nothing_imports_the_command_line_but_itself():
    importers = {
        name for name in FILES if any(under(other, "mha_deploy.cli") for other in imported_modules(name))
    }
    assert {name for name in importers if not under(name, "mha_deploy.cli")} == {"mha_deploy.__main__"}


def test_only_its_owner_imports_a_runtime():
    owners = {
        "onnxruntime": {"mha_deploy.runtime.ort"},
        "safetensors": {
            "mha_deploy.bundle.cases",
            "mha_deploy.bundle.samples",
            "mha_deploy.model.huggingface",
            "mha_deploy.reference.weights",
        },
        "jinja2": {"mha_deploy.report.page"},
        "matplotlib": {"mha_deploy.analysis.similarity"},
        "polygraphy": set(),
        "tritonclient": {"mha_deploy.runtime.kserve", "mha_deploy.serving.triton"},
    }
    for package, owner in owners.items():
        found = {name for name in FILES if any(under(other, package) for other in imported_modules(name))}
        assert found == owner, package


# Lower packages know nothing of higher ones.
ORDER = (
    "errors",
    "status",
    "text",
    "files",
    "process",
    "output",
    "supervisor",
    "environment",
    "model",
    "keywords",
    "options",
    "requirements",
    "threads",
    "rounding",
    "bundle",
    "reference",
    "graph",
    "metrics",
    "judge",
    "analysis",
    "runtime",
    "engine",
    "exporter",
    "baselines",
    "validation",
    "serving",
    "report",
    "regression",
    "results",
    "deployment",
    "api",
    "cli",
)


def package_of(name):
    return name.split(".")[1] if "." in name else ""


def test_dependencies_point_down():
    places = {package_of(name) for name in FILES} - {"", "__main__"}
    assert places <= set(ORDER)
    upward = [
        f"{name} imports {other}"
        for name in FILES
        for other in imported_modules(name)
        if package_of(name) in ORDER and package_of(other) in ORDER
        if ORDER.index(package_of(other)) > ORDER.index(package_of(name))
    ]
    assert upward == []


def test_no_cycles_even_in_lazy_imports():
    graph = {name: (imported_modules(name) & set(FILES)) - {name, "mha_deploy"} for name in FILES}
    TopologicalSorter(graph).prepare()
