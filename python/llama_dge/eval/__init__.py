"""Evaluation: many settings of eviction against the full cache, from one prefill per prompt."""
