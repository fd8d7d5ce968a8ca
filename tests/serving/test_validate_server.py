"""Validation through a server of the KServe v2 protocol that is not Triton."""

import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import mha_deploy as md
from mha_deploy.bundle.folder import MANIFEST
from mha_deploy.report.page import key_figures
from mha_deploy.status import Kind, Outcome

pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")


def load_of(report):
    return report.to_dict()["serving"]


def test_golden_cases_pass_with_one_client_and_with_several(served, bundles):
    server = served("tiny-padding")
    report = md.validate(bundles("tiny-padding"), url=server.url, clients=(1, 4), requests=12)
    assert report.passed, report.headline
    one, four = load_of(report)
    assert (one["clients"], four["clients"]) == (1, 4)
    assert one["answered"] == one["requests"] >= 12
    assert one["errors"] == four["errors"] == {}
    assert one["judged"] > 0
    assert four["wrong"] == 0
    assert 0 < four["p50_ms"] <= four["p90_ms"] <= four["p99_ms"]
    assert one["runs"] == json.loads(server.config["parameters"]["runtimes"]["string_value"]) == ["ort-cpu"]
    assert one["runs"][0] in report.to_html()
    assert " ms" in dict(key_figures(report.to_dict()))["fastest engine"]
    parity = report.to_dict()["parity"]
    assert (parity[0]["cases"], parity[0]["clients"]) == ("golden", 1)
    assert [(each["cases"], each["clients"]) for each in parity[-2:]] == [("served", 1), ("served", 4)]
    assert len({each["runtime"] for each in parity}) == 1, "it is one server"
    assert "4 clients" in report.to_html()


@pytest.mark.parametrize("name", ["tiny-dynamic", "tiny-preallocated"])
def test_decode_traces_pass_as_interleaved_sequences(served, bundles, name):
    server = served(name)
    report = md.validate(bundles(name), url=server.url, clients=(3,), requests=1)
    assert report.passed, report.headline
    (found,) = report.to_dict()["decode"]
    assert (found["steps"], found["outcome"], found["clients"]) == (40, "passed", 3)
    assert list(report.to_dict()["runtimes"]) == [found["runtime"]]
    assert load_of(report)[0]["requests"] == 3 * 41


@pytest.mark.slow
def test_the_decoder_of_a_user_is_served_with_its_cache(served, own_bundles):
    bundle = own_bundles("decoder")
    server = served("decoder", bundle=bundle)
    assert [each["name"] for each in server.config["input"]] == ["ids"]
    report = md.validate(bundle, url=server.url, clients=(2,), requests=1)
    assert report.outcome is not Outcome.FAILED, report.headline  # BF16 may be as small as rounding here
    (decoded,) = report.record.decode
    assert decoded.outcome is Outcome.PASSED
    assert decoded.steps > 8


def test_a_served_model_is_a_runner(served, bundles):
    server = served("tiny-padding")
    with md.open_runner(f"{server.url}/tiny-padding/1") as runner:
        assert md.check_parity(bundles("tiny-padding"), runner).passed


def test_a_wrong_model_is_caught(served, bundles, run_cli):
    """One output channel of one batch element is off by a percent."""

    def spoil(outputs):
        wrong = np.array(outputs["output"])
        wrong[0, :, 5] *= np.float16(1.01)
        return {"output": wrong}

    server = served("tiny-gqa", after=spoil)
    command = ("validate", bundles("tiny-gqa").path, "--url", server.url, "--clients", "2", "--requests", "4")
    done = run_cli(*command, "--no-probe", "--json")
    assert done.code == 1
    data = json.loads(done.out)
    place = bundles("tiny-gqa").path / "reports" / server.url.partition("://")[2].replace(":", "-")
    assert json.loads((place / "report.json").read_text()) == data, "not over the report of the bundle"
    assert data["verdict"]["outcome"] == "failed"
    assert data["serving"][0]["wrong"] > 0


def test_another_model_under_that_name_is_caught(served, bundles):
    server = served("tiny-gqa")
    server.config["name"] = "tiny-mha"  # the same tensors, other weights and heads
    report = md.validate(bundles("tiny-mha"), url=server.url, clients=(1,), requests=1, probe=False)
    assert not report.passed
    assert report.findings[0].kind is Kind.OTHER_BUNDLE, "why the rest is wrong comes first"


def test_a_server_of_another_bundle_fails_though_its_results_are_right(served, bundles):
    server = served("tiny-gqa")
    options = {"url": server.url, "clients": (1,), "requests": 1, "probe": False}
    assert md.validate(bundles("tiny-gqa"), **options).passed
    server.config["parameters"]["mha_deploy_bundle_sha256"]["string_value"] = "0" * 64
    report = md.validate(bundles("tiny-gqa"), **options)
    assert [each.kind for each in report.findings if each.level == "failure"] == [Kind.OTHER_BUNDLE]
    del server.config["parameters"]["mha_deploy_bundle_sha256"]
    assert md.validate(bundles("tiny-gqa"), **options).passed, "other servers do not say"


