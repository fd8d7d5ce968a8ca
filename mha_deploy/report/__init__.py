"""The result of a run as a file for machines and a page for people. Needs no runtime."""
