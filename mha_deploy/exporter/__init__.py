"""From a model to a bundle. Only `flow` and `onnx_import` can be imported without PyTorch."""
