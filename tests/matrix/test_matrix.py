"""Every combination of a plan is a task: what is done is not done again, and a failure stays in its cell."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_edit import copy_of

import mha_deploy as md
from mha_deploy.bundle.folder import open_bundle
from mha_deploy.errors import BackendUnavailable
from mha_deploy.files import as_plain
from mha_deploy.regression.matrix import (
    CellStatus,
    LocalWorkers,
    RuntimeEntry,
    read_plan,
    run_cell,
    run_matrix,
)
from mha_deploy.runtime.child import isolation
from mha_deploy.validation.records import model_record

RTX = {"name": "rtx", "backend": "tensorrt-rtx"}

NOT_RUN = "not verified"


def plan_of(*models, **settings):
    return {"models": list(models), "runtimes": [RTX], **settings}


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("models = [", "cannot be read"),
        ("models = []\nruntimes = [{name = 'a'}]", "empty"),
        ("models = ['tiny-mha']\nruntimes = []", "empty"),
        ("models = ['tiny-mha']\nruntimes = [{name = 'a'}, {name = 'a'}]", "same name"),
        ("models = ['tiny-mha']\nruntimes = [{name = 'a', path = '/', pip = ['b']}]", "one place"),
        ("models = ['tiny-mha']\nruntimes = [{name = 'a', backend = 'onnx'}]", "cannot be read"),
        ("models = ['tiny-mha']\nruntimes = [{name = 'a'}]\nspeed = 3", "cannot be read"),
        ("models = ['tiny-mha']\nruntimes = [{name = 'a'}]\n[options.x]\nlevel = 3", "No such option"),
        ("models = ['tiny-mha']\nruntimes = [{name = 'a'}]\nprecisions = ['fp8']", "cannot be read"),
    ],
)
def test_a_plan_that_is_wrong_is_refused(tmp_path, text, what):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(md.DeployError, match=what):
        md.matrix(path, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "place", "near", "others"),
    [
        ("gpu", "", "gpus", {"precisions", "time_limit"}),
        ("axis", "models", "axes", {"cache", "name"}),
        ("paths", "runtimes", "path", {"backend", "pip"}),
    ],
)
def test_a_field_that_no_plan_has_is_answered_with_those_it_has(tmp_path, field, place, near, others):
    plan = plan_of({"model": "tiny-mha"})
    plan["runtimes"] = [dict(RTX)]
    (plan[place][0] if place else plan)[field] = "1"
    with pytest.raises(md.DeployError, match=field) as caught:
        md.matrix(plan, tmp_path / "out", jobs=1)
    assert set(re.findall(r"\w+", caught.value.hint)) >= {near, *others}
    assert repr(near) in caught.value.hint


def test_a_misspelled_path_is_answered_with_the_one_beside_it(tmp_path):
    (tmp_path / "plan.toml").touch()
    with pytest.raises(md.DeployError) as failure:
        read_plan(tmp_path / "plam.toml")
    assert str(tmp_path / "plan.toml") in failure.value.hint


def test_a_value_that_no_plan_has_is_answered_with_those_it_may_have(tmp_path):
    for changed, allowed in (
        ({"runtimes": [{**RTX, "backend": "ort-cpu"}]}, ("tensorrt", "tensorrt-rtx")),
        ({"precisions": ["fp8"]}, ("fp16", "bf16", "auto")),
    ):
        with pytest.raises(md.DeployError) as caught:
            md.matrix({**plan_of("tiny-mha"), **changed}, tmp_path / "out", jobs=1)
        assert all(each in caught.value.hint for each in allowed)


# -- which cells are done --------------------------------------------------------------------------


class Scripted:
    """Workers with results that were written beforehand."""

    def __init__(self, version="1.0", **statuses):
        self.version, self.statuses, self.ran = version, statuses, []

    def probe(self, runtime, gpu):
        if self.version is None:
            return {"problem": "not installed"}
        return {"version": self.version, "gpu": "" if gpu == "none" else gpu}

    def run(self, tasks):
        for task in reversed(tasks):
            self.ran.append((task.cell.model, task.cell.runtime, task.cell.options))
            status = self.statuses.get(task.cell.options, NOT_RUN)
            engine = {
                "name": "rtx", "backend": "tensorrt-rtx", "version": self.version, "precision": "fp16",
                "fused": [int(status == NOT_RUN), 1], "precision_status": "verified", "engine_bytes": 1000,
                "seconds": 2.0, "nodes": [{"node": "attention", "profile": 0, "status": "fused"}],
                "built": "here", "ran": False, "why_not": "no GPU", "precision_reasons": [], "profiles": [],
                "attention": "", "plugins": [], "profile_names": [], "rebuilds": None,
            }  # fmt: skip
            model = as_plain(model_record(open_bundle(Path(task.request["bundle"]))))
            report = {"model": model | {"name": task.cell.model}, "engines": [engine]}
            why = "" if status == NOT_RUN else "the reason"
            report = None if status in ("crashed", "refused") else report
            done = {"status": status, "why": why, "seconds": 1.0, "engine_sha256": "1", "report": report}
            yield task, done


def refuse_export(entry, precision, target):
    raise md.DeployError("There is no such model.", got=entry.model, hint="another")


def run(plan, folder, workers, **callbacks):
    return run_matrix(read_plan(plan), folder, workers, refuse_export, **callbacks)


def test_a_second_run_does_only_what_is_missing(bundles, tmp_path):
    plan = plan_of(str(bundles("tiny-gqa").path), options={"a": {}, "b": {"optimization_level": 5}})
    first = Scripted(b="crashed")
    done = run(plan, tmp_path, first)
    assert [cell.status for cell in done.cells] == [NOT_RUN, "crashed"]
    assert not done.passed
    assert len({cell.title for cell in done.cells}) == 2, "a line of progress says which cell it is"
    assert [title for title, _ in done.reasons()] == ["tiny-gqa fp16, rtx, b"]
    again = Scripted()
    done = run(plan, tmp_path, again)
    assert [options for _, _, options in again.ran] == ["b"]  # what crashed is tried again
    assert [(cell.status, cell.is_new) for cell in done.cells] == [
        (NOT_RUN, False),
        (NOT_RUN, True),
    ]
    assert done.outcome == NOT_RUN
    idle = Scripted()
    run(plan, tmp_path, idle)
    assert idle.ran == []
    chosen = plan_of("tiny-gqa", precisions=["auto", "fp16"])  # one bundle for both

    def export(entry, precision, target):
        shutil.copytree(bundles("tiny-gqa").path, target)

    for count in (2, 0):
        workers = Scripted()
        run_matrix(read_plan(chosen), tmp_path / "auto", workers, export)
        assert len(workers.ran) == count
    for change in (Scripted(version="1.1"), Scripted()):
        other = plan if change.version != "1.0" else {**plan, "options": {"a": {"optimization_level": 1}}}
        run(other, tmp_path, change)
        assert change.ran  # another version, or other options under the same name


def test_a_result_that_was_cut_short_is_done_again(bundles, tmp_path):
    plan = plan_of(str(bundles("tiny-gqa").path))
    run(plan, tmp_path, Scripted())
    (kept,) = (tmp_path / "cells").iterdir()
    kept.write_text(kept.read_text()[:100])
    workers = Scripted()
    assert run(plan, tmp_path, workers).outcome == NOT_RUN
    assert len(workers.ran) == 1


def test_an_export_that_fails_is_a_failure_with_the_reason_in_words_of_the_plan(tmp_path):
    def export(entry, precision, target):
        hint = "--precision auto, --axis B=2 --axis S=16, or --allow-decomposed"
        kind = BackendUnavailable if precision == "fp32" else md.DeployError
        raise kind("It cannot be exported.", got=precision, hint=hint)

    plan = read_plan(plan_of("tiny-mha", precisions=["fp16", "fp32"]))
    done = run_matrix(plan, tmp_path, Scripted(), export)
    assert [cell.status for cell in done.cells] == ["failed", "unavailable"]
    assert done.outcome == "failed"
    for text in (done.cells[0].why, dict(done.reasons())["tiny-mha fp16, rtx"]):
        assert "--" not in text
        assert 'precisions = ["auto"]' in text
        assert 'axes = {B = "2", S = "16"}' in text
    marks = [row[-1].status for row in done.tables()[0].groups[0].rows]
    assert marks == ["bad", "none"]


@pytest.mark.parametrize("model", ["gone/net.onnx", "net.onnx", "gone/net.py:model"])
def test_a_file_that_is_not_there_fails_its_cells(tmp_path, monkeypatch, model):
    def export(entry, precision, target):
        md.export(entry.model, target, precision=precision)

    monkeypatch.chdir(tmp_path)
    done = run_matrix(read_plan(plan_of(model)), tmp_path, Scripted(), export)
    assert [cell.status for cell in done.cells] == ["failed"]
    assert "no such" in done.cells[0].why
    assert model.partition(":")[0] in done.cells[0].why


def test_what_cannot_be_done_is_unavailable_with_the_reason(bundles, tmp_path):
    counts, steps = [], []
    plan = plan_of(str(bundles("tiny-gqa").path), "no-such-model")

    def count_cell(cell, count, total):
        counts.append((count, total))

    done = run(plan, tmp_path, Scripted(), on_cell=count_cell, on_step=steps.append)
    assert [each for each in steps if "no-such-model" in each], "each step has a name"
    assert [cell.status for cell in done.cells] == [NOT_RUN, "unavailable"]
    assert "no-such-model" in done.cells[1].why
    assert counts == [(1, 2), (2, 2)]
    gone = run(plan, tmp_path, Scripted(version=None))
    assert [cell.status for cell in gone.cells] == ["unavailable"] * 2
    assert gone.cells[0].why == "not installed"


@pytest.mark.parametrize("key", ["path", "python"])
def test_a_runtime_that_is_not_there_leaves_the_others(bundles, tmp_path, key):
    (tmp_path / "rtx-1.6").mkdir()
    plan = plan_of(str(bundles("tiny-gqa").path))
    plan["runtimes"] = [dict(RTX), {"name": "misspelled", key: str(tmp_path / "rtx-16")}]
    done = run(plan, tmp_path / "out", Scripted())
    assert [cell.status for cell in done.cells] == [NOT_RUN, "unavailable"]
    assert str(tmp_path / "rtx-1.6") in done.cells[1].why, "the one beside it was meant"


def test_a_bundle_has_the_cells_of_its_own_precision(bundles, tmp_path):
    folder = bundles("tiny-gqa").path
    other = shutil.copytree(folder, tmp_path / "other")
    plan = plan_of(str(folder), str(other), precisions=["fp16", "fp32"])
    done = run(plan, tmp_path, Scripted())
    assert [(cell.precision, cell.status) for cell in done.cells] == [("fp16", NOT_RUN)] * 2
    assert done.cells[1].model == f"tiny-gqa ({other})"  # the second of one name has its path behind it
    assert not run(plan_of(str(folder), precisions=["bf16"]), tmp_path, Scripted()).passed  # no cell


# -- the merged report -----------------------------------------------------------------------------


def test_one_report_that_compare_reads(bundles, tmp_path):
    plan = plan_of(str(bundles("tiny-gqa").path))
    plan["runtimes"] = [{**RTX, "name": "old"}, {**RTX, "name": "new"}]
    done = run(plan, tmp_path, Scripted())
    page = done.save(tmp_path / "good").read_text()
    assert "1/1 fused, not verified" in page
    path = tmp_path / "good" / "matrix.json"
    assert json.loads(path.read_text())["outcome"] == NOT_RUN
    assert md.compare(path, path).passed
    assert md.compare(f"{path}#old", f"{path}#new").passed
    with pytest.raises(md.DeployError, match="No cell has this runtime") as caught:
        md.compare(f"{path}#odd", path)
    assert "old" in caught.value.hint
    data = json.loads(path.read_text())
    for name in ({}, 7):  # as somebody may have written it
        data["cells"][0]["runtime"] = name
        (tmp_path / "odd.json").write_text(json.dumps(data))
        with pytest.raises(md.DeployError, match="No cell has this runtime"):
            md.compare(f"{tmp_path / 'odd.json'}#odd", path)
    data["cells"][0] |= {"runtime": "old", "status": "splendid"}  # no status of a cell
    (tmp_path / "odd.json").write_text(json.dumps(data))
    with pytest.raises(md.DeployError):
        md.compare(tmp_path / "odd.json", path)
    worse = run(plan, tmp_path / "other", Scripted(default="crashed"))
    worse.save(tmp_path / "worse")
    found = md.compare(path, tmp_path / "worse")
    assert {change.section for change in found.regressions} >= {"verdict", "coverage"}
    assert "the reason" in worse.to_html()


@pytest.mark.parametrize("status", ["failed", "crashed"])
def test_a_new_cell_that_is_wrong_is_a_regression(bundles, tmp_path, status):
    model = str(bundles("tiny-gqa").path)
    run(plan_of(model), tmp_path / "1", Scripted()).save(tmp_path / "old")
    both = plan_of(model, options={"default": {}, "b": {"optimization_level": 5}})
    run(both, tmp_path / "2", Scripted()).save(tmp_path / "good")
    run(both, tmp_path / "3", Scripted(b=status)).save(tmp_path / "bad")
    assert md.compare(tmp_path / "old", tmp_path / "good").passed
    found = md.compare(tmp_path / "old", tmp_path / "bad")
    assert found.outcome == "failed"
    assert {change.model for change in found.regressions} == {"tiny-gqa fp16, rtx, none, b"}


def test_models_of_one_name_have_a_cell_each(bundles, tmp_path):
    place = str(bundles("tiny-gqa").path)
    done = run(plan_of(place, place, place), tmp_path, workers := Scripted())
    assert len({cell.place for cell in done.cells}) == len(workers.ran) == 3


def test_the_page_is_a_heat_map(bundles, tmp_path):
    plan = plan_of(str(bundles("tiny-gqa").path), options={name: {} for name in ("a", "b")})
    plan["runtimes"] = [{**RTX, "name": "old"}, {**RTX, "name": "new"}]
    done = run(plan, tmp_path, Scripted(b="crashed"))
    (place,) = (i for i, each in enumerate(done.cells) if (each.runtime, each.options) == ("new", "a"))
    cells = list(done.cells)
    cells[place] = replace(cells[place], report={"engines": [{**cells[place].engine, "seconds": 9.0}]})
    page = replace(done, cells=tuple(cells)).to_html()
    verdicts, *_, times = re.findall("<table.*?</table>", page, flags=re.DOTALL)
    headings = re.findall('<th scope="col"([^>]*)>', page)
    assert all("title=" in each for each in headings)
    heats = re.findall('<td class="heat ([^"]*)"><span class="status', verdicts)
    assert heats == ["hot-doubt"] * 2 + ["hot-bad"] * 2
    assert re.findall('<td class="heat ([^"]*)"[^>]*>([^<]*)', times) == [("q0", "2.00"), ("q5", "9.00")]


@pytest.mark.parametrize(("shares", "is_shown"), [([0.2, 0.4], True), ([0.2, None], False)])
def test_an_output_without_a_number_leaves_no_share_of_the_others(bundles, tmp_path, shares, is_shown):
    done = run(plan_of(str(bundles("tiny-gqa").path)), tmp_path, Scripted())
    (cell, *others) = done.cells
    parity = [{"verdicts": [{"share": each} for each in shares]}]
    changed = replace(done, cells=(replace(cell, report={**cell.report, "parity": parity}), *others))
    titles = [each.title for each in changed.tables()]
    assert ("Largest share of the error budget" in titles) is is_shown
    assert ("40% of the budget" in changed.to_html()) is is_shown


ANSWERS = {
    "no object": ("echo '[1]'", "no result"),
    "no text": ("printf '\\377\\n'", "no result"),
    "text before": ("printf '\\377\\n'; echo '{\"problem\": \"no GPU\"}'", "no GPU"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_worker_prints_is_the_answer_of_its_runtime(tmp_path, name):
    text, problem = ANSWERS[name]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\n{text}\n")
    workers, runtime = LocalWorkers(1, tmp_path), RuntimeEntry(name="odd", python=str(python))
    assert "cannot be started" in workers.probe(runtime, "none")["problem"]
    python.chmod(0o755)
    assert problem in workers.probe(runtime, "none")["problem"]


@pytest.mark.parametrize("result", [{}, {"status": "splendid"}, {"why": "no status"}])
def test_a_result_of_another_version_fails_its_cell(bundles, tmp_path, result):
    class Other(Scripted):
        def run(self, tasks):
            yield from ((task, result) for task in tasks)

    (cell,) = run(plan_of(str(bundles("tiny-gqa").path)), tmp_path, Other()).cells
    assert cell.status is CellStatus.CRASHED
    assert "another version" in cell.why


# -- for real --------------------------------------------------------------------------------------


@pytest.mark.slow  # the README's command is tested always
def test_cells_are_built_by_local_processes(bundles, tmp_path, run_cli):
    pytest.importorskip("tensorrt_rtx")
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f"models = ['{bundles('tiny-gqa').path}']\n"
        "runtimes = [{name = 'rtx'}, {name = 'none', backend = 'tensorrt', path = '/'}]\n"
        "gpus = ['none']\n"
    )
    done = run_cli("matrix", plan, "-o", tmp_path / "out", "--jobs", "2", "--json")
    assert done.code == (1 if "unavailable" in done.out else 0)
    cells = json.loads(done.out)["cells"]
    assert (cells[0]["status"], cells[0]["report"]["engines"][0]["fused"]) == (NOT_RUN, [1, 1])
    assert cells[0]["version"]


@pytest.mark.slow
def test_a_matrix_says_at_once_that_it_began_and_with_q_nothing_but_the_verdict(bundles, tmp_path, run_cli):
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f"models = ['{bundles('tiny-gqa').path}']\n"
        "runtimes = [{name = 'none', backend = 'tensorrt', path = '/'}]\ngpus = ['none']\n"
    )
    command = ("matrix", plan, "-o", tmp_path / "out", "--jobs", "1")
    *steps, cell = run_cli(*command).err.splitlines()
    assert len(steps) == 2, "the runtimes, and one bundle"
    assert all(each.startswith("matrix plan.toml: ") for each in steps)
    assert cell.startswith("1/1 tiny-gqa")
    assert run_cli(*command, "-q").err == ""


def test_a_refused_cell_says_what_to_try_as_the_build_does(bundles, tmp_path, monkeypatch):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(isolation, "limit_s", isolation.limit_s)  # a cell sets its own
    bundle = md.open_bundle(copy_of(bundles("tiny-softcap"), tmp_path / "bundle"))  # others build its engine
    with pytest.raises(md.DeployError) as caught:
        md.build_engine(bundle, backend="tensorrt-rtx")
    request = {"backend": "tensorrt-rtx", "options": {}, "bundle": str(bundle.path), "time_limit": 600.0}
    cell = run_cell(request)
    assert cell["status"] == "refused"
    assert f"got: {caught.value.got}" in cell["why"]
    assert "allow_decomposed=True" in caught.value.hint
    assert "allow_decomposed = true" in cell["why"]  # as a plan has it


FAKE = """
import os
__version__ = "0.0"
class Logger:
    def __init__(self, *args): os.abort()
