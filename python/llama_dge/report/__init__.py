"""What a cut kept of a prompt, as data, as a page and as a picture."""
