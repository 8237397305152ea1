"""What chooses tokens, and when a draft holds."""
