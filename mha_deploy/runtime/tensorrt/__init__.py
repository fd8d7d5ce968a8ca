"""TensorRT 8.6 to 11 and TensorRT-RTX: `builder.py` builds an engine, `engine_runner.py` runs it.

`engine_verdict.py` judges it by its kernels, which `kernels.py` reads; `versions.py` holds what the versions
differ in, probed by name.
"""
