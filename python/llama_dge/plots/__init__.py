"""Pictures of the results of ``llama-dge eval``."""
