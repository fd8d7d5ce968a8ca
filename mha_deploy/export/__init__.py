"""From a model spec to a bundle. Only `options` and `golden_plan` can be imported without PyTorch."""
