"""A layer with a KV cache: export it, and validate it step by step against the FP64 oracle.

The bundle holds a decode trace: prompts, the tokens that follow them, and the expected results. Run:

    python examples/05_decode.py [MODEL]

`tiny-dynamic` has a dynamic cache (past in, present out), `tiny-preallocated` a preallocated one.
"""

import sys
import tempfile
from pathlib import Path

import mha_deploy as md

name = sys.argv[1] if len(sys.argv) > 1 else "tiny-dynamic"
model = md.load_model(name)
print(
    f"{model.name}: cache {model.source.cache}, axes",
    {key: str(axis) for key, axis in model.source.axes.items()},
)

bundle = md.export(model, Path(tempfile.mkdtemp()) / name, precision="fp16")
print("golden cases:", [case.name for case in bundle.manifest.golden])
print("decode traces:", [trace.name for trace in bundle.manifest.traces])

with md.open_runner(bundle) as runner:
    print("inputs:", {key: info.dims for key, info in runner.inputs.items()})
    print("outputs:", {key: info.dims for key, info in runner.outputs.items()})

# The trace of the bundle, and a new one with 8 steps.
report = md.validate(bundle, steps=8, prompt=5, batch=2)
print(f"{report.outcome}: {report.headline}")
for trace in report.record.decode:
    print(f"{trace.runtime}: {trace.trace}: {trace.outcome}")
