"""Sessions of coding agents played against a live endpoint, and what came of every request."""
