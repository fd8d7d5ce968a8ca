"""From a bundle to an inference server: the repository that is written, and the model inside it."""
