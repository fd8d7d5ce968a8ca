"""Which shapes does TensorRT run in INT8, how exact are they, and are they faster than FP16? On a GPU.

    python benchmarks/int8_on_gpu.py FOLDER [--jobs 8] [--limit 240] [SHAPE ...]

A shape is BATCH×LENGTH×HEADS×SIZE, as 8x128x12x64: one attention layer of that many tokens and heads. Each is
exported in FP16, with its GEMMs in INT8, and with its attention in INT8 as well; built by the installed
TensorRT; judged on its golden cases; and timed, one engine at a time. Exports and builds run side by side.
What is in FOLDER is not made again, so that exports can be made elsewhere (`--only export`).
FOLDER/int8.jsonl gets a line as soon as an engine was timed, FOLDER/int8.md the table.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from on_gpu import Results, bundle_folder, parser_of, processes, side_by_side

import mha_deploy as md
from mha_deploy.model.catalog import find_spec

SHAPES = (
    "8x128x12x64", "4x384x12x64", "2x512x4x64", "2x1024x4x64", "2x128x8x32", "2x128x8x16", "2x128x4x96",
    "2x128x4x128",
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "int8": {"precision": "int8"},
    "int8, attention too": {"precision": "int8", "quantize_attention": True},
}


def export(folder: Path, shape: str, kind: str) -> None:
    """One layer in one precision."""
    out = bundle_folder(folder, shape, kind)
    if (out / "manifest.json").is_file():
        return
    batch, length, heads, size = map(int, shape.split("x"))
    layer = dataclasses.replace(
        find_spec("bert-base"), name=f"layer-{heads}x{size}", Hq=heads, Hkv=heads, D=size, E=heads * size
    )
    axes = {"B": f"{batch}", "S": f"{length}"}
    md.export(layer, out, axes=axes, golden=("opt",), overwrite=True, **KINDS[kind])


def build(folder: Path, shape: str, kind: str) -> None:
    """An engine of it, by the installed TensorRT."""
    md.configure(trust_code=True)
    out = bundle_folder(folder, shape, kind)
    if not (out / "engines" / "int8-trial.engine").is_file():
        md.build_engine(out, backend="tensorrt", name="int8-trial", overwrite=True)


def measured(folder: Path, shape: str, kind: str) -> list[dict[str, Any]]:
    """Verdicts, error, loss and p50."""
    out = bundle_folder(folder, shape, kind)
    bundle = md.open_bundle(out)
    engine = md.open_engine(out / "engines" / "int8-trial.engine")
    verdict = engine.manifest.verdict
    report = md.validate(bundle, runtimes=["int8-trial"], latency=True, sweep=False)
    data = report.to_dict()
    points = (data["latency"] or {"points": []})["points"]
    rows = [row for point in points for row in point["rows"] if row["timing"]]
    worst = max((each["share"] for each in data["parity"] if each.get("share") is not None), default=None)
    loss = data.get("loss") or {}
    fused, count = verdict.fused_count
    line = {
        "shape": shape, "kind": kind, "tensorrt": engine.manifest.version, "gpu": engine.manifest.gpu,
        "fused": f"{fused}/{count}", "precision": str(verdict.precision.status.value),
        "gemms": verdict.precision.quantized, "attentions": verdict.precision.quantized_attentions,
        "not_quantized": [each.what for each in verdict.precision.not_quantized],
        "kernels": [name for node in verdict.nodes for name in node.kernels],
        "outcome": str(report.outcome), "headline": report.headline, "share": worst, "loss": loss.get("loss"),
        "p50_us": min((row["timing"]["p50_us"] for row in rows), default=None),
    }  # fmt: skip
    return [line]


def table(lines: list[dict[str, Any]]) -> str:
    """As Markdown: a row for each shape and kind, the time beside that of FP16."""
    times = {each["shape"]: each.get("p50_us") for each in lines if each["kind"] == "fp16"}
    text = [
        "| batch × length × heads × size | what is in INT8 | fused | GEMMs read | attention reads | outcome "
        "| share of budget | loss | p50 µs | FP16 / this |",
        "|---|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for each in lines:
        if "error" in each:
            text.append(f"| {each['shape']} | {each['kind']} | {each['error']} |  |  |  |  |  |  |  |")
            continue
        other = [f"{name} not" for name in each["not_quantized"]]
        gemms = ", ".join([*(f"{dtype}: {n}" for dtype, n in each["gemms"].items()), *other]) or "–"
        inside = ", ".join(f"{dtype}: {n}" for dtype, n in each["attentions"].items()) or "–"
        base, own = times.get(each["shape"]), each["p50_us"]
        ratio = f"{base / own:.2f}" if base and own else "–"
        numbers = [
            "–" if each[name] is None else format(each[name], how)
            for name, how in (("share", ".2f"), ("loss", ".1e"), ("p50_us", ".1f"))
        ]
        text.append(
            f"| {each['shape']} | {each['kind']} | {each['fused']} | {gemms} | {inside} | "
            f"{each['outcome']} | {' | '.join(numbers)} | {ratio} |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    """Export, build, then measure one by one."""
    parser = parser_of(__doc__, jobs=8, limit=240.0)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--only", choices=("export", "build", "all"), default="all")
    chosen = parser.parse_intermixed_args()
    md.configure(trust_code=True)
    results = Results(chosen.folder, "int8", table, chosen.limit)
    todo = [(chosen.folder, shape, kind) for shape in chosen.shapes for kind in KINDS]
    failed: dict[tuple[Any, ...], str] = {}
    with processes(chosen.jobs) as pool:
        for step in (export, build)[: 1 if chosen.only == "export" else 2]:
            for each, error in side_by_side(pool, step, [each for each in todo if each not in failed]):
                if error is not None:
                    failed[each] = f"{step.__name__}: {getattr(error, 'in_one_line', error)}"
                    print(each[1:], failed[each], flush=True)
            print(f"{step.__name__}: {results.seconds:.0f} s", flush=True)
    if chosen.only != "all":
        return
    for each in todo:
        about = {"shape": each[1], "kind": each[2]}
        if each in failed:
            results.add([{**about, "error": failed[each]}])
        else:
            results.measure(about, measured, *each)
    print(table(results.lines))


if __name__ == "__main__":
    main()
