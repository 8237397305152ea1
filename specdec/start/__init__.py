"""From names and options to an engine that is ready."""
