"""Speed and memory of eviction, measured in processes that take turns: what ``llama-dge bench`` runs."""
