"""One tiny random model of every architecture: evicted exactly, or refused with a reason. See docs/testing.md."""
