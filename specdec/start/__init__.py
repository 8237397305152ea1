"""The way from names and options to an engine that is ready."""
