"""What docs/serving.md says: the Kubernetes manifest keeps the schema of KServe's custom resource."""

import os
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

DOC = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
QUANTITY = {"anyOf": [NUMBER, TEXT], "pattern": r"^([0-9]+(\.[0-9]*)?)(([KMGTPE]i?)|m)?$"}


def record(required=(), **fields):
    return {"type": "object", "properties": fields, "required": list(required)}


# The fields of an InferenceService that a packaged model needs. KSERVE_CRD names the whole definition.
METRIC = record(
    ("metric", "target"),
    metric=record(backend={**TEXT, "enum": ["prometheus", "graphite"]}, query=TEXT, serverAddress=TEXT),
    target=record(type={**TEXT, "enum": ["Utilization", "Value", "AverageValue"]}, value=QUANTITY),
)
KINDS = {**TEXT, "enum": ["Resource", "External", "PodMetric"]}
SCHEMA = record(
    apiVersion=TEXT,
    kind=TEXT,
    metadata={"type": "object"},
    spec=record(
        ("predictor",),
        predictor=record(
            minReplicas=NUMBER,
            maxReplicas=NUMBER,
            autoScaling=record(
                metrics={"type": "array", "items": record(("type",), type=KINDS, external=METRIC)}
            ),
            nodeSelector={"type": "object", "additionalProperties": TEXT},
            model=record(
                ("modelFormat",),
                modelFormat=record(("name",), name=TEXT, version=TEXT),
                protocolVersion=TEXT,
                storageUri=TEXT,
                resources=record(limits={"type": "object", "additionalProperties": QUANTITY}),
            ),
        ),
    ),
)


def problems(value, schema, place="$"):
    """What a schema of Kubernetes does not take; unknown fields are dropped there, so they are wrong."""
    kinds = {
        "string": str,
        "integer": int,
        "boolean": bool,
        "object": dict,
        "array": list,
        "number": (int, float),
    }
    choices = schema.get("anyOf")
    if choices and all("type" in each for each in choices):
        if not any(isinstance(value, kinds[each["type"]]) for each in choices):
            yield f"{place}: {value!r} is of none of the types"
    elif "type" in schema and not isinstance(value, kinds[schema["type"]]):
        yield f"{place}: {value!r} is no {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{place}: {value!r} does not match"
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from problems(each, schema.get("items", {}), f"{place}[{index}]")
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{place}: {name} is missing"
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is None and "properties" in schema:
                yield f"{place}: there is no field {name}"
            elif isinstance(inner, dict):
                yield from problems(each, inner, f"{place}.{name}")


def manifest():
    (text,) = re.findall(r"```yaml\n(.*?)```", DOC.read_text(encoding="utf-8"), re.S)
    return yaml.safe_load(text)


def test_the_manifest_keeps_the_schema():
    assert list(problems(manifest(), SCHEMA)) == []


def test_the_manifest_keeps_the_definition_of_kserve():
    path = os.environ.get("KSERVE_CRD")
    if path is None:
        pytest.skip("KServe's definition of InferenceService is not here (KSERVE_CRD)")
    definition = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1beta1"]
    assert list(problems(manifest(), version["schema"]["openAPIV3Schema"])) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["spec"]["predictor"].update(minReplica=1), "no field minReplica"),
        (lambda m: m["spec"]["predictor"].update(maxReplicas="8"), "is no integer"),
        (lambda m: m["spec"].pop("predictor"), "predictor is missing"),
        (lambda m: m["spec"]["predictor"]["autoScaling"]["metrics"][0].update(type="Queue"), "not one of"),
        (
            lambda m: m["spec"]["predictor"]["model"]["resources"]["limits"].update(memory="16 GB"),
            "not match",
        ),
    ],
)
def test_a_wrong_manifest_is_seen(change, message):
    spoiled = manifest()
    change(spoiled)
    assert message in "; ".join(problems(spoiled, SCHEMA))


def test_the_commands_of_the_page_exist(run_cli):
    """Every option that the page names is one of the command that it is shown with."""
    text = DOC.read_text(encoding="utf-8")
    for verb, names in {
        "package": ("--triton", "--variant", "--runtime", "--max-batch", "--queue-delay-us", "--sequences",
                    "--instances", "--allow-failed", "--overwrite"),
        "validate": ("--url", "--clients", "--timeout"),
        "bench": ("--streams",),
    }.items():  # fmt: skip
        shown = run_cli(verb, "--help").out
        for name in names:
            assert name in text, name
            assert name in shown, name
