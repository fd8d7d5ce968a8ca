"""The folder on disk: manifest, graph, golden cases and decode traces, hashed and written atomically."""
