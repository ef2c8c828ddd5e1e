"""One frozen config per backend: what it can run, and what its passes assume."""
