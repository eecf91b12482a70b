"""One tiny random model of every architecture: cut exactly, or refused with a reason. See docs/testing.md."""
