"""The graphs that serve a pass, and what a pass reads beside its arguments."""
