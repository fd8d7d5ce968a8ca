"""From a bundle to an engine that is known to be fused and in the requested precision. Needs no PyTorch."""
