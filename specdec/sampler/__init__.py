"""The choice of tokens, and the rules by which drafts hold."""
