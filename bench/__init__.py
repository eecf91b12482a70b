"""Benchmarks of single parts, beside ``llama-dge bench``: ``python -m bench.memory --help``, docs/benchmarks.md."""
