"""The energy of requests to language models: their phases, its division, and its totals."""
