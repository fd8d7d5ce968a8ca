"""Requirements of a project: defaults and demands from a file, which only ever add to a verdict."""

import json

import pytest

import mha_deploy as md
from mha_deploy.errors import DeployError
from mha_deploy.requirements import find_requirements, read_requirements, settable, template
from mha_deploy.runtime.child import isolation
from mha_deploy.status import Kind

QUICK = {"probe": False, "latency": False, "runtimes": ["ort-cpu"]}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working folder, and a function that writes its requirements."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="mha-deploy.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def test_demands_add_failures_and_what_was_not_measured_is_not_verified(bundles, tmp_path):
    bundle = bundles("tiny-gqa")
    assert md.validate(bundle, requirements={"max_budget_share": 0.99}, **QUICK).passed
    tight = md.validate(bundle, requirements={"max_budget_share": 0.01, "require_run": False}, **QUICK)
    assert tight.outcome == "failed"
    (finding,) = [each for each in tight.findings if each.kind is Kind.DEMAND_NOT_MET]
    assert finding.numbers["wanted"] == 0.01 < finding.numbers["got"]
    unmeasured = md.validate(bundle, requirements={"max_latency_p99": 1.0, "top1_agreement": 0.5}, **QUICK)
    assert unmeasured.outcome == "not verified"
    got = [(each["name"], each["got"], each["outcome"]) for each in unmeasured.to_dict()["requirements"]]
    expected = [("max_latency_p99", None, "not verified"), ("top1_agreement", None, "not verified")]
    assert got == expected
    fused = md.validate(bundle, requirements={"require_fused": True}, **QUICK)
    assert Kind.NO_ENGINE in [each.kind for each in fused.findings if each.level == "failure"]


def test_the_file_of_the_working_folder_sets_defaults_and_demands(bundles, project, run_cli):
    folder = bundles("tiny-gqa").path
    project(
        '[validate]\nfresh = 2\nseed = 5\n[models."tiny-gqa".validate]\nfresh = 1\n'
        '[models."tiny-gqa".require]\nmax_budget_share = 0.9\n'
        "[models.other.require]\nmax_budget_share = 0.01\n"
    )
    quick = ("--no-probe", "--no-report", "--json", "--runtime", "ort-cpu")
    data = json.loads(run_cli("validate", folder, *quick).out)
    fresh = [v["case"] for run in data["parity"] if run["cases"] == "fresh" for v in run["verdicts"]]
    assert [name.rpartition("seed")[2] for name in fresh] == ["5"]
    assert [each["wanted"] for each in data["requirements"]] == [0.9]
    data = json.loads(run_cli("validate", folder, *quick, "--fresh", "0", "--seed", "7").out)
    assert [run["cases"] for run in data["parity"]].count("fresh") == 0, "the command line comes first"


@pytest.mark.parametrize(
    ("text", "arguments", "place"),
    [
        ("[validate]\nfresh = 2", (), "mha-deploy.toml: [validate] fresh"),
        ('[models."{}".validate]\nfresh = 2', (), 'mha-deploy.toml: [models."{}".validate] fresh'),
        ("[validate]\nrequire_fused = true", ("--url", "grpc://h:1"), "[validate] require_fused"),
        ("[validate]\nfresh = 3", ("--fresh", "2"), None),
    ],
)
def test_an_error_of_an_option_names_the_file_that_set_it(
    text, arguments, place, own_bundles, project, refused, monkeypatch
):
    bundle = own_bundles("talking", golden=("opt", "probe"))
    project(text.format(bundle.manifest.spec.name))
    monkeypatch.setattr(isolation, "trust_code", False)
    monkeypatch.setattr(isolation, "own", set())
    done = refused("validate", bundle.path, *arguments, "--no-report", what="")
    named = "mha-deploy.toml" if place is None else place.format(bundle.manifest.spec.name)
    assert (named in done.err) == (place is not None)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("export", "precision", '"fp61"'),
        ("export", "golden", '["nothing"]'),
        ("export", "calibration", '"mse"'),
        ("deploy", "targets", '"Hopper"'),
    ],
)
def test_an_error_that_does_not_spell_the_option_names_the_file_too(
    table, key, value, project, refused, tmp_path
):
    project(f"[{table}]\n{key} = {value}")
    done = refused(table, "tiny-mqa", "-o", tmp_path / "b", what="")
    assert f"[{table}] {key}" in done.err


