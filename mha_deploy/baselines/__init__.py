"""What a deployed layer is compared with: the same layer in PyTorch, with the bundle's own weights."""
