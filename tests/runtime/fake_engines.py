"""Engines on a fake device, with the interface of every TensorRT that is kept."""

import json

from extract_trt_surfaces import EXTRACT
from tensorrt_fake import make_module

from mha_deploy.runtime.tensorrt.versions import wrap

KEPT = json.loads(EXTRACT.read_text())

VERSIONS = sorted(KEPT)


def fake(version="11.4.0"):
    backend = "tensorrt-rtx" if version.startswith("rtx") else "tensorrt"
    return wrap(make_module(KEPT[version]), backend)