@pytest.mark.parametrize(
    "text",
    [
        "[validate]\nprobe = false",
        "[validate]\nruntimes = ['ort-cpu']",
        "[validate]\ndata = 'evil.py:samples'",
        "[validate]\nmetric = 'evil.py:samples'",
        "[validate]\ntrust_code = true",
        "[validate]\nurl = 'http://elsewhere'",
        "[export]\nweights = '/etc/passwd'",
        "[export]\noverwrite = true",
        "[deploy]\nallow_decomposed = true",
        "[deploy]\nworkspace_mib = 5",
        "[validate]\nfresh = 'many'",
        "[validate]\nfresh = true",
        "[validate]\nfresh = -1",
        "[validate]\nseed = 4294967296",
        "[export]\ngolden = [1]",
        "[bench]\nsamples = 1",
        "[validate]\nnonsense = 1",
        "[nonsense]\nfresh = 1",
        "[require]\nmax_budget_share = 1.5",
        "[require]\nmax_budget_share = 0",
        "[require]\nmax_error = 1",
        "[require]\ntop1_agreement = nan",
        "[require]\nrequire_fused = 'yes'",
        "models = 1",
        "require = 3",
        "[validate",
        "[models.x.require]\nmax_latency_p99 = -1",
    ],
)
def test_what_could_loosen_a_verdict_run_code_or_is_not_valid_is_refused(text, project, bundles, refused):
    project(text)
    done = refused("validate", bundles("tiny-gqa").path, "--no-report", what="")
    assert "mha-deploy.toml" in done.err


def test_a_file_does_not_replace_the_loss_that_an_export_allowed():
    assert "max_loss" in settable("export")
    assert "max_loss" not in settable("validate")


@pytest.mark.parametrize(
    ("text", "got", "hint"),
    [
        ("[require]\nmax_budget_share = 2.0", "max_budget_share = 2.0", "1.0"),
        ("[require]\nmax_budget = 0.5", "max_budget", "max_budget_share"),
    ],
)
def test_a_demand_that_is_not_valid_is_named_with_what_is(text, got, hint, project, bundles, refused):
    project(text)
    refused("validate", bundles("tiny-gqa").path, "--no-report", what="", got=got, hint=hint)


def test_pyproject_and_files_elsewhere(project, tmp_path):
    assert find_requirements(tmp_path) is None
    project("[project]\nname = 'x'\n", "pyproject.toml")
    assert find_requirements(tmp_path) is None
    project("[tool.mha-deploy.require]\nmax_latency_p99 = 9\n", "pyproject.toml")
    assert find_requirements(tmp_path).demands("any").max_latency_p99 == 9
    project("[require]\nmax_latency_p99 = 7\n[models.m.require]\nmax_latency_p99 = 8\n")
    found = find_requirements(tmp_path)
    assert (found.demands("any").max_latency_p99, found.demands("m").max_latency_p99) == (7, 7), (
        "the stricter"
    )
    (tmp_path / "manifest.json").write_text("{}")
    assert find_requirements(tmp_path) is None, "a bundle is somebody's output"
    with pytest.raises(DeployError, match="cannot be read"):
        read_requirements(tmp_path / "missing.toml")


def test_init_writes_a_file_in_which_every_line_can_be_used(project, tmp_path, run_cli, refused):
    assert run_cli("init").code == 0
    path = tmp_path / "mha-deploy.toml"
    assert read_requirements(path).options("validate") == {}, "all of it is commented out"
    refused("init", what="exists", hint="--overwrite")
    lines = [line.removeprefix("# ") for line in template().splitlines()]
    known = {name for verb in ("export", "build-engine", "validate", "bench") for name in settable(verb)}
    known |= {"max_budget_share", "max_latency_p99", "top1_agreement"}
    used = [
        line
        for line in lines
        if line.startswith("[")
        or (line.partition(" =")[0] in known | {"require_fused"} and "..." not in line)
    ]
    tables = "\n".join(line for line in used if not line.startswith("[models"))
    path.write_text(
        tables.replace("max_latency_p99 = 80.0\n", "").replace("fresh = 4\n", ""), encoding="utf-8"
    )
    found = read_requirements(path)
    assert found.options("validate")["fresh"] == 0
    assert found.demands("any").max_budget_share == 0.5


def test_tables_of_models_of_which_none_is_this_one_are_named(bundles, project, run_cli):
    bundle = bundles("tiny-gqa").path
    quick = ("--no-probe", "--no-latency", "--runtime", "ort-cpu", "--no-report")
    project('[models."tiny-gqaa".require]\nmax_budget_share = 0.001\n')
    done = run_cli("validate", bundle, *quick)
    assert "tiny-gqaa" in done.err
    project('[models."tiny-gqa".validate]\nseed = 2\n[models."other".validate]\nseed = 3\n')
    assert "other" not in run_cli("validate", bundle, *quick).err


@pytest.mark.parametrize("name", ["max_budget_share", "top1_agreement", "require_run"])
def test_a_demand_of_the_wrong_type_shows_one_that_is_right(project, name):
    path = project(f'[require]\n{name} = "x"\n')
    with pytest.raises(DeployError) as caught:
        read_requirements(path)
    assert f"{name} = " in caught.value.hint


def test_a_requirement_that_a_file_switches_off_is_left_out(project):
    with pytest.raises(DeployError) as caught:
        read_requirements(project("[validate]\nrequire_run = false\n"))
    assert not any(text in caught.value.hint for text in ("--no-", "=False"))
