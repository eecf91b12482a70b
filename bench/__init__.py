"""Speed and memory of a cut, as ratios of paired runs: ``python -m bench --help``, docs/benchmarks.md."""
