"""Whether an upgrade made something worse: comparison, rebuild variance, matrix, benchmark record."""