ILogger = Logger
"""


@pytest.mark.slow
def test_a_build_that_crashes_fails_its_cell_alone(bundles, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "tensorrt_rtx.py").write_text(FAKE)
    plan = plan_of(str(bundles("tiny-gqa").path))
    plan["runtimes"] = [{**RTX, "name": "broken", "path": str(tmp_path / "fake")}, RTX]
    done = md.matrix(plan, tmp_path / "out", jobs=2)
    assert [cell.status for cell in done.cells] == ["crashed", NOT_RUN]


@pytest.fixture(scope="module")
def rtx_versions(tmp_path_factory):
    """Folders with the TensorRT-RTX versions that can be installed here, by version."""
    named = os.environ.get("MHA_DEPLOY_RTX_VERSIONS")  # folders of `pip install --target`
    if named:
        return {path.rstrip("/").rpartition("/")[2]: path for path in named.split(os.pathsep)}
    found = {}
    for version in ("1.4.0.76", "1.5.0.114", "1.6.1.120", "1.7.1.116"):
        target = tmp_path_factory.mktemp("rtx") / version
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target)]
        done = subprocess.run([*command, f"tensorrt-rtx-cu13=={version}"], capture_output=True)
        if done.returncode == 0:
            found[version] = str(target)
    return found


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_finishes_the_matrix(bundles, tmp_path, rtx_versions):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    assert len(rtx_versions) > 1, "no two versions of TensorRT-RTX can be installed here"
    models = [str(bundles(name).path) for name in ("tiny-gqa", "tiny-padding", "tiny-mha")]
    plan = plan_of(*models, gpus=["none", "L40S", "absent"], options={"default": {"allow_decomposed": True}})
    plan["runtimes"] = [{**RTX, "name": name, "path": path} for name, path in rtx_versions.items()]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:L40S": 1})
        doomed, finished = cluster.add_node(num_cpus=1), []

        def kill(cell, done, total):
            finished.append(cell)
            if sum(each.status == NOT_RUN for each in finished) == 1 and cell.status == NOT_RUN:
                cluster.remove_node(doomed, allow_graceful=False)

        done = md.matrix(plan, tmp_path / "out", address=cluster.address, on_cell=kill)
        assert len(done.cells) == len(finished) == 9 * len(rtx_versions)
        by_gpu = {gpu: [cell for cell in done.cells if cell.gpu == gpu] for gpu in plan["gpus"]}
        assert {cell.status for cell in by_gpu["absent"]} == {"unavailable"}
        assert {cell.status for cell in by_gpu["L40S"]} == {NOT_RUN}
        assert {cell.status for cell in by_gpu["none"]} <= {NOT_RUN, "crashed"}
        assert sum(cell.status == "crashed" for cell in by_gpu["none"]) <= 1
        assert {cell.version for cell in by_gpu["none"]} == set(rtx_versions)
        again = md.matrix(plan, tmp_path / "out", address=cluster.address)
        assert {cell.status for cell in again.cells if cell.gpu != "absent"} == {NOT_RUN}
        assert sum(cell.is_new for cell in again.cells if cell.gpu != "absent") <= 1
    finally:
        cluster.shutdown()
