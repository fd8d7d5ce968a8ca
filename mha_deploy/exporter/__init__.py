"""From a model to a bundle. `entry`, `flow`, `fusion` and the import of ONNX files need no PyTorch."""
