"""What can be deployed: attention layers of the catalog, own modules, precisions."""
