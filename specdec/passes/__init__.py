"""Which graph serves a pass, and what a pass reads beside its arguments."""