@pytest.mark.parametrize(
    ("stated", "runs"),
    [('["h100,v2", "b"]', ["h100,v2", "b"]), ("ort-cpu", []), ('{"a": 1}', []), ("[" * 5000, []), ("", [])],
)
def test_what_a_server_runs_is_what_it_says_in_a_form_that_is_known(served, bundles, stated, runs):
    server = served("tiny-gqa")
    server.config["parameters"]["runtimes"]["string_value"] = stated
    report = md.validate(bundles("tiny-gqa"), url=server.url, clients=(1,), requests=1, probe=False)
    assert report.passed
    assert [each["runs"] for each in load_of(report)] == [runs]
    assert all(name in report.to_html() for name in runs)


def test_a_model_with_other_inputs_is_refused_before_anything_is_sent(served, bundles):
    server = served("tiny-padding")
    with pytest.raises(md.DeployError) as refused:
        md.validate(bundles("tiny-gqa"), url=f"{server.url}/tiny-padding", clients=(1,), requests=1)
    assert refused.value.exit_code == 1
    assert "key_lengths" in refused.value.got
    assert server.count == 0


def test_of_a_model_that_is_not_served_those_that_are_ready_are_named(served, bundles):
    server = served("tiny-gqa")
    with pytest.raises(md.DeployError) as refused:
        md.validate(bundles("tiny-padding"), url=server.url)
    assert refused.value.exit_code == 3
    assert f"{server.url}/tiny-gqa" in refused.value.hint


def test_a_server_that_speaks_the_other_protocol_is_named_with_it(served, bundles):
    server = served("tiny-gqa")
    with pytest.raises(md.DeployError) as refused:
        md.validate(bundles("tiny-gqa"), url=server.url.replace("http", "grpc"))
    assert server.url in refused.value.hint
    grpc = pytest.importorskip("grpc")
    with ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        with pytest.raises(md.DeployError) as refused:
            md.validate(bundles("tiny-gqa"), url=f"http://127.0.0.1:{port}")
        other.stop(None)
    assert f"grpc://127.0.0.1:{port}" in refused.value.hint


def test_one_cause_is_one_failure_for_all_clients(served, bundles):
    def before(number):
        raise RuntimeError("the connection is dropped")

    server = served("tiny-gqa", before=before)
    report = md.validate(bundles("tiny-gqa"), url=server.url, clients=(1, 2, 3), requests=4, probe=False)
    failures = [each for each in report.findings if each.level == "failure"]
    assert [each.kind for each in failures].count(Kind.REQUESTS_FAILED) == 1
    assert [each.kind for each in failures].count(Kind.WRONG_OUTPUTS) <= 2
    requests = next(each for each in failures if each.kind is Kind.REQUESTS_FAILED)
    assert requests.numbers["failed"] == sum(each["requests"] for each in load_of(report))
    assert requests.place.clients == (1, 2, 3)
    assert sum(requests.numbers[name] for name in requests.names) == requests.numbers["failed"]
    assert set(requests.names) == {name for each in load_of(report) for name in each["errors"]}


def test_only_what_happens_under_load_is_wrong_is_caught(served, bundles):
    """Right for one client at a time, and mixed up when requests overlap: the reason to test under load."""
    busy = threading.Semaphore(1)
    mixed = threading.Event()

    def before(number):
        if not busy.acquire(blocking=False):
            mixed.set()
        else:
            threading.Event().wait(0.002)
            busy.release()

    def after(outputs):
        if mixed.is_set():
            mixed.clear()
            return {name: np.roll(array, 1, axis=-1) for name, array in outputs.items()}
        return outputs

    server = served("tiny-gqa", before=before, after=after)
    report = md.validate(bundles("tiny-gqa"), url=server.url, clients=(1, 8), requests=20, probe=False)
    one, eight = load_of(report)
    assert one["wrong"] == 0
    assert eight["wrong"] > 0
    assert not report.passed


def test_one_wrong_answer_fails_among_many_that_prove_nothing(served, tmp_path):
    """The output is always zero: right answers verify nothing, and no number says how wrong the other is."""
    answers = itertools.count()

    def after(outputs):
        wrong = next(answers) == 20
        return {name: np.full_like(x, np.nan) if wrong else x for name, x in outputs.items()}

    factory = f"{Path(__file__).parents[1] / 'edge_models.py'}:zero_head"
    bundle = md.export(factory, tmp_path / "bundle")
    server = served("zero_head", bundle=bundle, after=after)
    report = md.validate(bundle, url=server.url, clients=(1,), requests=80, probe=False)
    assert next(answers) > 21
    assert report.outcome is Outcome.FAILED, report.headline


