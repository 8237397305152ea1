"""A caller's requests and what they get. No torch."""
