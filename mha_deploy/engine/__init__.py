"""From a bundle to an engine that is known to be fused and in the precision asked for. Needs no PyTorch."""
