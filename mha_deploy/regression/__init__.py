"""Results beside each other: after an upgrade, over runtimes, over precisions, and over time."""