def test_a_model_of_fixed_sizes_passes(served, tmp_path):
    bundle = md.export("tiny-mha", tmp_path / "bundle", axes={"B": 2, "S": 16})
    report = md.validate(bundle, url=served("tiny-mha", bundle=bundle).url, clients=(1,), requests=8)
    assert report.passed, report.headline
    assert all(each["verdicts"] for each in report.to_dict()["parity"])


def test_errors_are_counted_and_fail(served, bundles):
    def before(number):
        if number > 12 and number % 5 == 0:
            raise RuntimeError("the connection is dropped")

    server = served("tiny-gqa", before=before)
    report = md.validate(bundles("tiny-gqa"), url=server.url, clients=(2,), requests=20, probe=False)
    assert not report.passed
    (point,) = load_of(report)
    assert point["errors"]
    assert point["answered"] < point["requests"]
    assert point["first_error"]


def test_a_server_that_does_not_answer_is_a_verdict(served, bundles):
    stop = threading.Event()

    def before(number):
        if number > 12:
            stop.wait(20)

    server = served("tiny-gqa", before=before)
    report = md.validate(
        bundles("tiny-gqa"), url=server.url, clients=(2,), requests=12, timeout_s=0.1, probe=False
    )
    stop.set()
    assert not report.passed
    (point,) = load_of(report)
    assert point["errors"]["timeout"] > 0
    assert "did not answer within 0.1 s" in point["first_error"]


def test_a_server_that_goes_away_ends_the_load(served, bundles):
    """What was answered is still judged, and the larger loads are not tried."""

    def before(number):
        if number == 20:
            threading.Thread(target=lambda: (server.shutdown(), server.server_close())).start()
        if number > 20:
            raise ConnectionError("gone")

    server = served("tiny-gqa", before=before)
    report = md.validate(
        bundles("tiny-gqa"), url=server.url, clients=(2, 8), requests=400, timeout_s=5, probe=False
    )
    assert not report.passed
    (point,) = load_of(report)
    assert point["errors"].get("not sent", 0) > 0
    assert 0 < point["answered"] < 25
    assert any(each.section == "serving" and each.level == "failure" for each in report.findings)


@pytest.mark.parametrize(
    "url", ["ftp://host:1", "grpc://host", "http://host:x", "grpc://h:1/a/b/c", "host:1"]
)
def test_a_url_that_is_none_is_refused(refused, bundles, url):
    refused("validate", bundles("tiny-gqa").path, "--url", url, what="URL", hint="grpc://HOST:PORT")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_that_is_not_there_is_unavailable(refused, bundles, scheme):
    url = f"{scheme}://127.0.0.1:9"
    refused("validate", bundles("tiny-gqa").path, "--url", url, what="cannot be reached", code=3)


def test_a_model_that_is_not_served_is_unavailable(served, refused, bundles):
    server = served("tiny-gqa")
    refused("validate", bundles("tiny-padding").path, "--url", server.url, what="no such model", code=3)


@pytest.mark.parametrize(
    "options",
    [
        ("--runtime", "ort-cpu"),
        ("--engine", "e"),
        ("--latency",),
        ("--require-fused",),
        ("--conformance",),
        ("--graph", "g.onnx"),
    ],
)
def test_what_is_not_for_a_server_is_refused(refused, bundles, options):
    command = ("validate", bundles("tiny-gqa").path, "--url", "grpc://h:1", *options)
    refused(*command, what="in place of the runtimes", got=options[0])


def test_a_server_cannot_be_mutated(refused, bundles):
    command = ("validate", bundles("tiny-gqa").path, "--url", "grpc://h:1", "--self-test")
    refused(*command, what="mutates the graph", got="--url")


def test_an_attention_that_no_output_shows_is_not_verified_by_a_server(served, bundles, tmp_path):
    folder = shutil.copytree(bundles("tiny-gqa").path, tmp_path / "hidden")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["observed"][0] |= {"shown": [], "hidden": ["zero"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    bundle = md.open_bundle(folder)
    server = served("tiny-gqa", bundle=bundle)
    report = md.validate(bundle, url=server.url, clients=(1,), requests=1, probe=False)
    assert report.outcome == "not verified"
    assert [gap.kind for gap in report.validation.not_verified] == [Kind.ATTENTION_NOT_OBSERVED]
    assert "the outputs do not show: zero" in report.headline


@pytest.mark.parametrize("option", [True, False])
def test_sizes_that_a_server_did_not_get_fail_where_coverage_is_required(served, bundles, option):
    server, options = served("tiny-gqa"), {"clients": (1,), "requests": 1, "probe": False}
    if option:
        options["require_coverage"] = True
    else:
        options["requirements"] = {"require_coverage": True}
    report = md.validate(bundles("tiny-gqa"), url=server.url, **options)
    assert report.outcome == "failed"
    (finding,) = [each for each in report.findings if each.level == "failure"]
    assert finding.kind is Kind.NOT_COVERED
    assert not md.validate(bundles("tiny-gqa"), url=server.url, clients=(1,), requests=1).findings
