"""A catalog layer: export it, check it against TensorRT, validate it, run it.

A catalog model is one attention layer of the published shape, with random weights. Run:

    python examples/01_catalog_layer.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import mha_deploy as md

name = sys.argv[1] if len(sys.argv) > 1 else "tiny-mha"
out = Path(tempfile.mkdtemp()) / name

bundle = md.export(name, out, precision="fp16")
print("bundle:", bundle.path, "with golden cases", [case.name for case in bundle.manifest.golden])

for version in ("8.6", "10.3", "10.14"):
    for found in md.check(bundle, target="tensorrt", version=version):
        verdict = "fused" if found.fused_after_lowering else "not fused"
        print(f"TensorRT {version}: {found.node.name} is {verdict}")

report = md.validate(bundle)
print(f"{report.outcome}: {report.headline}")
print("report:", report.save_html(out / "report.html"))

with md.open_runner(bundle) as runner:
    feeds = {}
    for key, info in runner.inputs.items():
        shape = [dim if isinstance(dim, int) else 3 for dim in info.dims]  # 3 for every named axis
        feeds[key] = np.ones(shape, info.dtype)
    for key, array in runner.run(feeds).items():
        print(key, array.dtype, array.shape)
